"""Clients that read their answers slowly, or not at all."""

from __future__ import annotations

import asyncio
import socket

import pytest

from services.gateway import http_server, server
from services.gateway.metrics import GatewayMetrics
from tests.contract.gateway.conftest import Running, Start

LARGE = b"#" * 400_000


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's hold next to nothing, so that answers wait in the gateway."""
    bind = http_server._bind

    def small(host: str, port: int) -> socket.socket:
        sock = bind(host, port)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return sock

    monkeypatch.setattr(http_server, "_bind", small)


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
    """An answer that is written in one piece; returns when it is on its way."""
    with monkeypatch.context() as patch:
        patch.setattr(GatewayMetrics, "exposition", lambda metrics: LARGE)
        sock = await ask(running, b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
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
