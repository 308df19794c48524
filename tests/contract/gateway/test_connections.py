"""HTTP connections without a gateway, with and without TLS, in front of a small app that echoes requests."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from starlette.types import Receive, Scope, Send

from services.gateway.http import server as http_server
from services.gateway.http.connection import HttpConnection
from services.gateway.http.server import HttpServer
from services.gateway.http.slow_clients import Reader
from tests.contract.gateway.conftest import until
from tests.support.certificates import make_certificates, server_tls, trusting

GET = b"GET /echo HTTP/1.1\r\nhost: x\r\n\r\n"
OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n"
HELLO = {
    "length": b"content-length: 5\r\n\r\nhello",
    "chunks": b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
}
LARGE = 3_000_000
PIECES = [b"x" * 4096] * 50


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """/echo reads the body and sends it back; /full answers 429 without reading it; /large answers late with LARGE;
    /pieces answers with PIECES in one turn of the event loop."""
    body = b"no room"
    if scope["path"] == "/echo":
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message.get("more_body"):
                break
    elif scope["path"] == "/large":
        await asyncio.sleep(0.2)
        body = b"x" * LARGE
    elif scope["path"] == "/pieces":
        body = b"".join(PIECES)
    headers = [(b"content-length", str(len(body)).encode())]
    status = 429 if scope["path"] == "/full" else 200
    await send({"type": "http.response.start", "status": status, "headers": headers})
    for piece in PIECES if scope["path"] == "/pieces" else ():
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        body = b""
    await send({"type": "http.response.body", "body": body})


Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest_asyncio.fixture(loop_scope="module", params=["http", "https"])
async def server(request: pytest.FixtureRequest, certificates: Path) -> AsyncIterator[HttpServer]:
    tls = server_tls(certificates) if request.param == "https" else None
    server = HttpServer(app, "127.0.0.1", 0, tls=tls)
    yield server
    await server.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def connect(server: HttpServer, certificates: Path) -> AsyncIterator[Connect]:
    port = await server.start()
    context = trusting(certificates / "ca.pem") if server._tls is not None else None
    writers: list[asyncio.StreamWriter] = []

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2 * LARGE, ssl=context)
        writers.append(writer)
        return reader, writer

    yield connect
    for writer in writers:
        writer.close()


async def answer(reader: asyncio.StreamReader) -> bytes:
    """The body of the next answer."""
    async with asyncio.timeout(10):
        head = await reader.readuntil(b"\r\n\r\n")
        return await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))


class Recorded:
    """A transport that notes how much each write has."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self.writes = transport, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self.writes.append(len(data))
        self._transport.write(data)


async def recorded(server: HttpServer) -> Recorded:
    """The transport of the server's only connection."""
    await until(lambda: any(connection.is_open for connection in server.connections.open))
    (connection,) = server.connections.open
    transport = Recorded(connection.transport)
    connection.transport = transport  # type: ignore[assignment]
    return transport


async def test_writes_in_one_turn_are_sent_together(server: HttpServer, connect: Connect) -> None:
    reader, writer = await connect()
    transport = await recorded(server)
    writer.write(GET)
    assert await answer(reader) == b""
    writer.write(b"POST /echo HTTP/1.1\r\nhost: x\r\n" + HELLO["length"])
    assert await answer(reader) == b"hello"
    assert len(transport.writes) == 2


async def test_many_writes_in_one_turn_are_not_held_back(server: HttpServer, connect: Connect) -> None:
    reader, writer = await connect()
    transport = await recorded(server)
    writer.write(GET.replace(b"/echo", b"/pieces"))
    assert await answer(reader) == b"".join(PIECES)
    assert max(transport.writes) < 6 * len(PIECES[0])


async def test_an_answer_is_sent_before_the_connection_of_a_client_that_has_gone_closes(
    server: HttpServer, connect: Connect
) -> None:
    reader, writer = await connect()
    writer.write(GET)
    assert await answer(reader) == b""
    transport = await recorded(server)
    (connection,) = server.connections.open
    connection.write(b"answer")
    connection.eof_received()
    assert transport.writes == [6]


async def test_a_connection_with_an_unsent_answer_does_not_close_for_a_new_one(
    server: HttpServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At max_connections, a new connection may come in the turn of the event loop in which an answer is written, or
    while the client still reads it."""
    answered, has_closed = HttpConnection.answered, list[bool]()

    def evicted(self: HttpConnection) -> None:
        answered(self)
        has_closed.append(server.connections._evict(but="127.0.0.2"))

    monkeypatch.setattr(HttpConnection, "answered", evicted)
    reader, writer = await connect()
    writer.write(b"POST /echo HTTP/1.1\r\nhost: x\r\n" + HELLO["length"])
    assert await answer(reader) == b"hello"
    assert has_closed == [False]
    (connection,) = server.connections.open
    long = b"x" * 2**24  # more than the kernel takes
    connection.write(long)
    await asyncio.sleep(0)
    assert not server.connections._evict(but="127.0.0.2")
    assert await asyncio.wait_for(reader.readexactly(len(long)), 30) == long
    await until(lambda: not server.has_unsent)
    assert server.connections._evict(but="127.0.0.2")
    assert await asyncio.wait_for(reader.read(), 10) == b""


async def test_a_closed_socket_has_nothing_unsent(server: HttpServer, connect: Connect) -> None:
    """With TLS, the socket closes before the connection hears of it. A new connection may come between."""
    reader, writer = await connect()
    writer.write(GET)
    assert await answer(reader) == b""
    (connection,) = server.connections.open
    sock = socket.socket(fileno=os.dup(connection._sock.fileno()))
    sock.close()
    assert Reader(sock, connection.transport).num_unsent == 0


async def test_an_answer_that_waits_for_the_end_of_the_turn_counts_as_unsent(
    server: HttpServer, connect: Connect
) -> None:
    """A server that stops waits for such answers."""
    reader, writer = await connect()
    writer.write(GET)
    assert await answer(reader) == b""
    await until(lambda: not server.has_unsent)
    (connection,) = server.connections.open
    connection.write(b"answer")
    assert server.has_unsent
    assert connection.num_unsent == 6
    assert await asyncio.wait_for(reader.readexactly(6), 10) == b"answer"
    await until(lambda: not server.has_unsent)


async def test_the_error_of_a_request_comes_after_the_answer_to_the_one_before(connect: Connect) -> None:
    reader, writer = await connect()
    writer.write(GET + b"\0\0\0")
    assert await answer(reader) == b""
    assert (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("body", HELLO.values(), ids=HELLO.keys())
@pytest.mark.parametrize("in_pieces", [False, True])
async def test_a_client_that_offers_an_upgrade_is_served_over_http_1(
    connect: Connect, body: bytes, in_pieces: bool
) -> None:
    """Java's HttpClient offers h2c with its first request, also with a POST, and sends the body at once."""
    reader, writer = await connect()
    ends = body == HELLO["chunks"]  # the server closes the connection after a chunked body
    for data in (b"POST /echo HTTP/1.1\r\nhost: x\r\n" + OFFER, body, b"" if ends else GET):
        for i in range(len(data)) if in_pieces else ():
            writer.write(data[i : i + 1])
            await asyncio.sleep(0)
        if not in_pieces:
            writer.write(data)
    assert [await answer(reader) for _ in range(1 if ends else 2)] == [b"hello", b""][: 1 if ends else 2]


async def test_upgrade_offers_may_be_pipelined(connect: Connect) -> None:
    reader, writer = await connect()
    writer.write(GET[:-2] + OFFER + b"\r\n" + b"POST /echo HTTP/1.1\r\n" + OFFER + HELLO["length"] + GET)
    assert [await answer(reader) for _ in range(3)] == [b"", b"hello", b""]


async def test_a_request_with_an_upgrade_offer_can_be_refused(connect: Connect) -> None:
    reader, writer = await connect()
    writer.write(b"POST /full HTTP/1.1\r\nhost: x\r\n" + OFFER + HELLO["length"] + GET)
    assert b"no room" in await answer(reader)
    assert await answer(reader) == b""


async def test_a_broken_body_after_an_offer_gets_a_400(connect: Connect) -> None:
    reader, writer = await connect()
    writer.write(b"POST /echo HTTP/1.1\r\nhost: x\r\n" + OFFER + b"transfer-encoding: chunked\r\n\r\nZZ\r\n")
    assert (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("aborts", [False, True])
async def test_a_closed_connection_leaves_nothing_in_the_server(
    server: HttpServer, connect: Connect, aborts: bool
) -> None:
    reader, writer = await connect()
    writer.write(GET)
    await answer(reader)
    [connection] = server.connections.open
    left = weakref.ref(connection)
    del connection
    if aborts:
        linger = (1).to_bytes(4, "little") + bytes(4)  # linger on, for 0 s: close with a reset
        writer.get_extra_info("socket").setsockopt(1, 13, linger)
    writer.close()

    def nothing_is_left() -> bool:
        gc.collect()
        return left() is None

    await until(nothing_is_left)


async def test_the_last_answer_arrives_even_if_another_request_follows(
    server: HttpServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.connections, "closing", True)
    reader, writer = await connect()
    writer.write(GET.replace(b"echo", b"large") + GET + GET)
    await asyncio.sleep(0.05)
    writer.write(GET)  # the server does not read this request any more
    await asyncio.sleep(0.4)
    assert len(await answer(reader)) == LARGE
    assert await reader.read() == b""


async def test_the_server_does_not_wait_for_the_head_of_a_refused_request(
    server: HttpServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.connections, "head_timeout_s", 0.3)
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
    reader, writer = await connect()
    writer.write(b"GET /echo HTTP/1.1\r\nhost: x\r\n")
    await asyncio.sleep(0.1)
    writer.write(b"broken\r\n\r\n")
    await asyncio.sleep(0.4)  # longer than the limit for a head
    assert (await reader.read()).count(b"HTTP/1.1 ") == 1
    assert not failures


@pytest.mark.parametrize(("num_bytes", "stays"), [(60_000, True), (100_000, False)])
async def test_a_small_body_that_was_not_read_is_skipped(connect: Connect, num_bytes: int, stays: bool) -> None:
    reader, writer = await connect()
    writer.write(b"POST /full HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % num_bytes)
    assert await answer(reader) == b"no room"
    writer.write(b"z" * num_bytes + GET)
    if stays:
        assert await answer(reader) == b""
    assert not await reader.read() if not stays else not reader.at_eof()


async def test_after_a_refused_expect_header_the_connection_ends(connect: Connect) -> None:
    """The client may send the body or not, so the server could not tell where the next request begins."""
    reader, writer = await connect()
    writer.write(b"POST /full HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n")
    got = await asyncio.wait_for(reader.read(), 10)
    assert got.startswith(b"HTTP/1.1 429 ")
    assert b"\r\nconnection: close\r\n" in got


async def test_the_server_pauses_between_reads_of_a_large_body_that_it_drops(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = []
    drop = HttpConnection._drop

    def watched(self: HttpConnection, num_bytes: int) -> None:
        drop(self, num_bytes)
        pauses.append((num_bytes >= 64 * 1024, self._is_paused))

    monkeypatch.setattr(HttpConnection, "_drop", watched)
    reader, writer = await connect()
    writer.write(b"POST /full HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % 2**24)
    assert await answer(reader) == b"no room"
    writer.write(bytes(2**22))
    await writer.drain()
    await until(lambda: (True, True) in pauses)
    assert all(is_large == is_paused for is_large, is_paused in pauses)


@pytest.mark.parametrize("server", ["http"], indirect=True)
async def test_a_refused_connection_is_not_kept(server: HttpServer, connect: Connect) -> None:
    """Otherwise one client could use up all open files with connections above its limit."""
    server.connections.counts.most = 1
    await connect()
    for data in (b"", GET):
        reader, writer = await connect()
        writer.write(data)
        assert (await asyncio.wait_for(reader.readuntil(b"}}"), 10)).startswith(b"HTTP/1.1 429 ")
        await until(lambda: len(server.connections.open) == 1)


@pytest.mark.parametrize("server", ["http"], indirect=True)
async def test_one_turn_of_the_event_loop_accepts_several_connections(server: HttpServer, connect: Connect) -> None:
    """A turn accepts several connections, because thousands of abandoned ones may wait in the kernel."""
    await connect()
    port = server._sock.getsockname()[1]
    waiting = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
    turns = 0
    while len(server.connections.open) < 201:
        turns += 1
        await asyncio.sleep(0)
    assert turns < 100
    for sock in waiting:
        sock.close()


@pytest.mark.parametrize("server", ["http"], indirect=True)
async def test_a_closing_server_serves_the_connections_that_wait_in_the_kernel(
    server: HttpServer, connect: Connect
) -> None:
    await connect()
    port, loop = server._sock.getsockname()[1], asyncio.get_running_loop()
    waiting = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
    for sock in waiting:
        sock.sendall(GET)
        sock.setblocking(False)
    await server.close_listener()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    for sock in waiting:
        async with asyncio.timeout(10):
            got = await loop.sock_recv(sock, 1000)
        assert got.startswith(b"HTTP/1.1 200 ")
        assert b"\r\nconnection: close\r\n" in got
        sock.close()


@pytest.mark.parametrize(("open_files", "most"), [(256, 128), (1024, 512), (2048, 1280)])
async def test_a_process_with_a_low_file_limit_accepts_connections(
    monkeypatch: pytest.MonkeyPatch, open_files: int, most: int
) -> None:
    """A quarter of the files is for gRPC. A quarter, but at most 256 files, is for other uses."""
    monkeypatch.setattr(http_server, "max_open_files", lambda: open_files)
    edge = HttpServer(lambda *_: asyncio.sleep(0), "127.0.0.1", 0, other_connections=open_files // 4)
    assert edge.connections.most == most
