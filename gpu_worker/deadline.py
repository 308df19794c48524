"""When a step that has not come back is taken for hung. No clock in here: it is told how much time has passed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from paceline.v1.worker_pb2 import StepPlan

# Of the time between two calls of passed(), no more counts: a process that was stopped, or a machine that slept, is
# late without a fault of the step's.
MOST_AT_ONCE_S = 2.0


@dataclass(frozen=True, slots=True)
class Allowance:
    """Seconds that a step may take: so many, and so many more for each token that it may compute. The first of a link,
    which may compile kernels, at least `first_step_s`."""

    first_step_s: float
    step_s: float
    token_s: float
    max_num_seqs: int  # decodes in a step at the most: a plan does not name them

    def of(self, plan: StepPlan) -> float:
        num_prefill = sum(memoryview(plan.prefill_tokens).cast("i")) if plan.prefill_tokens else 0
        allowed_s = self.step_s + self.token_s * (num_prefill + self.max_num_seqs)
        return max(allowed_s, self.first_step_s) if plan.step == 1 else allowed_s


@dataclass(slots=True)
class StepWatch:
    """The steps in flight of one link. Only the oldest one runs, or is overdue."""

    allowance: Allowance
    _in_flight: deque[tuple[int, float]] = field(default_factory=deque)  # step, allowed seconds
    _age_s: float = 0.0  # of the oldest one

    def begun(self, plan: StepPlan) -> None:
        if not self._in_flight:
            self._age_s = 0.0
        self._in_flight.append((plan.step, self.allowance.of(plan)))

    def finished(self) -> None:
        self._in_flight.popleft()
        self._age_s = 0.0

    def passed(self, elapsed_s: float) -> tuple[int, float] | None:
        """So much time has passed since the last call. Returns the step that is overdue now, if one is, and how long it
        was allowed to take."""
        if not self._in_flight:
            return None
        self._age_s += min(elapsed_s, MOST_AT_ONCE_S)
        step, allowed_s = self._in_flight[0]
        return (step, allowed_s) if self._age_s > allowed_s else None
