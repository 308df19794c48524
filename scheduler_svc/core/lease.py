"""How long an elected scheduler may rely on its lease, and the epoch that ranks it above all earlier leaders.

The time counts from the moment at which the leader *asked* for the lease or its renewal, and covers only a share of the
lease. So by the leader's own clock it ends before the lease ends by etcd's clock. The only assumption is that etcd's
clock runs less than 20 % faster than the leader's (SAFE_SHARE).
"""

from __future__ import annotations

SAFE_SHARE = 5 / 6  # a leader relies on this share of the lease's time
RENEWALS = 4  # per lease time


class LeaseClock:
    """All moments are monotonic seconds of the leader's own clock."""

    def __init__(self) -> None:
        self.asked_s = self.ends_s = float("-inf")

    def holds(self, now_s: float) -> bool:
        """Whether no other scheduler can have been elected by now."""
        return now_s < self.ends_s

    def extend(self, asked_s: float, ttl_s: float) -> None:
        """The lease was granted or renewed for `ttl_s`, by a request sent at `asked_s`."""
        self.asked_s, self.ends_s = asked_s, asked_s + ttl_s * SAFE_SHARE

    def end(self) -> None:
        self.ends_s = float("-inf")


def next_epoch(last: int, wall_ms: int) -> int:
    """An epoch above `last`, the last one that etcd knows. It is at least the wall-clock time `wall_ms` (Unix time in
    milliseconds), so it is also above the epochs of an etcd that lost its data."""
    return max(last + 1, wall_ms)
