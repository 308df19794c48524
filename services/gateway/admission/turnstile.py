"""Lets requests in to be parsed and submitted: a few in a turn of the event loop, and only who is to be served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

# A turn lets in so many (each takes some 0.3 ms), or sends so many times as many away. It stays short: between two of
# them tokens, /health and new connections get theirs.
_PER_TURN = 8
_SENT_AWAY = 8
# For each so many of its bytes a request counts as one more, and turns pass until what was too much for one is paid:
# some MiB of JSON take tenths of a second.
_BYTES_OF_ONE = 64 * 1024
# Their bodies are in memory.
MAX_WAITING = 1024


class Gone(Exception):
    """The client is not there any more: nobody would read the answer."""


Verdict = Callable[[], Exception | None]


class Turnstile:
    """First come, first served. In a storm the queue is here, where waiting and going away cost next to nothing."""

    def __init__(self, *, per_turn: int = _PER_TURN, max_waiting: int = MAX_WAITING) -> None:
        self._budget = self._left = per_turn * _SENT_AWAY
        self._max_waiting = max_waiting
        self._waiting: deque[tuple[asyncio.Future[None], Verdict, int]] = deque()
        self._turning = False

    @property
    def crowded(self) -> bool:
        """Nobody else should wait."""
        return len(self._waiting) >= self._max_waiting

    async def turn(self, verdict: Verdict = lambda: None, *, num_bytes: int = 0) -> None:
        """Wait for one's turn to parse so many bytes; ask whether it is `crowded` before. Raises what `verdict` gives
        then."""
        if self._left > 0 and not self._waiting:
            self._turn_later()
            if (error := self._judge(verdict, num_bytes)) is not None:
                raise error
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((future, verdict, num_bytes))
        await future

    def _judge(self, verdict: Verdict, num_bytes: int) -> Exception | None:
        try:
            error = verdict()
        except Exception as bug:  # who waits behind would wait for ever
            error = bug
        self._left -= 1 if error is not None else _SENT_AWAY * (1 + num_bytes // _BYTES_OF_ONE)
        return error

    def _turn_later(self) -> None:
        if not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._turning, self._left = False, min(self._budget, self._left + self._budget)
        while self._left > 0 and self._waiting:
            future, verdict, num_bytes = self._waiting.popleft()
            if future.done():  # cancelled
                continue
            if (error := self._judge(verdict, num_bytes)) is not None:
                future.set_exception(error)
            else:
                future.set_result(None)
        if self._left < self._budget:
            self._turn_later()
