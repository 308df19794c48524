"""Epochs of elected schedulers: who has seen a later master has nothing more to do with an earlier one.

A master may be frozen, or cut off, and come back when another one has long taken over. It cannot know that at once;
those it talks to do. Each worker, gateway and cache has one Fence for as long as it lives.
"""

from __future__ import annotations

from collections.abc import Iterable

# Where the scheduler is the one that calls: as metadata of the call.
METADATA_KEY = "paceline-fence"
_MAX_EPOCH = 2**64 - 1
_MAX_DIGITS = len(str(_MAX_EPOCH))


class StaleScheduler(Exception):
    """It is not the master any more. The message says so in one line."""


class Fence:
    """The highest epoch seen; 0 while all schedulers were alone, not elected."""

    def __init__(self) -> None:
        self.epoch = 0

    def check(self, epoch: int) -> None:
        """Let a scheduler of this epoch pass, and none with a lower one from now on. Raises StaleScheduler."""
        if epoch < self.epoch:
            raise StaleScheduler(f"a scheduler of epoch {epoch} is refused: there was a master of epoch {self.epoch}")
        self.epoch = epoch


def to_metadata(epoch: int) -> tuple[tuple[str, str], ...]:
    return ((METADATA_KEY, str(epoch)),) if epoch else ()


def from_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> int:
    """0 if there is none. Raises ValueError for what is no epoch."""
    for key, value in metadata:
        if key == METADATA_KEY:
            short = isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= _MAX_DIGITS
            if not short or int(value) > _MAX_EPOCH:
                raise ValueError(f"{METADATA_KEY}: must be a number of 64 bits")
            return int(value)
    return 0
