"""Detects whether the event loop at the other end of a link still runs, by heartbeats.

Pings cannot show this: gRPC's own threads answer them while the service's event loop is stuck. So each end of a link
between services sends a heartbeat, or another message, four times a second, and gives up the link when the other end is
silent for too long. The dialling end says in its first message that it reads heartbeats. The other end sends the first
heartbeat. A link that is being opened has a limit of its own (OPENING_S). After that, an end is checked only if it is
known to send heartbeats (`Watch.promised`), because it may be of a version without them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

# The time between two heartbeats of one end.
BEAT_S = 0.25
# How long a peer may take to answer the opening of a link. The opening may follow a start or cause much work.
OPENING_S = 5.0
# The limit for silence grows by TIMES_LATE times the recent lateness of heartbeats, at most to TIMES_LIMIT * limit_s.
TIMES_LATE, TIMES_LIMIT = 2.0, 3.0
# With more runnable threads per core than this, the limit also grows in proportion to their number. With nine threads
# per core, a thread may wait for 1.7 s.
CROWD = 2.0
# How long a late heartbeat is remembered, at least.
REMEMBER_S = 30.0


class Silent(Exception):
    """The other end was silent for too long."""


class Watch:
    """Checks one peer, for an observer that calls `passed` every BEAT_S. Times are seconds of any monotonic clock.

    A stalled observer must not give up its peer. So at most BEAT_S of the time between two calls of `passed` counts as
    silence. An observer that runs late decides later.

    The limit grows if heartbeats were late recently, because the peer or the observer then gets too little CPU. It also
    grows on a crowded machine, where the first late heartbeat is no sign of a stuck peer. On a machine without load, a
    stuck peer is detected after limit_s + 2 * BEAT_S at most. In any case it is detected after TIMES_LIMIT * limit_s of
    silence as the observer counts it."""

    __slots__ = (
        "_crowd",
        "_heard_s",
        "_late_s",
        "_opened",
        "_remembered_s",
        "_silent_s",
        "_ticked_s",
        "limit_s",
        "promised",
    )

    def __init__(self, limit_s: float, now_s: float, *, opened: bool) -> None:
        """`opened`: the peer has already sent its first message."""
        self.promised = False  # whether the peer sends heartbeats
        self.limit_s = limit_s
        self._opened = opened
        self._heard_s = self._ticked_s = now_s
        self._silent_s = 0.0
        self._crowd = 1.0
        # The largest lateness since _remembered_s, and in the period before.
        self._late_s, self._remembered_s = [0.0, 0.0], now_s

    @property
    def allowed_s(self) -> float:
        """How long the peer may be silent. Infinite if it sends no heartbeats."""
        if not self._opened:
            return max(OPENING_S, self.limit_s)
        if not self.promised:
            return float("inf")
        allowed_s = self._crowd * self.limit_s + TIMES_LATE * max(self._late_s)
        return min(allowed_s, TIMES_LIMIT * self.limit_s)

    def heard(self, now_s: float) -> None:
        """A message of the peer has arrived."""
        if self._opened and self.promised:
            self._late_s[0] = max(self._late_s[0], now_s - self._heard_s - BEAT_S)
            if now_s - self._remembered_s > REMEMBER_S:
                self._late_s, self._remembered_s = [0.0, self._late_s[0]], now_s
        self._opened = True
        self._heard_s = now_s
        self._silent_s = 0.0

    def passed(self, now_s: float, load: float = 0.0) -> float | None:
        """Check the peer, on a machine with `load` runnable threads per core. Returns the seconds of silence if they
        are too many."""
        self._crowd = max(1.0, load / CROWD)
        self._silent_s += min(now_s - max(self._ticked_s, self._heard_s), BEAT_S)
        self._ticked_s = now_s
        return self._silent_s if self._silent_s > self.allowed_s else None


async def beat(watch: Watch, send: Callable[[], object]) -> NoReturn:
    """Send a heartbeat four times a second. Raises Silent when the other end was silent for too long."""
    clock, num_cores = asyncio.get_running_loop().time, os.cpu_count() or 1
    while True:
        send()
        await asyncio.sleep(BEAT_S)
        if (silent_s := watch.passed(clock(), os.getloadavg()[0] / num_cores)) is not None:
            raise Silent(f"nothing heard for {silent_s:.1f} s")


async def first_of(*work: Coroutine[Any, Any, None]) -> None:
    """Run all until one ends or raises. The others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
