"""The steps that have ended, for the live view. Steps are noted only while there is a reader."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from scheduler_svc.core.workers.steps import StepInFlight

MAX_STEPS = 4096


class EndedStep(NamedTuple):
    """A step that has ended. Without its rows, which would keep megabytes."""

    worker: int
    step: int
    planned_s: float
    sent_s: float
    ended_s: float
    computed_s: float  # how long the worker computed; 0: it does not say
    num_decodes: int
    num_prefills: int
    new_tokens: int
    context_tokens: int


class StepLog:
    """The last MAX_STEPS steps. Each reader keeps the number of steps that it has seen."""

    def __init__(self) -> None:
        self.num_readers = 0
        self.num_steps = 0  # that were noted
        self._steps: deque[EndedStep] = deque(maxlen=MAX_STEPS)

    def add(self, worker: int, step: StepInFlight, ended_s: float, computed_s: float) -> None:
        """Note a step. Only to be called while there is a reader."""
        self.num_steps += 1
        times = step.planned_s, step.sent_s, ended_s, computed_s
        sizes = step.num_decodes, len(step.chunks), step.new_tokens, step.context_tokens
        self._steps.append(EndedStep(worker, step.step, *times, *sizes))

    def since(self, num_seen: int) -> list[EndedStep]:
        """The steps after the first `num_seen` ones, without those that are no longer kept. Oldest first."""
        num_new = min(self.num_steps - num_seen, len(self._steps))
        return list(itertools.islice(self._steps, len(self._steps) - num_new, None))

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """The context in which steps are noted. When the last reader leaves, all steps are dropped."""
        self.num_readers += 1
        try:
            yield
        finally:
            self.num_readers -= 1
            if not self.num_readers:
                self._steps.clear()
