"""When a step is taken for hung."""

from __future__ import annotations

import numpy as np

from gpu_worker.deadline import MOST_AT_ONCE_S, Allowance, StepWatch
from paceline.v1.worker_pb2 import StepPlan

ALLOWANCE = Allowance(first_step_s=30.0, step_s=2.0, token_s=0.1, max_num_seqs=10)


def plan(step: int, *prefill_tokens: int) -> StepPlan:
    return StepPlan(step=step, prefill_tokens=np.array(prefill_tokens, np.int32).tobytes())


def passed(watch: StepWatch, seconds: float) -> tuple[int, float] | None:
    """In pieces of a second."""
    overdue = None
    while seconds > 0:
        overdue = watch.passed(min(1.0, seconds))
        seconds -= 1.0
    return overdue


def test_more_tokens_may_take_longer_and_the_first_step_longest() -> None:
    assert ALLOWANCE.of(plan(1)) == 30.0
    assert ALLOWANCE.of(plan(2)) == 3.0
    assert ALLOWANCE.of(plan(2, 100, 20)) == 15.0
    assert ALLOWANCE.of(plan(1, 1000)) == 103.0


def test_a_step_counts_from_when_the_one_before_is_done() -> None:
    watch = StepWatch(ALLOWANCE)
    assert watch.passed(MOST_AT_ONCE_S) is None
    watch.begun(plan(2))
    watch.begun(plan(3, 20))
    assert passed(watch, 2.5) is None
    watch.finished()
    assert passed(watch, 4.5) is None
    assert passed(watch, 1.0) == (3, 5.0)


def test_an_idle_worker_is_never_late() -> None:
    watch = StepWatch(ALLOWANCE)
    watch.begun(plan(2))
    watch.finished()
    assert passed(watch, 100.0) is None
    watch.begun(plan(3))
    assert passed(watch, 2.9) is None


def test_time_in_which_the_process_was_stopped_is_not_the_steps() -> None:
    watch = StepWatch(ALLOWANCE)
    watch.begun(plan(2))
    assert watch.passed(1000.0) is None
    assert watch.passed(1.5) == (2, 3.0)
