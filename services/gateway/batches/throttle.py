"""Limits the lines of a batch that are in flight, by what the server takes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.5, 15.0
_TURN_BYTES = 32 * 1024  # of the lines of one turn of the event loop
_SHORT_BYTES = 2048  # added to the bytes of each line, because a short line takes time, too


class Throttle:
    """`limit` is how many lines may be in flight. It has additive increase and multiplicative decrease, as in TCP (RFC
    5681): a refusal halves `limit` and pauses new lines; after as many served lines as `limit` says, it grows by one,
    up to `most`.

    So a batch that meets a quota or a full server takes what others leave, and does not retry all the time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.limit = float(most)
        self.num_running = 0
        self._resume_s = 0.0  # on the loop's clock
        self._pause_s = _FIRST_PAUSE_S
        self._left = asyncio.Event()

    @asynccontextmanager
    async def entering(self) -> AsyncIterator[None]:
        """The context of a line in flight."""
        loop = asyncio.get_running_loop()
        while True:
            if (wait_s := self._resume_s - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            elif self.num_running < max(1, int(self.limit)):
                break
            else:
                self._left.clear()
                await self._left.wait()
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1
            self._left.set()

    def served(self) -> None:
        """The server has served a line."""
        self.limit = min(self.limit + 1 / self.limit, float(self._most))
        self._pause_s = _FIRST_PAUSE_S

    def refused(self, retry_after_s: float | None) -> None:
        """The server has refused a line. Several refusals in one pause count as one."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._resume_s:
            return
        self.limit = max(1.0, self.limit / 2)
        self._resume_s = now_s + min(max(self._pause_s, retry_after_s or 0.0), _LAST_PAUSE_S)
        self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)


class LineSlots:
    """At most `most` lines of all batches in flight. Lines that wait get a slot round robin over their owners, so that
    an owner with many batches has the same share as one with a single batch."""

    def __init__(self, most: int) -> None:
        self._num_free = most
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the owner that is next comes first

    @asynccontextmanager
    async def entering(self, owner: str) -> AsyncIterator[None]:
        """The context of a line in flight."""
        if self._num_free:
            self._num_free -= 1
        else:
            await self._wait(owner)
        try:
            yield
        finally:
            self._release()

    async def _wait(self, owner: str) -> None:
        slot = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(slot)
        try:
            await slot
        except asyncio.CancelledError:
            if not slot.cancelled():  # the slot came just before the cancellation
                self._release()
            raise

    def _release(self) -> None:
        while self._waiting:
            owner = next(iter(self._waiting))
            lines = self._waiting.pop(owner)
            slot = lines.popleft()
            if lines:
                self._waiting[owner] = lines  # behind the other owners
            if not slot.done():  # not cancelled
                slot.set_result(None)
                return
        self._num_free += 1


class Turns:
    """Lets other tasks run between lines. The event loop parses a line of 64 KiB in up to 3 ms, and a short one in
    0.05 ms."""

    def __init__(self) -> None:
        self._num_bytes = 0

    async def take(self, num_bytes: int) -> None:
        """A line of this size comes next."""
        self._num_bytes += _SHORT_BYTES + num_bytes
        if self._num_bytes > _TURN_BYTES:
            self._num_bytes = 0
            await asyncio.sleep(0)


class ByteLimit:
    """At most `most` bytes at a time. A larger line is in flight alone."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.num_bytes = 0
        self._released = asyncio.Event()

    async def acquire(self, num_bytes: int) -> None:
        """Wait until there is room."""
        while self.num_bytes and self.num_bytes + num_bytes > self._most:
            self._released.clear()
            await self._released.wait()
        self.num_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Give room back."""
        self.num_bytes -= num_bytes
        self._released.set()
