"""Which connections the listener accepts, and which it drops."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from collections.abc import AsyncIterator, Callable

import pytest

from services.gateway.http.listener import ConnectionCounts, Listener, client_of, has_gone

COSTLY = b"POST /slow "
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells at once that a client has gone")


class Protocol(asyncio.Protocol):
    def __init__(self, heard: list[bytes], connections: set[Protocol], on_lost: Callable[[], None]) -> None:
        self.heard = heard
        self.open = connections
        self.on_lost = on_lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.open.add(self)
        self.heard.append(b"hello")

    def connection_lost(self, exc: Exception | None) -> None:
        self.open.discard(self)
        self.on_lost()

    def data_received(self, data: bytes) -> None:
        self.heard.append(data)


class Running:
    """`heard`: a hello for each accepted connection, and its data. `gone`: how many connections were dropped."""

    def __init__(self) -> None:
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.sock.setblocking(False)
        self.heard: list[bytes] = []
        self.open: set[Protocol] = set()
        self.gone = 0
        self.clients = ConnectionCounts(400)
        self.listener = Listener(
            self.sock,
            lambda _, client: Protocol(self.heard, self.open, lambda: self.clients.leave(client)),
            self.clients,
            refusal=b"too many",
            costly=(COSTLY,),
            on_gone=self.count,
        )
        self.address = self.sock.getsockname()
        self.listener.start(4096)

    def count(self) -> None:
        self.gone += 1

    def client(self, data: bytes = b"") -> socket.socket:
        """A connection in the kernel's queue. The event loop does not run meanwhile."""
        connection = socket.create_connection(self.address)
        connection.sendall(data)
        return connection


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - any condition
            await asyncio.sleep(0.002)


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    server = Running()
    yield server
    server.listener.close()
    await server.listener.wait_closed()
    await until(lambda: not server.open)  # the loop ends here, and would leave them


async def test_many_are_taken_in_in_few_turns_of_the_loop(running: Running) -> None:
    clients = [running.client() for _ in range(300)]
    turns = 0
    while len(running.heard) < 300:
        turns += 1
        await asyncio.sleep(0)
    assert turns < 100
    for client in clients:
        client.close()


@linux
async def test_a_costly_request_is_dropped_if_its_client_has_gone(running: Running) -> None:
    running.client(COSTLY + b"HTTP/1.1").close()
    running.client(b"GET /health").close()  # is heard, though the client never reads the answer
    stays = running.client(COSTLY + b"stays")
    await until(lambda: len(running.heard) >= 4)
    assert sorted(running.heard) == sorted([b"hello", b"hello", b"GET /health", COSTLY + b"stays"])
    assert running.gone == 1
    stays.close()


@linux
@pytest.mark.parametrize("reset", [False, True])
async def test_a_socket_tells_that_the_other_side_has_gone(reset: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
        assert not has_gone(ours)
        client.sendall(b"unread")
        if reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        await until(lambda: has_gone(ours))
        ours.close()
        assert has_gone(ours)


async def test_resets_before_they_are_taken_in_do_no_harm(running: Running) -> None:
    for _ in range(50):
        client = running.client()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    last = running.client(b"last")
    await until(lambda: b"last" in running.heard)
    assert running.heard.count(b"last") == 1
    assert running.gone == 0, "no client had sent a costly request"
    last.close()


async def test_close_accepts_the_connections_that_wait_in_the_kernel(running: Running) -> None:
    clients = [running.client(b"x") for _ in range(40)]
    running.listener.accept_all()
    running.listener.close()
    running.listener.close()
    await running.listener.wait_closed()
    await until(lambda: running.heard.count(b"x") == 40)
    with pytest.raises(ConnectionRefusedError):
        running.client()
    for client in clients:
        client.close()


async def test_out_of_files_it_tries_again(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.http.listener._OUT_OF_FILES_S", 0.01)
    accept, failures = socket.socket.accept, iter([OSError(24, "too many open files")] * 3)

    def failing(sock: socket.socket) -> tuple[socket.socket, object]:
        if (failure := next(failures, None)) is not None:
            raise failure
        return accept(sock)

    monkeypatch.setattr(socket.socket, "accept", failing)
    client = running.client(b"x")
    await until(lambda: b"x" in running.heard)
    assert next(failures, None) is None
    client.close()


async def test_a_client_has_as_many_connections_as_it_may_have(running: Running) -> None:
    running.clients.most = 3
    clients = [running.client() for _ in range(3)]
    await until(lambda: len(running.open) == 3)
    refused = [running.client(data) for data in (b"", b"GET / HTTP/1.1\r\n" * 50)]
    loop = asyncio.get_running_loop()
    for client in refused:
        client.setblocking(False)
        async with asyncio.timeout(20):
            assert await loop.sock_recv(client, 99) == b"too many"
            assert await loop.sock_recv(client, 99) == b""
    clients.pop().close()
    await until(lambda: len(running.open) == 2)
    clients.append(running.client())
    await until(lambda: len(running.open) == 3)
    for client in clients + refused:
        client.close()


def test_clients_are_told_apart_by_what_they_cannot_choose() -> None:
    names = [
        client_of(host)
        for host in ("10.0.0.1", "::ffff:10.0.0.1", "2001:db8:1:2:3::4", "2001:db8:1:2:f::", "fe80::1%eth0")
    ]
    assert names == ["10.0.0.1", "10.0.0.1", "2001:db8:1:2::/64", "2001:db8:1:2::/64", "fe80::/64"]


def test_the_client_with_the_most_connections() -> None:
    clients = ConnectionCounts(3)
    assert clients.largest(but="a") is None
    for name in "aabbb":
        assert clients.enter(name)
    assert not clients.enter("b")
    assert [clients.largest(but=name) for name in "abc"] == ["b", None, "b"]
    clients.leave("b")
    assert clients.largest(but="a") is None
    assert clients.enter("b")
