"""A TCP proxy of loopback between two services: a test can break or silence its connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable

from tests.support.ports import free_port

CHUNK_BYTES = 65536


class Proxy:
    """Listens on `port`. Forwards data to the target's port and back, on a thread of its own."""

    def __init__(self, target_port: int) -> None:
        self.port = free_port()
        self._target_port = target_port
        self._is_cut = False
        self._passing = asyncio.Event()
        self._passing.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"proxy-{self.port}", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()

    def cut(self) -> None:
        """Reset every connection, and new ones as soon as they are made."""
        self._do(self._cut)

    def silence(self) -> None:
        """Delivers nothing. Connections stay open, new ones are accepted, and the proxy keeps what is sent."""
        self._do(self._passing.clear)

    def heal(self) -> None:
        """Delivers again, and first what was kept during the silence."""
        self._do(self._heal)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, change: Callable[[], None]) -> None:
        async def apply() -> None:
            change()

        asyncio.run_coroutine_threadsafe(apply(), self._loop).result()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def _close(self) -> None:
        # First stop accepting connections, and wait until the accepted ones have ended. The server closes last: if it
        # closed first, the socket of a connection that was accepted just before would stay open (CPython gh-109564).
        for listening in self._server.sockets:
            self._loop.remove_reader(listening.fileno())
        self._cut()
        self._passing.set()
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)
        self._server.close()

    def _cut(self) -> None:
        self._is_cut = True
        for writer in self._writers:
            _reset(writer)

    def _heal(self) -> None:
        self._is_cut = False
        self._passing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await self._passing.wait()
            if self._is_cut:
                _reset(writer)
                return
            # No process listens there while the target is dead: then this end is closed, too.
            with contextlib.suppress(OSError):
                await self._join(reader, writer)
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copies data until either side ends."""
        there, back = await asyncio.open_connection("127.0.0.1", self._target_port)
        self._writers.add(back)
        if self._is_cut:  # while the connection to the target was opened
            _reset(back)
        ways = [asyncio.create_task(self._pass(reader, back)), asyncio.create_task(self._pass(there, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            self._writers.discard(back)
            back.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK_BYTES):
            await self._passing.wait()
            writer.write(data)
            await writer.drain()
        await self._passing.wait()  # the end of a stream has to wait, too


def _reset(writer: asyncio.StreamWriter) -> None:
    """Closes with RST at once, and discards the data that is still to be sent."""
    end = writer.get_extra_info("socket")
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
