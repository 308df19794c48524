"""When sessions start: at a fixed rate, as a Poisson process, when another session ends, or at a trace's own times."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal

LoadKind = Literal["rate", "poisson", "concurrency", "trace"]
UNITS: dict[str, str] = {"rate": "sessions/s", "poisson": "sessions/s", "concurrency": "at once", "trace": "x speed"}


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """How much load a stage puts on the server: sessions per second, sessions at once, or a trace's speed."""

    kind: LoadKind
    value: float

    @property
    def is_open(self) -> bool:
        """Whether sessions start at given times, however slow the server is."""
        return self.kind != "concurrency"

    def __str__(self) -> str:
        return {
            "rate": f"{self.value:.3g}/s",
            "poisson": f"{self.value:.3g}/s Poisson",
            "concurrency": f"{self.value:.0f} at once",
            "trace": f"trace x{self.value:g}",
        }[self.kind]


def constant(rate: float) -> Iterator[float]:
    """Start times in seconds: 0, 1/rate, 2/rate..."""
    return (i / rate for i in itertools.count())


def poisson(rate: float, random: Random) -> Iterator[float]:
    """Start times in seconds of a Poisson process: independent, exponential gaps of mean 1/rate."""
    at = 0.0
    while True:
        at += random.expovariate(rate)
        yield at


def start_times(load: OfferedLoad, random: Random) -> Iterator[float]:
    """Endless start times of an open load without a trace."""
    return constant(load.value) if load.kind == "rate" else poisson(load.value, random)
