"""How many threads a step of one row takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean

# A comparison takes so many steps with one thread and as many with all, in turns of a few.
COMPARED_STEPS, _TURN = 32, 8
# Then so many steps take what was faster, and after each comparison that changes nothing twice as many, up to a limit:
# with the slower one, a step may take twice as long.
LEAST_STEPS_BETWEEN, _MOST_STEPS_BETWEEN = 512, 4096
# The mean of few steps varies by some percent. With less gained than this, all stays as it is.
_GAIN = 0.95
# So many of the steps count, the fastest ones: a few may have been interrupted for long.
_COUNTED = 7 / 8


@dataclass(slots=True)
class _Comparison:
    """Of steps that read about as many bytes."""

    takes_one: bool  # what was faster
    now_one: bool = False  # what the current step takes
    num_steps: int = 0  # that have begun since the current comparison began
    between: int = LEAST_STEPS_BETWEEN
    seconds: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))  # with all threads, with one

    def begin(self) -> bool:
        """A step begins. Returns whether it takes one thread."""
        if self.num_steps == 2 * COMPARED_STEPS:
            self._decide()
        elif self.num_steps == 2 * COMPARED_STEPS + self.between:
            self.num_steps = 0
        is_other = self.num_steps < 2 * COMPARED_STEPS and self.num_steps // _TURN % 2 == 1
        self.num_steps += 1
        self.now_one = self.takes_one != is_other
        return self.now_one

    def end(self, seconds: float) -> None:
        """The step has taken so long."""
        if self.num_steps <= 2 * COMPARED_STEPS:
            self.seconds[self.now_one].append(seconds)

    def _decide(self) -> None:
        mine, other = self.seconds[self.takes_one], self.seconds[not self.takes_one]
        # Steps before steps of more rows do not count, so there may be few.
        if min(len(mine), len(other)) >= _TURN and _mean(other) < _GAIN * _mean(mine):
            self.takes_one, self.between = not self.takes_one, LEAST_STEPS_BETWEEN
        else:
            self.between = min(2 * self.between, _MOST_STEPS_BETWEEN)
        self.seconds = [], []


def _mean(seconds: list[float]) -> float:
    return fmean(sorted(seconds)[: math.ceil(len(seconds) * _COUNTED)])


class ThreadsOfOneRow:
    """Whether a step of one row takes one thread, or all that a worker has if these take all cores.

    All threads read the weights faster. But if they take all cores, the services interrupt them, and then each thread
    waits for the others. What costs less depends on the CPU, on what else runs on the machine, and on how much the step
    reads. So both are tried now and then. A step takes from its begin to the begin of the next: what the services do
    meanwhile counts, too. (If most requests have one or two tokens, the pauses between them may count as well, and
    either may win.) The results are the same, bit for bit."""

    def __init__(self, most_bytes_first: int) -> None:
        """most_bytes_first: steps that read no more than this take one thread until they have been compared."""
        self._most_bytes_first = most_bytes_first
        self._comparisons: dict[int, _Comparison] = {}
        self._last: _Comparison | None = None
        self._began_s = 0.0

    @property
    def took_one(self) -> bool:
        """Whether the last step took one thread, and so probably the next one, unless it has more rows."""
        return self._last is not None and self._last.now_one

    def begin(self, read_bytes: int, now_s: float) -> bool:
        """A step of one row begins, which reads so many bytes of weights, keys and values. Returns whether it takes one
        thread."""
        if self._last is not None:
            self._last.end(now_s - self._began_s)
        size = read_bytes.bit_length()
        if size not in self._comparisons:
            self._comparisons[size] = _Comparison(takes_one=read_bytes <= self._most_bytes_first)
        self._last, self._began_s = self._comparisons[size], now_s
        return self._last.begin()

    def begin_other(self) -> None:
        """A step of more rows begins. The last one of one row does not count: before a prompt there may be a pause."""
        self._last = None
