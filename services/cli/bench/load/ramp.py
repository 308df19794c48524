"""The search for the highest rate that holds the SLO: doubling until it breaks, then bisection."""

from __future__ import annotations

STEP = 2.0
# The search ends below this share of the first rate: then the SLO holds at no rate.
GIVE_UP = 1 / 8
# Sessions that a stage needs, so that a few slow requests do not decide.
MIN_SESSIONS = 20


class RampSearch:
    """Ask next_rate(), measure it, and tell note(). The search ends in three cases. The highest rate that meets the SLO
    and the lowest that does not are within `precision`. The rate `limit` meets the SLO. No rate down to GIVE_UP times
    the first rate meets it."""

    def __init__(self, first: float, limit: float, precision: float) -> None:
        if not (0 < first <= limit and precision > 0):
            raise ValueError("expected 0 < first <= limit, and a precision above 0")
        self._first = first
        self._limit = limit
        self._precision = precision
        self.holds: float | None = None  # the highest rate that held
        self.breaks: float | None = None  # the lowest rate that did not

    def next_rate(self) -> float | None:
        """The rate to measure next. None: the search has ended."""
        if self.breaks is None:
            if self.holds is None:
                return self._first
            return None if self.holds >= self._limit else min(self.holds * STEP, self._limit)
        if self.holds is None:
            below = self.breaks / STEP
            return below if below >= self._first * GIVE_UP else None
        if self.breaks <= self.holds * (1 + self._precision):
            return None
        # The geometric mean, because the earlier steps multiplied the rate.
        return float((self.holds * self.breaks) ** 0.5)

    @staticmethod
    def stage_s(rate: float, duration_s: float) -> float:
        """How long to measure a rate: longer at a low rate."""
        return max(duration_s, MIN_SESSIONS / rate)

    def note(self, rate: float, holds: bool) -> None:
        """The result of a measured rate. A rate above one that broke counts as broken too."""
        if holds and (self.breaks is None or rate < self.breaks):
            self.holds = rate if self.holds is None else max(self.holds, rate)
        elif not holds:
            self.breaks = rate if self.breaks is None else min(self.breaks, rate)
