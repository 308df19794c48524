"""One peer's stream: what goes out, what comes in, and heartbeats beside them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from services.runtime.liveness import Silent, Watch, beat

M = TypeVar("M")


class Outgoing(Generic[M]):
    """Messages on their way to one peer. Bounded by the protocols: windows, credits, one exchange at a time."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[M | None] = asyncio.Queue()
        self.error: tuple[grpc.StatusCode, str] | None = None

    def put(self, message: M) -> None:
        self._queue.put_nowait(message)

    def beat(self, heartbeat: M) -> None:
        """Unless something else is on its way: a peer that does not read gets no pile of them."""
        if self._queue.empty():
            self._queue.put_nowait(heartbeat)

    def close(self, error: tuple[grpc.StatusCode, str] | None = None) -> None:
        """End the stream after what is in the queue; with an error, if one is given."""
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
    """What goes out, while `read` takes what comes in. Ends when `read` does or `outgoing` is closed."""

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


async def keep(watch: Watch, outgoing: Outgoing[M], heartbeat: M | None, give_up: Callable[[str], None]) -> None:
    """Heartbeats to a peer (None: it does not read them) until nothing is heard of it, and then give it up.

    What it ran is given up at once; its stream ends when it reads again, or with its connection.
    """

    def send() -> None:
        if heartbeat is not None:
            outgoing.beat(heartbeat)

    try:
        await beat(watch, send)
    except Silent as silent:
        give_up(str(silent))
        outgoing.close((grpc.StatusCode.DEADLINE_EXCEEDED, str(silent)))
