"""How often a place becomes free here, and so when those who are refused may come back."""

from __future__ import annotations

import math

from services.gateway.admission.promises import Promises

# What one is told at the least, and while nothing was measured yet.
_LEAST_S = 0.1
_UNKNOWN_S = 1.0
# Measured over so long and so many departures, but no longer than this; and averaged over about so long. Requests of a
# batch tend to end together.
_WINDOW_S = 1.0
_WINDOW_DEPARTURES = 4
_LONGEST_WINDOW_S = _AVERAGED_S = 10.0


class Departures:
    """Places that become free, as one gateway sees it: its own requests that end. Times are seconds of any clock.

    Each gateway speaks for its share: if several send requests to one scheduler, each measures, and gives away, the
    places that its own requests leave.
    """

    def __init__(self) -> None:
        # Places a second while there was always somebody to take them; None: not known.
        self.per_s: float | None = None
        self._promises = Promises()
        self._arrived = self._left = 0
        self._began_s: float | None = None
        self._refused = False
        # How many had a place when one was refused, and how many had at the least since the window began.
        self._places = 0
        self._least = math.inf

    def entered(self) -> None:
        """A request has come that was not refused."""
        self._arrived += 1

    def left(self, num_live: int) -> None:
        """A request has been served, and so many are left. (One that is cancelled leaves a place, too, but a crowd that
        goes away says nothing of how fast requests are served.)"""
        self._left += 1
        self._least = min(self._least, num_live)

    def measure(self, now_s: float) -> None:
        """To be called a few times a second."""
        self._promises.advance(now_s, self._arrived)
        self._arrived = 0
        if self._began_s is None:
            self._began_s = now_s
        elapsed_s = now_s - self._began_s
        if elapsed_s < _WINDOW_S or (self._left < _WINDOW_DEPARTURES and elapsed_s < _LONGEST_WINDOW_S):
            return
        rate = self._left / elapsed_s
        # Else it is the rate at which they came: who is refused comes back in waves, and between two of them the server
        # may have little to do.
        always_busy = self._refused and self._least >= self._places / 2
        if self.per_s is None:
            self.per_s = rate or None
        elif always_busy or rate > self.per_s:
            average = self.per_s + (rate - self.per_s) * -math.expm1(-elapsed_s / _AVERAGED_S)
            at_least = (self._left - 2 * math.sqrt(self._left)) / elapsed_s  # whatever chance has done
            self.per_s = average if always_busy else max(average, at_least)
        self._left, self._least = 0, math.inf
        self._began_s, self._refused = now_s, False

    def retry_after_s(self, now_s: float, num_live: int) -> float:
        """When one more who is refused now, while so many have a place, will find one."""
        self._arrived += 1
        self._refused, self._places = True, num_live
        if not self.per_s:
            return _UNKNOWN_S
        return max(self._promises.promise(now_s, self.per_s), _LEAST_S)
