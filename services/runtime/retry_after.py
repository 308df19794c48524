"""Tells refused clients when to come back, so that no more clients return than can be served."""

from __future__ import annotations

import math
from collections import deque
from itertools import accumulate

# The longest Retry-After: OpenAI's clients ignore more than a minute.
LONGEST_S = 60
# The shortest Retry-After, and the Retry-After while no rate was measured yet.
_LEAST_S, _UNKNOWN_S = 0.1, 1.0
# Refused clients get this share of the rate. The rest is for clients that were never refused, and a reserve in
# case the measured rate is too high.
ASSIGNED_SHARE = 0.9
_GRACE_SECONDS = 2
# When the ledger is full, a client gets a time in the later half of the minute. The step of the golden ratio spreads
# these times evenly and never repeats one.
_STEP = 0.6180339887498949
# A window lasts at least _WINDOW_S and until _WINDOW_FINISHED requests have finished, but never longer than
# _LONGEST_WINDOW_S. The rate is averaged over about _AVERAGED_S. Requests of a batch tend to finish together.
_WINDOW_S = 1.0
_WINDOW_FINISHED = 4
_LONGEST_WINDOW_S = _AVERAGED_S = 10.0


class RetryAfter:
    """Measures the rate at which work is done, and keeps a ledger of the refused work that comes back in each second.

    A gateway counts work in requests, and counts a request as done when it is served. The scheduler counts work in
    tokens, and counts them as done when their request leaves the queue. This class reads no clock. Times are seconds of
    any clock.

    Not every refused client comes back. A client counts as lost when it is two seconds late. (Retry-After is in whole
    seconds, so a client may come up to one second after its time.) If a share of the clients of one second is lost, the
    ledger removes the same share of all clients that it still expects.

    If several gateways send requests to one scheduler, each gateway counts only its own requests. So it measures its
    own share of the rate, and offers only this share to its refused clients.
    """

    def __init__(self, assigned_share: float = ASSIGNED_SHARE, began_s: float | None = None) -> None:
        """`assigned_share`: the share of the rate that refused clients get. `began_s`: when the first window begins; by
        default, at the first measurement."""
        self._share = assigned_share
        # Amount per second while work always waited; None: not known yet.
        self.per_s: float | None = None
        self._num_finished = 0  # in this window
        self._finished_amount = 0.0
        self._always_waited: bool | None = None  # in this window; None: the caller does not tell
        self._began_s = began_s
        self._refused = False  # in this window
        # Live requests at the last refusal, and the fewest live requests since the window began.
        self._num_live_at_refusal = 0
        self._fewest_live = math.inf
        self._second = 0  # the clock second of _expected[0]
        self._expected: deque[float] = deque([0.0] * (LONGEST_S + 1))
        self._arrived = 0.0  # amount since the last measurement
        self._came = 0.0  # amount that has come in this second
        # The last _GRACE_SECONDS seconds, newest first: the amount that was expected, and what of it has not come yet.
        self._late: deque[tuple[float, float]] = deque([(0.0, 0.0)] * _GRACE_SECONDS)
        self._overbooked = 0.0  # where a full ledger put its last client: 0 is after 30 s, 1 after 60 s

    @property
    def num_expected(self) -> float:
        """The amount that is expected in this second and all later ones."""
        return sum(self._expected)

    def arrived(self, amount: float = 1) -> None:
        """A request was admitted."""
        self._arrived += amount

    def finished(self, num_live: float = math.inf, amount: float = 1) -> None:
        """A request was served (or has left the queue), and `num_live` requests are left.

        Do not call this for a cancelled request: many clients that leave at once say nothing about the rate.
        """
        self._num_finished += 1
        self._finished_amount += amount
        self._fewest_live = min(self._fewest_live, num_live)

    def measure(self, now_s: float, *, waits: bool | None = None) -> None:
        """Call this a few times a second. `waits`: whether work waits now. None: the caller does not know. Then work
        counts as waiting in a window with a refusal in which the live requests do not fall below half of those at the
        last refusal."""
        self._advance(now_s)
        if self._began_s is None:
            self._began_s = now_s
        if waits is not None:
            self._always_waited = waits and self._always_waited is not False
        elapsed_s = now_s - self._began_s
        if elapsed_s < _WINDOW_S or (self._num_finished < _WINDOW_FINISHED and elapsed_s < _LONGEST_WINDOW_S):
            return
        rate = self._finished_amount / elapsed_s
        # Without constant load the window measures the arrival rate. Refused clients come back in waves, and the server
        # may be idle between two waves.
        always_busy = self._refused and self._fewest_live >= self._num_live_at_refusal / 2
        if self._always_waited is not None:
            always_busy = self._always_waited
        if self.per_s is None:
            self.per_s = rate or None
        elif always_busy or rate > self.per_s:
            average = self.per_s + (rate - self.per_s) * -math.expm1(-elapsed_s / _AVERAGED_S)
            # The rate less two standard deviations of a Poisson count.
            at_least = rate * (1 - 2 / math.sqrt(max(self._num_finished, 1)))
            self.per_s = average if always_busy else max(average, at_least)
        self._num_finished, self._finished_amount, self._fewest_live = 0, 0.0, math.inf
        self._began_s, self._refused, self._always_waited = now_s, False, waits

    def refuse(self, now_s: float, num_live: int = 0, *, amount: float = 1, excess: float = 1) -> float:
        """Refuses a request while `num_live` requests are live. Returns after how many seconds it should come back.

        `excess`: the amount that must be done before there is room for this request.
        """
        if now_s >= self._second + 2:  # nothing was measured, because no work waited
            self._advance(now_s)
        self._arrived += amount
        self._refused, self._num_live_at_refusal = True, num_live
        return max(self._assign(now_s, self.per_s, amount, excess), _LEAST_S) if self.per_s else _UNKNOWN_S

    def _advance(self, now_s: float) -> None:
        self._came += self._arrived
        self._arrived = 0.0
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

    def _assign(self, now_s: float, per_s: float, amount: float, excess: float) -> float:
        """Gives a client a time, in seconds from now: after the times of all earlier clients, or in a gap that lost
        clients have left."""
        rate = self._share * per_s
        from_now_s = self._second - now_s
        # The sum runs from the front, always in the same order. So rounding never gives a later client an earlier time.
        before = list(accumulate(self._expected, initial=-min(self._came, self._expected[0])))[1:]
        second = LONGEST_S
        # All later clients must keep their times: find the first second after which there is always room for `excess`.
        while second and rate * (from_now_s + second) - before[second - 1] >= excess:
            second -= 1
        after_s = (before[second] + excess) / rate
        if second == LONGEST_S or after_s > LONGEST_S:
            self._overbooked = (self._overbooked + _STEP) % 1
            after_s = LONGEST_S * (1 + self._overbooked) / 2
            second = int(after_s - from_now_s)
        self._expected[min(second, LONGEST_S)] += amount
        return after_s

    def _forget(self, share: float) -> None:
        if share > 0:
            self._expected = deque(expected * (1 - share) for expected in self._expected)
            self._late = deque((group * (1 - share), max(late - group * share, 0.0)) for group, late in self._late)
