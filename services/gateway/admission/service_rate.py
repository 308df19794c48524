"""Measures how many requests a gateway finishes per second, and derives Retry-After from this rate."""

from __future__ import annotations

import math

from services.gateway.admission.retry_after import RetryAfterLedger

# The shortest Retry-After, and the Retry-After while no rate was measured yet.
_LEAST_S = 0.1
_UNKNOWN_S = 1.0
# A window lasts at least _WINDOW_S and until _WINDOW_FINISHED requests have finished, but never longer than
# _LONGEST_WINDOW_S. The rate is averaged over about _AVERAGED_S. Requests of a batch tend to finish together.
_WINDOW_S = 1.0
_WINDOW_FINISHED = 4
_LONGEST_WINDOW_S = _AVERAGED_S = 10.0


class ServiceRate:
    """How often a request of this gateway finishes. Times are seconds of any clock.

    Each gateway measures its own share. If several gateways send requests to one scheduler, each gateway counts, and
    offers to refused clients, only the positions that its own requests leave.
    """

    def __init__(self) -> None:
        # Finished requests per second while the gateway was at its limit; None: not known yet.
        self.per_s: float | None = None
        self._ledger = RetryAfterLedger()
        self._num_arrived = self._num_finished = 0
        self._began_s: float | None = None
        self._refused = False
        # Live requests at the last refusal, and the fewest live requests since the window began.
        self._num_live_at_refusal = 0
        self._fewest_live = math.inf

    def admitted(self) -> None:
        """A request was admitted."""
        self._num_arrived += 1

    def finished(self, num_live: int) -> None:
        """A request was served, and `num_live` requests are left.

        Do not call this for a cancelled request: many clients that leave at once say nothing about the service rate.
        """
        self._num_finished += 1
        self._fewest_live = min(self._fewest_live, num_live)

    def measure(self, now_s: float) -> None:
        """Call this a few times a second."""
        self._ledger.advance(now_s, self._num_arrived)
        self._num_arrived = 0
        if self._began_s is None:
            self._began_s = now_s
        elapsed_s = now_s - self._began_s
        if elapsed_s < _WINDOW_S or (self._num_finished < _WINDOW_FINISHED and elapsed_s < _LONGEST_WINDOW_S):
            return
        rate = self._num_finished / elapsed_s
        # Without constant load the window measures the arrival rate. Refused clients come back in waves, and the server
        # may be idle between two waves.
        always_busy = self._refused and self._fewest_live >= self._num_live_at_refusal / 2
        if self.per_s is None:
            self.per_s = rate or None
        elif always_busy or rate > self.per_s:
            average = self.per_s + (rate - self.per_s) * -math.expm1(-elapsed_s / _AVERAGED_S)
            # The rate less two standard deviations of a Poisson count.
            at_least = (self._num_finished - 2 * math.sqrt(self._num_finished)) / elapsed_s
            self.per_s = average if always_busy else max(average, at_least)
        self._num_finished, self._fewest_live = 0, math.inf
        self._began_s, self._refused = now_s, False

    def retry_after_s(self, now_s: float, num_live: int) -> float:
        """When a request that is refused now, at `num_live` live requests, should come back. In seconds from now."""
        self._num_arrived += 1
        self._refused, self._num_live_at_refusal = True, num_live
        if not self.per_s:
            return _UNKNOWN_S
        return max(self._ledger.assign(now_s, self.per_s), _LEAST_S)
