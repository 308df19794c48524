"""A client that sends its next request before it has the answer to the one before (HTTP/1.1 pipelining)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from services.gateway.http import connection as http_connection
from tests.contract.gateway.conftest import Running, Start, until

HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
BROKEN = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\n"
LAST_CHUNK = b"0\r\n\r\n"


def completion(**options: Any) -> bytes:
    body = json.dumps({"prompt": "x", "ignore_eos": True, **options}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


async def connect(running: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*str(running.addresses.http).split(":"))


def num_served() -> int:
    """How many requests the gateway in this event loop serves: each has a task."""
    return sum("run_asgi" in repr(task.get_coro()) for task in asyncio.all_tasks())


async def test_pipelined_requests_are_answered_in_their_order(start: Start) -> None:
    running = await start(step_s=0.01)
    reader, writer = await connect(running)
    writer.write(completion(max_tokens=20, stream=True) + HEALTH + completion(max_tokens=5, stream=True))
    assert b"[DONE]" in await asyncio.wait_for(reader.readuntil(LAST_CHUNK), 20)
    assert b'"status"' in await asyncio.wait_for(reader.readuntil(b"}"), 20)
    assert b"[DONE]" in await asyncio.wait_for(reader.readuntil(LAST_CHUNK), 20)
    writer.close()


LARGE = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 200000\r\n\r\n" + b" " * 150_000


@pytest.mark.parametrize("aborts", [True, False])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("behind", [HEALTH, HEALTH + HEALTH, LARGE], ids=["one", "two", "large"])
async def test_a_disconnect_is_noticed_behind_a_pipelined_request(
    start: Start, aborts: bool, stream: bool, behind: bytes
) -> None:
    running = await start(step_s=0.1, settings={"send_timeout_s": 2.0})
    _, writer = await connect(running)
    writer.write(completion(max_tokens=2000, stream=stream))
    await until(lambda: running.scheduler.num_running > 0)
    writer.write(behind)
    await asyncio.sleep(0.2)
    if aborts:
        writer.transport.abort()
    else:
        writer.close()
    await until(lambda: running.scheduler.num_running == 0)
    await until(lambda: num_served() == 0)


async def test_a_client_that_disconnects_with_a_pipelined_request_leaves_nothing(start: Start) -> None:
    running = await start(settings={"max_bodies_bytes": 1 << 30})
    for _ in range(5):
        _, writer = await connect(running)
        await asyncio.sleep(0.02)  # or the connection is reset before it is accepted
        writer.write(completion(max_tokens=5) + HEALTH)
        writer.transport.abort()
    await until(lambda: num_served() == 0)


@pytest.mark.parametrize("broken", [BROKEN, HEALTH + BROKEN, HEALTH + b"\0\0\0"], ids=["body", "third", "garbage"])
async def test_a_broken_request_behind_a_stream_is_not_answered_inside_the_stream(start: Start, broken: bytes) -> None:
    running = await start(step_s=0.1, settings={"head_timeout_s": 0.5})
    reader, writer = await connect(running)
    writer.write(completion(max_tokens=10, stream=True))
    got = await reader.readuntil(b"data: ")
    writer.write(broken)
    async with asyncio.timeout(20):
        while LAST_CHUNK not in got and (part := await reader.read(65536)):
            got += part
    assert got.partition(LAST_CHUNK)[0].count(b"HTTP/1.1") == 1
    writer.close()


async def test_broken_data_behind_an_unanswered_request_gets_400(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Broken data behind a request gets its 400 after the answer. A broken body gets it at once."""
    running = await start(step_s=0.1)
    reader, writer = await connect(running)
    writer.write(completion(max_tokens=5))
    await until(lambda: running.scheduler.num_running > 0)
    writer.write(b"\0\0\0")
    got = await asyncio.wait_for(reader.read(), 20)
    assert [part[:3] for part in got.split(b"HTTP/1.1 ")[1:]] == [b"200", b"400"]
    writer.close()
    reader, writer = await connect(running)
    writer.write(BROKEN.replace(b"\r\n\r\n", b"\r\nexpect: 100-continue\r\n\r\n"))
    assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 400 ")
    await until(lambda: running.scheduler.num_running == 0)
    assert "Exception in ASGI application" not in caplog.text
    writer.close()


async def test_a_broken_body_after_100_continue_is_answered(start: Start) -> None:
    running = await start()
    reader, writer = await connect(running)
    writer.write(BROKEN[:-4].replace(b"\r\n\r\n", b"\r\nexpect: 100-continue\r\n\r\n"))
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20) == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b"ZZ\r\n")
    assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 400 ")
    writer.close()


async def test_a_broken_body_is_answered_however_much_of_it_there_is(start: Start) -> None:
    running = await start()
    reader, writer = await connect(running)
    writer.write(BROKEN[:-4] + b"%x\r\n%s\r\nZZ\r\n" % (100_000, b"x" * 100_000) + b"y" * 8_000_000)
    async with asyncio.timeout(20):
        assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 400 ")
        await writer.drain()
    writer.close()


async def test_pipelined_requests_wait_outside_uvicorn(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a client that sends requests without end fills the memory: uvicorn keeps an object for each."""
    running = await start(step_s=0.05)
    heads: list[bytes] = []
    connections: set[http_connection.HttpConnection] = set()
    feed = http_connection.HttpConnection._feed

    def watched(connection: http_connection.HttpConnection, data: bytes) -> None:
        heads.append(data)
        connections.add(connection)
        feed(connection, data)

    monkeypatch.setattr(http_connection.HttpConnection, "_feed", watched)
    reader, writer = await connect(running)
    writer.write(completion(max_tokens=5, stream=True) + HEALTH * 100_000)
    assert b"HTTP/1.1 200" in await asyncio.wait_for(reader.readuntil(b"data: "), 20)
    assert len(heads) == 2, "the head and the body of the first request"
    assert connections.pop()._is_paused, "the gateway does not read on"
    await asyncio.wait_for(reader.readuntil(LAST_CHUNK), 20)
    async with asyncio.timeout(20):
        for _ in range(100):
            assert b'"status"' in await reader.readuntil(b"}")
    writer.transport.abort()


async def test_a_request_behind_a_chunked_one_is_not_served(start: Start) -> None:
    """Only uvicorn's parser knows where chunks end. So the gateway answers with `connection: close`."""
    running = await start()
    reader, writer = await connect(running)
    chunks = b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n\r\n"
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n" + chunks + HEALTH * 1000)
    got = await asyncio.wait_for(reader.read(), 20)
    assert got.count(b"HTTP/1.1 ") == 1
    assert b"\r\nconnection: close\r\n" in got
    writer.close()


async def test_a_client_that_sends_without_end_is_read_as_fast_as_it_is_answered(start: Start) -> None:
    running = await start()
    reader, writer = await connect(running)
    for _ in range(20):
        writer.write(HEALTH * 40)
        got = b""
        async with asyncio.timeout(20):
            while got.count(b"HTTP/1.1 200") < 40:
                got += await reader.read(65536)
    writer.close()
