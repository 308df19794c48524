"""The proxy that tests/chaos cuts links with does what its faults are called."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from tests.support.proxy import Proxy


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    """Before a server that sends back what it gets."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionResetError):
            while data := await reader.read(100):
                writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    proxy = Proxy(server.sockets[0].getsockname()[1])
    yield proxy
    proxy.close()
    server.close()


async def test_what_is_silenced_comes_late_and_nothing_of_it_is_lost(proxy: Proxy) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(b"before")
    assert await reader.readexactly(6) == b"before"
    proxy.silence()
    writer.write(b"after")
    fresh, _ = late = await asyncio.open_connection("127.0.0.1", proxy.port)
    late[1].write(b"new")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(100), 0.2)
    proxy.heal()
    assert await reader.readexactly(5) == b"after"
    assert await fresh.readexactly(3) == b"new"
    for each in (writer, late[1]):
        each.close()
        await each.wait_closed()
