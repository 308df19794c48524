"""How far the clock of another service is ahead, estimated from messages to it and back.

The estimate is that of NTP's clock filter (RFC 5905, section 10): each round trip gives a lower and an upper bound of
the offset, and the bounds of the round trip with the least delay are the closest. The estimate is in the middle of the
bounds (Cristian, "Probabilistic clock synchronization", 1989). Other round trips can only narrow the bounds, because
every message takes some time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """A message to the other service and its answer, in microseconds. `sent` and `ended` are of the own clock,
    `received` and `answered` of the other."""

    sent: int
    received: int
    answered: int
    ended: int

    @property
    def delay(self) -> int:
        """The time that both messages took together."""
        return (self.ended - self.sent) - (self.answered - self.received)

    @property
    def least_offset(self) -> int:
        """The answer took some time: the other clock is ahead by at least so much."""
        return self.answered - self.ended

    @property
    def most_offset(self) -> int:
        """The message took some time: the other clock is ahead by at most so much."""
        return self.received - self.sent


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """The other clock is ahead by `offset`, at most `error` more or less, in microseconds."""

    offset: float
    error: float

    def to_own(self, time: float) -> float:
        """A time of the other clock on the own clock."""
        return time - self.offset

    def after(self, nearer: ClockOffset) -> ClockOffset:
        """How far clock C is ahead of the own clock: C is `self` ahead of B, and B is `nearer` ahead of the own."""
        return ClockOffset(self.offset + nearer.offset, self.error + nearer.error)


SAME_CLOCK = ClockOffset(0.0, 0.0)


def estimate(trips: Iterable[RoundTrip]) -> ClockOffset | None:
    """None if no round trip has a delay of 0 or more. The error is at most half of the least delay.

    Round trips are taken by their delays, the least first. A round trip that contradicts those before it shows that a
    clock has drifted meanwhile, and is left out. With the others, no message arrives before it was sent.
    """
    usable = sorted((trip for trip in trips if trip.delay >= 0), key=lambda trip: trip.delay)
    if not usable:
        return None
    least, most = usable[0].least_offset, usable[0].most_offset
    for trip in usable[1:]:
        narrowed = max(least, trip.least_offset), min(most, trip.most_offset)
        if narrowed[0] <= narrowed[1]:
            least, most = narrowed
    return ClockOffset((least + most) / 2, (most - least) / 2)
