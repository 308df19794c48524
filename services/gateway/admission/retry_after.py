"""Assigns a time to come back to each refused client, so that no more clients return than can be served."""

from __future__ import annotations

from collections import deque
from itertools import accumulate

# The longest Retry-After: OpenAI's clients ignore more than a minute.
LONGEST_S = 60
# Refused clients get this share of the service rate. The rest is for clients that were never refused, and for a rate
# that was measured too high.
ASSIGNED_SHARE = 0.9
_GRACE_SECONDS = 2
# When the ledger is full, a client gets a time in the later half of the minute. The step of the golden ratio spreads
# these times evenly and never repeats one.
_STEP = 0.6180339887498949


class RetryAfterLedger:
    """How many refused clients are expected in each of the next LONGEST_S seconds. It reads no clock.

    Not every refused client comes back. A client that is two seconds late is taken as lost. (Retry-After is in whole
    seconds, so a client may come up to one second after its time.) The ledger then removes the same share from the
    clients that were told a time before.
    """

    def __init__(self) -> None:
        self._second = 0  # the clock second of _expected[0]
        self._expected: deque[float] = deque([0.0] * (LONGEST_S + 1))
        self._came = 0.0  # requests that have come in this second
        # The seconds before, newest first: how many clients were expected, and how many of them have not come yet.
        self._late: deque[tuple[float, float]] = deque([(0.0, 0.0)] * _GRACE_SECONDS)
        self._overbooked = 0.0  # where a full ledger has put its last client, from 0 to 1

    @property
    def num_expected(self) -> float:
        """Clients expected in all later seconds."""
        return sum(self._expected)

    def advance(self, now_s: float, num_arrivals: int) -> None:
        """Move on to `now_s`. `num_arrivals` requests have come since the last call."""
        self._came += num_arrivals
        for _ in range(min(int(now_s) - self._second, LONGEST_S + 1)):
            expected = self._expected.popleft()
            self._expected.append(0.0)
            self._late.appendleft((expected, expected))
            for i, (group, late) in reversed([*enumerate(self._late)]):  # arrivals count for the oldest group first
                came = min(late, self._came)
                self._came -= came
                self._late[i] = group, late - came
            self._came = 0.0  # the other arrivals were not expected
            group, missing = self._late.pop()
            self._forget(missing / (group + 1))
        self._second = int(now_s)

    def assign(self, now_s: float, per_s: float) -> float:
        """Assign a time to one more client, and return it in seconds from now.

        `per_s`: requests served per second. `now_s`: the time of the last `advance`, or a little later. The time is
        behind all clients that were told a time before, or in a gap that lost clients leave.
        """
        rate = ASSIGNED_SHARE * per_s
        from_now_s = self._second - now_s
        # The sum runs from the front, always in the same order. So rounding never gives a later client an earlier time.
        before = list(accumulate(self._expected, initial=-min(self._came, self._expected[0])))[1:]
        second = LONGEST_S
        # All later clients must keep their positions: find the first second after which one position is always left.
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
