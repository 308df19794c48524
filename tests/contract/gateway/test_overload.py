"""A gateway spends as little as possible on requests that it cannot serve."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import sys
from typing import Any

import grpc
import pytest

from services.client import AsyncPacelineClient
from services.client.types import PacelineError
from services.gateway.admission.control import AdmissionControl
from services.gateway.http import connection as http_connection
from services.gateway.openai.gateway import Gateway
from services.gateway.text.tokenizer import TextTokenizer
from tests.contract.gateway.conftest import Running, Start, eventually, until, until_metrics

BODY: dict[str, Any] = {"prompt": "one two three", "max_tokens": 5, "ignore_eos": True}
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


def completion(**options: Any) -> bytes:
    content = json.dumps(BODY | options).encode()
    return HEAD % len(content) + content


def connect(running: Running, data: bytes = b"") -> socket.socket:
    """Connects through the kernel's queue. The gateway runs in this event loop, so it accepts only at an await."""
    assert running.addresses.http is not None
    host, port = running.addresses.http.split(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(data)
    return connection


async def answer(connection: socket.socket) -> bytes:
    """Reads one answer to its end, in any number of pieces."""
    connection.setblocking(False)
    loop, data, missing = asyncio.get_running_loop(), b"", 1
    async with asyncio.timeout(20):
        while missing > 0:
            data += await loop.sock_recv(connection, 65536)
            head, end, body = data.partition(b"\r\n\r\n")
            if end:
                missing = int(head.partition(b"content-length: ")[2].partition(b"\r")[0]) - len(body)
    return data


async def metric(running: Running, name: str) -> float:
    text = (await running.http.get("/metrics")).text
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tokenised prompts, without the empty prompts of :func:`full`."""
    texts: list[str] = []
    encode = TextTokenizer.encode

    def counted(self: TextTokenizer, text: str, **options: Any) -> list[int]:
        if text:
            texts.append(text)
        return encode(self, text, **options)

    monkeypatch.setattr(TextTokenizer, "encode", counted)
    return texts


async def until_status(running: Running, status: int, **options: Any) -> None:
    async def reached() -> bool:
        return (await running.http.post("/v1/completions", json=BODY | options)).status_code == status

    await eventually(reached)


async def full(running: Running) -> None:
    running.scheduler.set_full(True)
    await until_status(running, 429, prompt="")


async def test_a_full_queue_refuses_before_the_body_is_here(start: Start, encoded: list[str]) -> None:
    running = await start()
    await full(running)
    connection = connect(running, HEAD % 30)
    refused = await answer(connection)
    assert refused.startswith(b"HTTP/1.1 429 ")
    assert b"\r\nretry-after: 1\r\n" in refused
    assert b'"code":429,"reason":"rate_limit_exceeded"' in refused
    connection.sendall(b"{" * 30 + HEALTH)  # the gateway skips that body and keeps the connection
    assert (await answer(connection)).startswith(b"HTTP/1.1 200 ")
    connection.close()
    broken = await running.http.post("/v1/chat/completions", content=b"no JSON")
    assert broken.status_code == 429
    async with AsyncPacelineClient(running.addresses.grpc or "") as client:
        with pytest.raises(PacelineError) as caught:
            await client.generate("one two three", max_tokens=5)
    assert (caught.value.code, caught.value.retry_after_s) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 1.0)
    assert not encoded
    assert not running.scheduler.submissions
    running.scheduler.set_full(False)
    await until_status(running, 200)


async def test_simultaneous_requests_take_no_more_than_the_free_queue_positions(
    start: Start, encoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 requests come before the scheduler reports that its queue is full."""
    running = await start()
    # Otherwise the gateway assumes free positions again after a while without a report.
    monkeypatch.setattr(AdmissionControl, "tick", lambda control, now_s: None)
    running.scheduler.places = 3
    assert (
        await running.http.post("/v1/completions", json=BODY)
    ).status_code == 200  # now the gateway knows the number
    running.scheduler.paused = True
    connections = [connect(running, completion()) for _ in range(40)]
    first = [asyncio.create_task(answer(connection)) for connection in connections]
    await until(lambda: sum(task.done() for task in first) == 37)
    running.scheduler.paused = False
    statuses = sorted([(await task).split()[1] for task in first])
    assert statuses == [b"200"] * 3 + [b"429"] * 37
    assert len(encoded) == len(running.scheduler.submissions) == 1 + 3
    for connection in connections:
        connection.close()


async def test_a_cancelled_or_invalid_request_frees_its_queue_position(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start()
    monkeypatch.setattr(AdmissionControl, "tick", lambda control, now_s: None)
    running.scheduler.places = 1
    assert (await running.http.post("/v1/completions", json=BODY)).status_code == 200
    for _ in range(3):
        waits = connect(running, HEALTH)
        assert (await answer(waits)).startswith(b"HTTP/1.1 200 ")
        waits.sendall(HEAD % 30 + b"{")
        for _ in range(20):  # the gateway runs in this event loop and reads the body meanwhile
            await asyncio.sleep(0.001)
        await until_status(running, 429)
        waits.close()
        await until_status(running, 200)
        assert (await running.http.post("/v1/completions", content=b"no JSON")).status_code == 400
        headers = {"content-type": "text/plain"}
        assert (await running.http.post("/v1/completions", content=b"{}", headers=headers)).status_code == 415


async def test_a_body_that_does_not_come_frees_its_queue_position(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start()
    monkeypatch.setattr(AdmissionControl, "tick", lambda control, now_s: None)
    running.scheduler.places = 3
    assert (await running.http.post("/v1/completions", json=BODY)).status_code == 200
    slow = [connect(running, HEALTH) for _ in range(3)]
    for connection in slow:
        assert (await answer(connection)).startswith(b"HTTP/1.1 200 ")
    for connection in slow:
        connection.sendall(HEAD % 30 + b"{")
    try:
        await until_status(running, 429)
        await until_status(running, 200)
    finally:
        for connection in slow:
            connection.close()


async def test_a_refused_client_has_a_limited_time_to_send_its_body(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connection, "_REST_S", 0.5)
    running = await start()
    await full(running)
    connection = connect(running, HEAD % 1000)
    assert (await answer(connection)).startswith(b"HTTP/1.1 429 ")
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < 900:
            connection.sendall(b"x")
            sent += 1
            await asyncio.sleep(0.02)
    assert sent < 900, "the gateway waits for the body for ever"
    connection.close()


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_a_refused_request_with_connection_close_gets_its_429(start: Start, version: bytes) -> None:
    running = await start()
    await full(running)
    head = b"POST /v1/completions HTTP/%s\r\nconnection: close\r\nx-request-id: a b\r\ncontent-length: 4\r\n\r\n"
    connection = connect(running, head % version + b"{")
    refused = await answer(connection)
    assert refused.startswith(b"HTTP/1.1 429 ")
    assert b"\r\nx-request-id: ab\r\n" in refused
    assert b"\r\nconnection: close\r\n" in refused
    assert re.search(rb"\r\nretry-after-ms: \d+\r\n", refused)
    async with asyncio.timeout(20):
        assert not await asyncio.get_running_loop().sock_recv(connection, 1), "the gateway waited for the body"
    connection.close()


async def test_pipelined_requests_that_are_refused_are_answered_in_order(start: Start) -> None:
    """They come in one packet. The request behind them is served."""
    running = await start()
    await full(running)
    connection = connect(running, 3 * completion() + HEALTH)
    connection.setblocking(False)
    loop, data = asyncio.get_running_loop(), b""
    async with asyncio.timeout(20):
        while not data.endswith(b'{"status":"ok"}'):
            data += await loop.sock_recv(connection, 65536)
    assert re.findall(rb"HTTP/1.1 (\d+)", data) == [b"429"] * 3 + [b"200"]
    connection.close()


async def test_the_gateway_stops_reading_a_client_that_does_not_read_its_refusals(start: Start) -> None:
    """Otherwise the answers would fill the gateway's memory."""
    running = await start()
    await full(running)
    assert running.addresses.http is not None
    host, port = running.addresses.http.split(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.setblocking(False)
        many, sent, idle = 500 * completion(), 0, 0
        while idle < 50:
            try:
                sent += connection.send(many[sent % len(many) :])
                idle = 0
            except BlockingIOError:
                idle += 1
            await asyncio.sleep(0.001)
            assert sent < 64 * 2**20, "the gateway never stops reading"
        assert (await running.http.get("/health")).status_code == 200


async def test_a_full_queue_does_not_refuse_a_known_idempotency_key(start: Start, encoded: list[str]) -> None:
    running = await start()
    key = {"idempotency-key": "a", "x-request-id": "first"}
    first = await running.http.post("/v1/completions", json=BODY, headers=key)
    await full(running)
    again = await running.http.post("/v1/completions", json=BODY, headers=key)
    assert again.json()["choices"] == first.json()["choices"]
    assert len(running.scheduler.submissions) == 1
    unknown = await running.http.post("/v1/completions", json=BODY, headers={"idempotency-key": "b"})
    assert unknown.status_code == 429
    assert encoded == [BODY["prompt"]] * 2


async def test_requests_that_wait_for_their_turn_are_refused_when_the_queue_has_become_full(
    start: Start, encoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All requests had been accepted before the scheduler reported the full queue."""
    running = await start()
    turn = Gateway.wait_to_parse

    async def late(gateway: Gateway, *args: Any, **options: Any) -> None:
        status = gateway.session.status
        assert status is not None
        status.full = True
        await turn(gateway, *args, **options)

    monkeypatch.setattr(Gateway, "wait_to_parse", late)
    connections = [connect(running, completion()) for _ in range(20)]
    for connection in connections:
        assert (await answer(connection)).startswith(b"HTTP/1.1 429 ")
        connection.close()
    assert not encoded
    assert not running.scheduler.submissions


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells at once that a client has gone")
@pytest.mark.parametrize("before", [b"", HEALTH])
async def test_a_client_that_disconnects_before_its_turn_costs_no_tokenisation_and_no_submission(
    start: Start, encoded: list[str], before: bytes
) -> None:
    """The connection is new, or has served a request before."""
    running = await start()
    connections = [connect(running, before) for _ in range(50)]
    if before:
        for connection in connections:
            assert (await answer(connection)).startswith(b"HTTP/1.1 200 ")
    for connection in connections:
        connection.sendall(completion(stream=True))
        connection.close()
    served = await running.http.post("/v1/completions", json=BODY)
    assert served.status_code == 200

    async def counted() -> bool:
        return await metric(running, "paceline_gateway_gone_requests_total") == 50

    await eventually(counted)
    assert encoded == [BODY["prompt"]]
    assert len(running.scheduler.submissions) == 1
    await until_metrics(running, "paceline_gateway_live_requests 0.0")


async def test_the_gateways_own_429_says_when_a_position_will_be_free(start: Start) -> None:
    running = await start(settings={"max_live_requests": 2})
    async with asyncio.timeout(60):  # about two requests a second finish
        for _ in range(4):
            assert (await running.http.post("/v1/completions", json=BODY)).status_code == 200
            await asyncio.sleep(0.4)
    running.scheduler.paused = True
    tasks = [asyncio.create_task(running.http.post("/v1/completions", json=BODY)) for _ in range(2)]
    await until(lambda: running.scheduler.num_running == 2)
    told = await asyncio.gather(*(running.http.post("/v1/completions", json=BODY) for _ in range(40)))
    assert {response.status_code for response in told} == {429}
    seconds = sorted(int(response.headers["retry-after"]) for response in told)
    assert seconds[0] < seconds[20] < seconds[39], "each later client gets a later time"
    running.scheduler.paused = False
    assert [(await task).status_code for task in tasks] == [200, 200]


async def test_the_memory_of_unfinished_bodies_is_limited(start: Start) -> None:
    running = await start(settings={"max_bodies_bytes": 4096})
    slow = connect(running, HEAD % 9000 + b"x" * 3000)
    await until_status(running, 429, user="x" * 3000)
    assert (await running.http.post("/v1/completions", json=BODY)).status_code == 200, "there is room for a short one"
    slow.close()
    await until_status(running, 200, user="x" * 3000)


async def test_the_largest_unfinished_body_is_refused_first(start: Start) -> None:
    running = await start(settings={"max_bodies_bytes": 4096})
    slow = [connect(running, HEAD % 9000 + b"x" * num_bytes) for num_bytes in (700, 1900, 1400)]
    await asyncio.sleep(0.2)
    response = await running.http.post("/v1/completions", json=BODY | {"user": "x" * 1000})
    assert response.status_code == 200, "bodies that never end do not keep out a short one"
    assert (await answer(slow[1])).startswith(b"HTTP/1.1 429 ")
    for left in (slow[0], slow[2]):
        with pytest.raises(BlockingIOError):
            left.recv(1, socket.MSG_DONTWAIT)
    for connection in slow:
        connection.close()
