"""Whether the other end of a link still runs: heartbeats of its event loop.

Pings do not tell: gRPC's own threads answer them while the loop behind them is stuck. So both ends of a link between
services send a heartbeat four times a second, or anything else, and give the link up when the other one has been silent
for too long. Who dials says in its first message that it reads heartbeats, the other end sends the first one, and only
who has sent one is held to it: either end may be of a version that knows nothing of this.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

# How often each end says that it is there.
BEAT_S = 0.25
# What a peer gets to answer the opening of a link, which may follow a start or bring much to do.
OPENING_S = 5.0
# The limit grows by so many times what heartbeats have been late of late, and to so many times itself at the most.
TIMES_LATE, TIMES_LIMIT = 2.0, 3.0
# Threads that want to run on each core: with more of them it grows as they do. With nine a thread may wait for 1.7 s.
CROWD = 2.0
# How long a late heartbeat is remembered, at least.
REMEMBER_S = 30.0


class Silent(Exception):
    """Nothing was heard of the other end for too long."""


class Watch:
    """Judges one peer, for an observer who calls `passed` every BEAT_S. Times in seconds on any monotonic clock.

    Who was stalled must not judge others: of the time between two calls of `passed` no more counts than BEAT_S, which
    puts the verdict off by what the observer's own loop was late. And where heartbeats have come late of late (the peer
    or the observer gets too little of the machine) they may be later: by TIMES_LATE times as much. Nor is
    the first one that is late a surprise on a crowded machine. A peer that hangs is so found after limit_s + 2 * BEAT_S
    at the most on a machine that is not loaded, and after TIMES_LIMIT times limit_s in the observer's own time in any
    case.
    """

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
        """`opened`: the peer has said its first already."""
        self.promised = False  # that it sends heartbeats
        self.limit_s = limit_s
        self._opened = opened
        self._heard_s = self._ticked_s = now_s
        self._silent_s = 0.0
        self._crowd = 1.0
        # The most that anything was late: since _remembered_s, and before that.
        self._late_s, self._remembered_s = [0.0, 0.0], now_s

    @property
    def allowed_s(self) -> float:
        """How long the peer may be silent; infinite for one that never promised to speak."""
        if not self._opened:
            return max(OPENING_S, self.limit_s)
        if not self.promised:
            return float("inf")
        allowed_s = self._crowd * self.limit_s + TIMES_LATE * max(self._late_s)
        return min(allowed_s, TIMES_LIMIT * self.limit_s)

    def heard(self, now_s: float) -> None:
        """Something has come from the peer."""
        if self._opened and self.promised:
            self._late_s[0] = max(self._late_s[0], now_s - self._heard_s - BEAT_S)
            if now_s - self._remembered_s > REMEMBER_S:
                self._late_s, self._remembered_s = [0.0, self._late_s[0]], now_s
        self._opened = True
        self._heard_s = now_s
        self._silent_s = 0.0

    def passed(self, now_s: float, load: float = 0.0) -> float | None:
        """Time has passed, on a machine with so many threads for each core. Returns for how long the peer has been
        silent, if that is too long."""
        self._crowd = max(1.0, load / CROWD)
        self._silent_s += min(now_s - max(self._ticked_s, self._heard_s), BEAT_S)
        self._ticked_s = now_s
        return self._silent_s if self._silent_s > self.allowed_s else None


async def beat(watch: Watch, send: Callable[[], object]) -> NoReturn:
    """Send a heartbeat four times a second, and raise Silent when the other end has been silent for too long."""
    clock, num_cores = asyncio.get_running_loop().time, os.cpu_count() or 1
    while True:
        send()
        await asyncio.sleep(BEAT_S)
        if (silent_s := watch.passed(clock(), os.getloadavg()[0] / num_cores)) is not None:
            raise Silent(f"nothing heard for {silent_s:.1f} s")


async def first_of(*work: Coroutine[Any, Any, None]) -> None:
    """Until one of them ends or raises; the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
