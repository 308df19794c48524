"""The proxy with which tests/chaos cuts links: each fault does what its name says."""

from __future__ import annotations

import asyncio
import contextlib
import socketserver
import threading
from collections.abc import Iterator

import pytest

from tests.support.proxy import Proxy


class Echo(socketserver.BaseRequestHandler):
    """Sends back what it gets."""

    def handle(self) -> None:
        with contextlib.suppress(ConnectionResetError):
            while data := self.request.recv(100):
                self.request.sendall(data)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """A proxy in front of a threaded server. A server in the test's event loop would stop with the loop."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        proxy = Proxy(server.server_address[1])
        yield proxy
        proxy.close()
        server.shutdown()


async def test_data_sent_during_a_silence_arrives_late_and_complete(proxy: Proxy) -> None:
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
