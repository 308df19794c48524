"""The stream of one peer: outgoing messages, incoming messages, and heartbeats."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Generic, TypeVar

import grpc

from services.runtime.liveness import Silent, Watch, beat

M = TypeVar("M")


class Outgoing(Generic[M]):
    """Outgoing messages to one peer. Bounded by the protocols: windows, credits, one exchange at a time."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[M | None] = asyncio.Queue()
        self.error: tuple[grpc.StatusCode, str] | None = None

    def put(self, message: M) -> None:
        self._queue.put_nowait(message)

    def beat(self, heartbeat: M) -> None:
        """Send a heartbeat, unless a message is queued: heartbeats do not pile up for a peer that does not read."""
        if self._queue.empty():
            self._queue.put_nowait(heartbeat)

    def close(self, error: tuple[grpc.StatusCode, str] | None = None) -> None:
        """End the stream after the queued messages, with an error if one is given."""
        self.error = self.error or error
        self._queue.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[M]:
        while (message := await self._queue.get()) is not None:
            yield message


async def stream(
    context: grpc.aio.ServicerContext[Any, Any],
    outgoing: Outgoing[M],
    read: Callable[[], Coroutine[Any, Any, None]],
    beside: Coroutine[Any, Any, None],
) -> AsyncIterator[M]:
    """Yield outgoing messages while `read` takes incoming ones. Ends when `read` ends or `outgoing` is closed. `beside`
    runs until then."""

    async def read_then_close() -> None:
        try:
            await read()
        finally:
            outgoing.close()

    reader, other = asyncio.create_task(read_then_close()), asyncio.create_task(beside)
    try:
        async for message in outgoing:
            yield message
        if outgoing.error:
            await context.abort(*outgoing.error)
        await reader
    finally:
        reader.cancel()
        other.cancel()
        await asyncio.gather(reader, other, return_exceptions=True)


async def keep(
    watch: Watch, outgoing: Outgoing[M], heartbeat: Callable[[], M] | None, give_up: Callable[[str], None]
) -> None:
    """Send heartbeats to a peer until the peer is silent for too long. Then call `give_up` at once, and close the
    stream. If the peer does not read, the stream ends when it reads again, or with the connection. `heartbeat`: None
    for a peer that does not read heartbeats."""

    def send() -> None:
        if heartbeat is not None:
            outgoing.beat(heartbeat())

    try:
        await beat(watch, send)
    except Silent as silent:
        give_up(str(silent))
        outgoing.close((grpc.StatusCode.DEADLINE_EXCEEDED, str(silent)))
