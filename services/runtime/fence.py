"""Fences off schedulers that are no longer the leader, by the epoch of each elected scheduler.

A leader may freeze or lose its network, and come back when another scheduler leads. It does not know this at once, but
its peers do. Each worker, gateway and cache keeps one Fence for its whole life.
"""

from __future__ import annotations

from collections.abc import Iterable

# The metadata key for the epoch, in calls that the scheduler makes.
METADATA_KEY = "paceline-fence"
_MAX_EPOCH = 2**64 - 1
_MAX_DIGITS = len(str(_MAX_EPOCH))


class StaleScheduler(Exception):
    """The scheduler is no longer the leader. The message says so in one line."""


class Fence:
    """The highest epoch seen. 0: only schedulers without an election so far."""

    def __init__(self) -> None:
        self.epoch = 0

    def check(self, epoch: int) -> None:
        """Accept a scheduler of this epoch, and refuse every lower epoch from now on. Raises StaleScheduler."""
        if epoch < self.epoch:
            raise StaleScheduler(f"a scheduler of epoch {epoch} is refused: there was a leader of epoch {self.epoch}")
        self.epoch = epoch


def to_metadata(epoch: int) -> tuple[tuple[str, str], ...]:
    return ((METADATA_KEY, str(epoch)),) if epoch else ()


def from_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> int:
    """The epoch in a call's metadata; 0 if there is none. Raises ValueError if it is invalid."""
    for key, value in metadata:
        if key == METADATA_KEY:
            short = isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= _MAX_DIGITS
            if not short or int(value) > _MAX_EPOCH:
                raise ValueError(f"{METADATA_KEY}: must be a number of 64 bits")
            return int(value)
    return 0
