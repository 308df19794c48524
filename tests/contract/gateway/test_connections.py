"""HTTP connections by themselves, in front of an app that says what it was asked."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from starlette.types import Receive, Scope, Send

from services.gateway.errors import ApiError
from services.gateway.http.connection import HttpConnection, RejectedRequest
from services.gateway.http.server import HttpServer
from tests.contract.gateway.conftest import until

GET = b"GET /echo HTTP/1.1\r\nhost: x\r\n\r\n"
OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n"
HELLO = {
    "length": b"content-length: 5\r\n\r\nhello",
    "chunks": b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
}
LARGE = 3_000_000


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """/echo reads the body and sends it back; /unread does not read it; /large waits, and answers with LARGE bytes."""
    body = b"unread"
    if scope["path"] == "/echo":
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message.get("more_body"):
                break
    elif scope["path"] == "/large":
        await asyncio.sleep(0.2)
        body = b"x" * LARGE
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


def turns_away(target: bytes, headers: object) -> RejectedRequest | None:
    return RejectedRequest(ApiError(429, "no room"), "id") if target == b"/full" else None


@pytest_asyncio.fixture(loop_scope="module")
async def server() -> AsyncIterator[HttpServer]:
    server = HttpServer(app, "127.0.0.1", 0, admission_hook=turns_away)
    yield server
    await server.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def connect(server: HttpServer) -> AsyncIterator[Connect]:
    port = await server.start()
    writers: list[asyncio.StreamWriter] = []

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2 * LARGE)
        writers.append(writer)
        return reader, writer

    yield connect
    for writer in writers:
        writer.close()


async def answer(reader: asyncio.StreamReader) -> bytes:
    """The body of the next one."""
    async with asyncio.timeout(10):
        head = await reader.readuntil(b"\r\n\r\n")
        return await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))


@pytest.mark.parametrize("body", HELLO.values(), ids=HELLO.keys())
@pytest.mark.parametrize("in_pieces", [False, True])
async def test_a_client_that_offers_another_protocol_is_served_in_this_one(
    connect: Connect, body: bytes, in_pieces: bool
) -> None:
    """Java's HttpClient does so with its first request, whatever it is, and sends the body at once."""
    reader, writer = await connect()
    for data in (b"POST /echo HTTP/1.1\r\nhost: x\r\n" + OFFER, body, GET):
        for i in range(len(data)) if in_pieces else ():
            writer.write(data[i : i + 1])
            await asyncio.sleep(0)
        if not in_pieces:
            writer.write(data)
    assert [await answer(reader) for _ in range(2)] == [b"hello", b""]


async def test_offers_may_be_pipelined(connect: Connect) -> None:
    reader, writer = await connect()
    writer.write(GET[:-2] + OFFER + b"\r\n" + b"POST /echo HTTP/1.1\r\n" + OFFER + HELLO["chunks"] + GET)
    assert [await answer(reader) for _ in range(3)] == [b"", b"hello", b""]


async def test_a_client_that_offers_another_protocol_may_be_refused_as_others_are(connect: Connect) -> None:
    reader, writer = await connect()
    writer.write(b"POST /full HTTP/1.1\r\nhost: x\r\n" + OFFER + HELLO["length"] + GET)
    assert b"no room" in await answer(reader)
    assert await answer(reader) == b""


async def test_what_is_broken_behind_an_offer_gets_a_400(connect: Connect) -> None:
    reader, writer = await connect()
    writer.write(b"POST /echo HTTP/1.1\r\nhost: x\r\n" + OFFER + b"transfer-encoding: chunked\r\n\r\nZZ\r\n")
    assert (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("aborts", [False, True])
async def test_nothing_is_left_of_a_connection_that_is_over(server: HttpServer, connect: Connect, aborts: bool) -> None:
    reader, writer = await connect()
    writer.write(GET)
    await answer(reader)
    [connection] = server._server.server_state.connections
    left = weakref.ref(connection)
    del connection
    if aborts:
        linger = (1).to_bytes(4, "little") + bytes(4)  # on, 0 s: a reset instead of a goodbye
        writer.get_extra_info("socket").setsockopt(1, 13, linger)
    writer.close()

    def nothing_is_left() -> bool:
        gc.collect()
        return left() is None

    await until(nothing_is_left)


async def test_the_last_answer_arrives_though_more_has_been_asked(
    server: HttpServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server._config, "closing", True)
    reader, writer = await connect()
    writer.write(GET.replace(b"echo", b"large") + GET + GET)
    await asyncio.sleep(0.05)
    writer.write(GET)  # which is not read any more
    await asyncio.sleep(0.4)
    assert len(await answer(reader)) == LARGE
    assert await reader.read() == b""


async def test_the_server_does_not_wait_for_the_head_of_what_was_refused(
    server: HttpServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server._config, "head_timeout_s", 0.3)
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
    reader, writer = await connect()
    writer.write(b"GET /echo HTTP/1.1\r\nhost: x\r\n")
    await asyncio.sleep(0.1)
    writer.write(b"broken\r\n\r\n")
    await asyncio.sleep(0.4)  # in which the head would be late
    assert (await reader.read()).count(b"HTTP/1.1 ") == 1
    assert not failures


async def test_a_body_that_was_not_read_does_not_stay_with_its_connection(server: HttpServer, connect: Connect) -> None:
    reader, writer = await connect()
    writer.write(b"POST /unread HTTP/1.1\r\nhost: x\r\ncontent-length: 60000\r\n\r\n" + b"z" * 60_000)
    assert await answer(reader) == b"unread"
    (connection,) = server._server.server_state.connections
    assert isinstance(connection, HttpConnection)
    await until(lambda: connection.body_is_here)
    assert not connection.cycle.body


async def test_what_is_dropped_of_a_large_body_is_read_with_pauses(
    server: HttpServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = []
    pause = HttpConnection._drop

    def watched(self: HttpConnection, num_bytes: int) -> None:
        pause(self, num_bytes)
        pauses.append((num_bytes >= 64 * 1024, self.flow.read_paused))

    monkeypatch.setattr(HttpConnection, "_drop", watched)
    reader, writer = await connect()
    writer.write(b"POST /full HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % 2**22)
    assert b"no room" in await answer(reader)
    writer.write(bytes(2**22) + GET)
    assert await answer(reader) == b""  # the next request is served
    assert (True, True) in pauses
    assert all(is_large == is_paused for is_large, is_paused in pauses)
