"""Clients that read their answers slowly, or not at all."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from services.gateway import server
from services.gateway.http import connection as http_connection
from services.gateway.http import server as http_server
from services.gateway.telemetry.metrics import GatewayMetrics
from tests.contract.gateway.conftest import Running, Start, until, until_metrics

BODY = {"prompt": "one two three", "max_tokens": 2000, "ignore_eos": True, "stream": True}
LARGE = b"#" * 400_000


pytestmark = pytest.mark.usefixtures("small_send_buffers")


async def ask(running: Running, request: bytes) -> socket.socket:
    assert running.addresses.http is not None
    host, port = running.addresses.http.split(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, (host, int(port)))
    await loop.sock_sendall(sock, request)
    return sock


async def ask_for_much(running: Running, monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    """Asks for a large answer, which is written in one piece. Returns when its first byte has come."""
    with monkeypatch.context() as patch:
        patch.setattr(GatewayMetrics, "exposition", lambda metrics: LARGE)
        sock = await ask(running, b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert await asyncio.get_running_loop().sock_recv(sock, 1) == b"H"
    return sock


async def read_all(sock: socket.socket, *, pause_s: float = 0.0) -> int:
    """Bytes up to the end of a large answer, or of the connection."""
    num_bytes = 0
    with sock:
        while num_bytes < len(LARGE) and (part := await asyncio.get_running_loop().sock_recv(sock, 8192)):
            num_bytes += len(part)
            await asyncio.sleep(pause_s)
    return num_bytes


async def test_a_client_that_does_not_read_a_stream_is_taken_to_have_gone(start: Start) -> None:
    running = await start(step_s=0.005, settings={"send_timeout_s": 0.3})
    content = json.dumps(BODY).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(content)
    sock = await ask(running, head + content)
    await until(lambda: len(running.scheduler.submissions) == 1)
    await until_metrics(running, "paceline_gateway_live_requests 0.0")
    assert len(running.scheduler.cancels) == 1
    assert await read_all(sock) < len(LARGE) / 2


async def test_a_client_that_does_not_read_a_finished_answer_is_cut_off(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, lost = await start(settings={"send_timeout_s": 0.1}), asyncio.Event()
    sock = await ask_for_much(running, monkeypatch)
    connection_lost = http_connection.HttpConnection.connection_lost

    def noted(protocol: http_connection.HttpConnection, error: Exception | None) -> None:
        connection_lost(protocol, error)
        lost.set()

    monkeypatch.setattr(http_connection.HttpConnection, "connection_lost", noted)
    async with asyncio.timeout(20):
        await lost.wait()
    assert await read_all(sock) < len(LARGE) / 2


async def test_a_client_that_reads_slowly_is_served_to_the_end(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    running = await start(settings={"send_timeout_s": 0.4})
    sock = await ask_for_much(running, monkeypatch)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    assert await read_all(sock, pause_s=0.01) >= len(LARGE)
    assert loop.time() - began_s > 2 * 0.4, "the client was not slow"


async def test_a_gateway_that_stops_waits_until_answers_were_read(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_IDLE_CONNECTIONS_S", 0.0)
    running, closing = await start(), asyncio.Event()
    stop = http_server.HttpServer.stop

    async def noted(http: http_server.HttpServer) -> None:
        closing.set()
        await stop(http)

    monkeypatch.setattr(http_server.HttpServer, "stop", noted)
    sock = await ask_for_much(running, monkeypatch)
    running.stop.set()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(closing.wait(), 0.3)
    assert await read_all(sock) >= len(LARGE)
    async with asyncio.timeout(10):
        await running.task
