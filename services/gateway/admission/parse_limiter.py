"""Limits how many request bodies are parsed and submitted per event-loop turn."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

# One turn admits at most this many requests (each takes about 0.3 ms), or rejects _REJECTIONS_PER_ADMISSION times as
# many. A turn stays short because tokens, /health and new connections wait for its end.
_PER_TURN = 8
_REJECTIONS_PER_ADMISSION = 8
# A request costs one more admission for each 64 KiB of its body. If it costs more than the budget of a turn, the next
# turns pay the rest. Some MiB of JSON take tenths of a second to parse.
_BYTES_PER_ADMISSION = 64 * 1024
# The bodies of waiting requests are in memory.
MAX_WAITING = 1024

# Called when it is the request's turn. It returns the error to reject the request with, or None to admit it.
Check = Callable[[], Exception | None]


class ParseLimiter:
    """Admits requests first come, first served.

    Under overload the requests queue here, where waiting and cancelling cost very little.
    """

    def __init__(self, *, per_turn: int = _PER_TURN, max_waiting: int = MAX_WAITING) -> None:
        self._budget = self._left = per_turn * _REJECTIONS_PER_ADMISSION
        self._max_waiting = max_waiting
        self._waiting: deque[tuple[asyncio.Future[None], Check, int]] = deque()
        self._is_scheduled = False

    @property
    def is_full(self) -> bool:
        """The largest allowed number of requests waits. The caller rejects the next request."""
        return len(self._waiting) >= self._max_waiting

    async def wait_turn(self, check: Check = lambda: None, *, num_bytes: int = 0) -> None:
        """Wait until the request may parse this many bytes. Raises the exception that `check` returns.

        The caller reads `is_full` first.
        """
        if self._left > 0 and not self._waiting:
            self._schedule_turn()
            if (error := self._decide(check, num_bytes)) is not None:
                raise error
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((future, check, num_bytes))
        await future

    def _decide(self, check: Check, num_bytes: int) -> Exception | None:
        try:
            error = check()
        except Exception as bug:  # else the requests behind this one would wait forever
            error = bug
        admission = _REJECTIONS_PER_ADMISSION * (1 + num_bytes // _BYTES_PER_ADMISSION)
        self._left -= 1 if error is not None else admission
        return error

    def _schedule_turn(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._is_scheduled, self._left = False, min(self._budget, self._left + self._budget)
        while self._left > 0 and self._waiting:
            future, check, num_bytes = self._waiting.popleft()
            if future.done():  # cancelled
                continue
            if (error := self._decide(check, num_bytes)) is not None:
                future.set_exception(error)
            else:
                future.set_result(None)
        if self._left < self._budget:
            self._schedule_turn()
