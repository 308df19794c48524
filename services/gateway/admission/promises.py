"""The times that refused clients were told to come back at: a small ledger, so that no more come than find a place."""

from __future__ import annotations

from collections import deque
from itertools import accumulate

# Nobody is told more: OpenAI's clients do not listen to more than a minute.
LONGEST_S = 60
# Places are promised at this share of the rate at which they become free: what is left is for those who were never
# refused, and for a rate that was measured too high.
PROMISED_SHARE = 0.9
_GRACE_SECONDS = 2
# Who finds the ledger full is told a time in its later half, in steps that never repeat (of the golden ratio).
_STEP = 0.6180339887498949


class Promises:
    """How many are expected in each of the next LONGEST_S seconds. No clock in here.

    Not everybody who was told a time comes. Who is two seconds late (who is told whole seconds comes up to one later
    than he might) will not, and of all others who were told a time before, as many are taken to stay away.
    """

    def __init__(self) -> None:
        self._second = 0  # the first one of `_expected`, by the clock
        self._expected: deque[float] = deque([0.0] * (LONGEST_S + 1))
        self._came = 0.0  # in that second
        # Of the seconds before it, the last one first: how many were expected, and how many of them have not come yet.
        self._late: deque[tuple[float, float]] = deque([(0.0, 0.0)] * _GRACE_SECONDS)
        self._overbooked = 0.0  # where the last one was put, from 0 to 1

    @property
    def num_expected(self) -> float:
        """In all the time to come."""
        return sum(self._expected)

    def advance(self, now_s: float, num_arrivals: int) -> None:
        """Time passes; so many requests have come since the last call."""
        self._came += num_arrivals
        for _ in range(min(int(now_s) - self._second, LONGEST_S + 1)):
            expected = self._expected.popleft()
            self._expected.append(0.0)
            self._late.appendleft((expected, expected))
            for i, (group, late) in reversed([*enumerate(self._late)]):  # who is latest comes first
                came = min(late, self._came)
                self._came -= came
                self._late[i] = group, late - came
            self._came = 0.0  # the others were not expected
            group, missing = self._late.pop()
            self._forget(missing / (group + 1))
        self._second = int(now_s)

    def promise(self, now_s: float, per_s: float) -> float:
        """In how many seconds one more may come, if so many places become free a second: behind all others who were
        told a time, or in the gaps that those leave who do not come. `now_s`: as `advance` was told, or a little later.
        """
        rate = PROMISED_SHARE * per_s
        from_now_s = self._second - now_s
        # Summed from the front, in the same order each time: what a sum loses by rounding never makes the next one told
        # come before this one.
        before = list(accumulate(self._expected, initial=-min(self._came, self._expected[0])))[1:]
        second = LONGEST_S
        # All that follow must still find their places: so the first second behind which there is always one left.
        while second and rate * (from_now_s + second) - before[second - 1] >= 1:
            second -= 1
        after_s = (before[second] + 1) / rate
        if second == LONGEST_S or after_s > LONGEST_S:
            self._overbooked = (self._overbooked + _STEP) % 1
            after_s = LONGEST_S * (1 + self._overbooked) / 2
            second = int(after_s - from_now_s)
        self._expected[min(second, LONGEST_S)] += 1
        return after_s

    def _forget(self, share: float) -> None:
        if share > 0:
            self._expected = deque(expected * (1 - share) for expected in self._expected)
            self._late = deque((group * (1 - share), max(late - group * share, 0.0)) for group, late in self._late)
