"""How fast the machine is today, and whether it has other things to do."""

from __future__ import annotations

import timeit

QUIET_LOAD = 0.5


def python_speed() -> float:
    """Microseconds of 10,000 additions in a loop: to compare results of different days, as the machine's speed varies
    by a factor of 3."""
    return round(min(timeit.repeat("for i in range(10_000): i + 1", number=1, repeat=50)) * 1e6, 1)


def load_note(load: float) -> str:
    """A note for the reader of a result about the load when the run began; empty on a quiet machine."""
    if load <= QUIET_LOAD:
        return ""
    return f"other processes ran (load {load:.1f} at the start): to be run again on a quiet machine"
