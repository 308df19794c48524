"""How long an elected scheduler may count on its lease, and the epoch that puts it above all before it.

It counts from the moment at which it *asked* for the lease or its renewal, and only on a share of the time, so by its
own clock it ends before the lease does by etcd's (only that clocks run equally fast is taken for granted).
"""

from __future__ import annotations

# Of a lease's time, what a master counts on.
SAFE_SHARE = 5 / 6
# Renewals in a lease's time.
RENEWALS = 4


class LeaseClock:
    """All moments are monotonic seconds of the master's own clock."""

    def __init__(self) -> None:
        self.asked_s = self.ends_s = float("-inf")

    def holds(self, now_s: float) -> bool:
        """Whether nobody else can have been elected by now."""
        return now_s < self.ends_s

    def extend(self, asked_s: float, ttl_s: float) -> None:
        """The lease was granted or renewed for so long, by a request of that moment."""
        self.asked_s, self.ends_s = asked_s, asked_s + ttl_s * SAFE_SHARE

    def end(self) -> None:
        self.ends_s = float("-inf")


def next_epoch(last: int, wall_ms: int) -> int:
    """Higher than the last one that etcd knows; of the time of day, so that it is also higher than those that an etcd
    knew whose data are lost."""
    return max(last + 1, wall_ms)
