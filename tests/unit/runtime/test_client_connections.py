"""The limit of gRPC connections of one client: a real gRPC server, and sockets from several addresses."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from services.runtime.grpc_limits import client_connections
from services.runtime.grpc_limits.client_connections import ClientConnections
from services.runtime.rpc import open_channel
from tests.unit.runtime import peers
from tests.unit.runtime.test_rpc import SERVING, health

# The preface of HTTP/2 and an empty SETTINGS frame: gRPC takes the connection for a client's.
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8")


@pytest.fixture
async def port() -> AsyncIterator[int]:
    server, _, port = await peers.start()
    yield port
    await server.stop(0)


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[str, int], Awaitable[list[Connection]]]


@pytest.fixture
async def connect(port: int) -> AsyncIterator[Connect]:
    """Opens `num` connections from `address`. Each has sent HELLO and got an answer."""
    opened: list[Connection] = []

    async def connect(address: str, num: int) -> list[Connection]:
        for _ in range(num):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, local_addr=(address, 0), family=socket.AF_INET
            )
            opened.append((reader, writer))
            writer.write(HELLO)
            await asyncio.wait_for(reader.readexactly(9), 20)
        return opened[-num:]

    yield connect
    for _, writer in opened:
        writer.transport.abort()


async def ends(connection: Connection) -> bool:
    """Whether the server closes it. Reads what the server has sent before."""
    try:
        async with asyncio.timeout(0.5):
            while await connection[0].read(4096):
                pass
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True


async def closed_by(limit: ClientConnections) -> int:
    return await asyncio.to_thread(limit.close_surplus)


async def test_the_newest_connections_of_a_client_above_its_limit_are_closed(port: int, connect: Connect) -> None:
    limit = ClientConnections(port, 3)
    older, other = await connect("127.0.0.2", 3), await connect("127.0.0.3", 3)
    assert await closed_by(limit) == 0
    newer = await connect("127.0.0.2", 5)
    assert await closed_by(limit) == 5
    assert [await ends(each) for each in newer] == [True] * 5
    assert [await ends(each) for each in (*older, *other)] == [False] * 6
    async with open_channel(f"127.0.0.1:{port}") as channel:
        assert await health(channel) == SERVING
    assert await closed_by(limit) == 0


async def test_sockets_of_other_ports_are_left_alone(port: int, connect: Connect) -> None:
    limit = ClientConnections(port, 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        sides = [socket.create_connection(server.getsockname()) for _ in range(3)]
        sides += [server.accept()[0] for _ in range(3)]
        await connect("127.0.0.2", 1)
        assert await closed_by(limit) == 0
        for side in sides:
            side.settimeout(0)
            with pytest.raises(BlockingIOError):
                side.recv(1)
        for side in sides:
            side.close()


async def test_a_check_of_connections_keeps_file_locks(port: int, connect: Connect, tmp_path: Path) -> None:
    """POSIX ends a process's locks of a file when the process closes any descriptor of it. SQLite relies on them."""
    limit = ClientConnections(port, 1)
    await connect("127.0.0.2", 3)
    with (tmp_path / "locked").open("w") as locked:
        fcntl.lockf(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert await closed_by(limit) == 2
        attempt = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        run = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", attempt, str(tmp_path / "locked")), stderr=asyncio.subprocess.PIPE
        )
        _, told = await run.communicate()
    assert b"BlockingIOError" in told


async def test_a_failed_check_of_connections_is_repeated(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def look(_: ClientConnections) -> int:
        nonlocal looks
        looks += 1
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(ClientConnections, "close_surplus", look)
    monkeypatch.setattr(client_connections, "_CALM_S", 0.01)
    watch = asyncio.create_task(ClientConnections(port, 2).watch())
    async with asyncio.timeout(20):
        while looks < 3:  # noqa: ASYNC110 - a count without an event
            await asyncio.sleep(0.01)
    assert not watch.done()
    watch.cancel()


async def test_later_connections_above_the_limit_are_closed_too(port: int, connect: Connect) -> None:
    watch = asyncio.create_task(ClientConnections(port, 2).watch())
    for _ in range(3):
        flood = await connect("127.0.0.2", 6)
        async with asyncio.timeout(20):
            while sum([await ends(each) for each in flood]) < 4:
                pass
        for _, writer in flood:
            writer.transport.abort()
    watch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watch
