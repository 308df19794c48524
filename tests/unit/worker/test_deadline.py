"""When the worker considers a step hung."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu_worker.deadline import (
    CACHED_TOKENS,
    FEW_TOKENS,
    MOST_AT_ONCE_S,
    NUM_LONG_STEPS,
    NUM_REMEMBERED,
    Allowance,
    Pace,
    StepWatch,
)
from paceline.v1.common_pb2 import SamplingParams
from paceline.v1.worker_pb2 import NewSequence, StepPlan


def allowance(hang_s: float = 0.0) -> Allowance:
    return Allowance(first_step_s=30.0, step_s=2.0, token_s=0.1, max_num_seqs=10, pace=Pace(hang_s))


def plan(step: int, *prefill_tokens: int) -> StepPlan:
    return StepPlan(step=step, prefill_tokens=np.array(prefill_tokens, np.int32).tobytes())


def passed(watch: StepWatch, seconds: float) -> tuple[int, float] | None:
    """Lets the time pass in pieces of 0.25 s."""
    overdue = None
    while seconds > 0:
        overdue = watch.passed(min(0.25, seconds))
        seconds -= 0.25
    return overdue


def test_more_tokens_may_take_longer_and_the_first_step_longest() -> None:
    assert allowance().of(plan(1), 0) == 30.0
    assert allowance().of(plan(2), 0) == 3.0
    assert allowance().of(plan(2, 100, 20), 120) == 15.0
    assert allowance().of(plan(1, 1000), 1000) == 103.0


def test_a_step_counts_from_when_the_one_before_is_done() -> None:
    watch = StepWatch(allowance())
    assert watch.passed(MOST_AT_ONCE_S) is None
    watch.begun(plan(2))
    watch.begun(plan(3, 20))
    assert passed(watch, 2.5) is None
    watch.finished(0.01)
    assert passed(watch, 4.5) is None
    assert passed(watch, 1.0) == (3, 5.0)


def test_an_idle_worker_is_never_late() -> None:
    watch = StepWatch(allowance())
    watch.begun(plan(2))
    watch.finished(0.01)
    assert passed(watch, 100.0) is None
    watch.begun(plan(3))
    assert passed(watch, 2.9) is None


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    watch = StepWatch(allowance())
    watch.begun(plan(2))
    assert watch.passed(1000.0) is None
    assert passed(watch, 3.0 - MOST_AT_ONCE_S) is None
    assert watch.passed(0.25) == (2, 3.0)


HANG_S = 1.5


class Steps:
    """A worker's steps, one after the other; the configured deadlines are minutes."""

    def __init__(self, hang_s: float = HANG_S) -> None:
        self.pace = Pace(hang_s)
        self.watch = StepWatch(Allowance(600.0, 60.0, 0.1, 256, self.pace))
        self.step = 0

    def begin(self, *prefill_tokens: int, **fields: Any) -> None:
        self.step += 1
        message = plan(self.step, *prefill_tokens)
        message.MergeFrom(StepPlan(**fields))
        self.watch.begun(message)

    def run(self, count: int, seconds: float, *prefill_tokens: int, **fields: Any) -> None:
        for _ in range(count):
            self.begin(*prefill_tokens, **fields)
            self.watch.finished(seconds)

    def known(self) -> Steps:
        """Decodes of 10 ms, and prefills of 100 tokens in 0.1 s."""
        self.run(NUM_LONG_STEPS + 1, 0.1, 60, 40)
        self.run(NUM_REMEMBERED, 0.01)
        return self

    def overdue_after_s(self) -> float:
        """How long the step that has begun may take, to 0.25 s."""
        seconds = 0.0
        while self.watch.passed(0.25) is None:
            seconds += 0.25
        return seconds


def test_a_worker_that_knows_its_pace_finds_a_hung_step_in_less_than_two_seconds() -> None:
    steps = Steps().known()
    steps.begin()
    assert steps.overdue_after_s() == 1.5


def test_a_long_prefill_is_not_a_hang() -> None:
    steps = Steps().known()
    steps.begin(20_000)  # expected to take 20 s
    assert steps.overdue_after_s() >= 10 * 20


def slots(*slots: int) -> bytes:
    return np.array(slots, np.int32).tobytes()


def found(slot: int, times: int) -> list[NewSequence]:
    """A sequence that starts with `times` * CACHED_TOKENS tokens in its blocks."""
    return [NewSequence(slot=slot, num_cached_tokens=times * CACHED_TOKENS)]


def test_a_prefill_after_a_long_cached_prefix_is_not_a_hang() -> None:
    """Steps with short contexts do not tell what a step with a long context costs.

    The next chunk is planned before the first chunk is done.
    """
    steps = Steps().known()
    steps.begin(100, prefill_slots=slots(3), new_sequences=found(3, times=10))
    steps.begin(100, prefill_slots=slots(3))
    for _ in range(2):
        assert steps.overdue_after_s() == pytest.approx(HANG_S + 11 * 10 * (0.01 + 0.1), abs=0.3)
        steps.watch.finished(1.0)
    steps.begin()
    assert steps.overdue_after_s() == 1.5, "a decode reads the cached tokens once"


def test_the_cost_of_a_cached_prefix_is_not_counted_twice() -> None:
    steps = Steps().known()
    steps.run(1, 1.0, 100, prefill_slots=slots(3), new_sequences=found(3, times=10))
    for times, most_s, took_s in (
        (10, 11 * 0.1, 1.0),
        (5, 1.0, 0.5),
    ):  # first computed from a step without a prefix, then measured after a longer prefix
        steps.begin(100, prefill_slots=slots(3), new_sequences=found(3, times))
        assert steps.overdue_after_s() == pytest.approx(HANG_S + 10 * ((times + 1) * 0.01 + most_s), abs=0.3)
        steps.watch.finished(took_s)
    steps.begin(100, prefill_slots=slots(3), new_sequences=found(3, times=21))
    assert steps.overdue_after_s() == pytest.approx(HANG_S + 10 * (22 * 0.01 + 22 * 0.1), abs=0.3)


def test_a_step_with_few_tokens_after_a_prefix_does_not_set_the_cost_of_many() -> None:
    """The last measured steps had few such tokens. A later step may take longer by the factor by which it has more."""
    steps = Steps().known()
    mixed = {"prefill_slots": slots(3, 4), "new_sequences": found(3, times=30) + found(4, times=0)}
    steps.run(NUM_REMEMBERED, 0.1, 1, 99, **mixed)
    steps.run(1, 0.01)
    steps.begin(100, prefill_slots=slots(3))
    assert steps.overdue_after_s() > HANG_S + 10 * 31 / 1.31 * 0.1


def test_the_cached_prefix_of_one_sequence_gives_others_no_time() -> None:
    steps = Steps().known()
    steps.begin(100, prefill_slots=slots(3), new_sequences=found(3, times=10))
    steps.watch.finished(0.1)
    steps.begin(100, prefill_slots=slots(4))
    assert steps.overdue_after_s() == pytest.approx(HANG_S + 10 * (0.01 + 0.1), abs=0.3)
    steps.watch.finished(0.1)
    steps.begin(100, prefill_slots=slots(3), new_sequences=found(3, times=0))
    assert steps.overdue_after_s() == pytest.approx(HANG_S + 10 * (0.01 + 0.1), abs=0.3)


def test_the_configured_deadlines_hold_until_the_pace_is_known() -> None:
    steps = Steps()
    steps.run(NUM_REMEMBERED, 0.01)  # the first step of a link does not count
    steps.begin()
    assert steps.overdue_after_s() > 60


def test_the_cost_of_a_prompt_token_needs_its_own_measurement() -> None:
    steps = Steps()
    steps.run(NUM_REMEMBERED + 1, 0.01, FEW_TOKENS - 1)
    steps.begin(FEW_TOKENS)
    assert steps.overdue_after_s() > 60


def test_the_slowest_recent_step_counts_until_it_is_forgotten() -> None:
    steps = Steps().known()
    steps.run(1, 1.0)  # a machine with too much to do
    steps.begin()
    assert steps.overdue_after_s() == 11.5
    steps.watch.finished(1.0)
    steps.run(NUM_REMEMBERED, 0.01)
    steps.begin()
    assert steps.overdue_after_s() == 1.5


def test_a_step_with_a_new_feature_may_compile() -> None:
    steps = Steps().known()
    for fields in (
        {"new_sequences": [NewSequence(sampling=SamplingParams(repetition_penalty=1.1))]},
        {"copy_from": b"....", "copy_to": b"...."},
    ):
        steps.begin(**fields)
        assert steps.overdue_after_s() > 60
        steps.watch.finished(60.0)
        steps.run(NUM_REMEMBERED - 2, 0.01)
        steps.begin()  # the sampler may be asked for the first time only now
        assert steps.overdue_after_s() > 60
        steps.watch.finished(0.01)
        steps.run(1, 0.01)
        steps.begin(**fields)
        assert steps.overdue_after_s() == 1.5
        steps.watch.finished(0.01)


def drafts(slot: int, count: int) -> dict[str, bytes]:
    return {"draft_slots": slots(slot), "draft_counts": slots(count), "draft_tokens": slots(*[5] * count)}


def test_draft_rows_cost_as_much_as_prompt_tokens() -> None:
    steps = Steps().known()
    steps.begin(**drafts(3, 0))
    assert steps.overdue_after_s() > 60, "the first draft row may compile"
    steps.watch.finished(0.01)
    steps.run(NUM_REMEMBERED, 0.01)
    steps.begin(40, **drafts(3, FEW_TOKENS - 40 - 1))  # a draft row also has the last token before its drafts
    assert steps.overdue_after_s() == pytest.approx(HANG_S + 10 * (0.01 + 0.064), abs=0.3)
    steps.watch.finished(0.064)
    steps.begin(100, prefill_slots=slots(4), new_sequences=found(3, times=10), **drafts(3, 99))
    assert steps.overdue_after_s() == pytest.approx(HANG_S + 6 * 10 * (0.01 + 0.2), abs=0.3)


def test_the_pace_of_a_step_with_a_grammar_is_known() -> None:
    """The grammar was compiled before its sequence came, so no step may take minutes for it."""
    steps = Steps().known()
    steps.begin(new_sequences=[NewSequence(sampling=SamplingParams(grammar="start: x"))])
    assert steps.overdue_after_s() == 1.5


def test_the_time_of_copies_to_the_host_is_not_known() -> None:
    steps = Steps()
    steps.run(2 * NUM_REMEMBERED, 0.01, swap_out_from=b"....", swap_out_to=b"....")
    steps.begin(swap_out_from=b"....", swap_out_to=b"....")
    assert steps.overdue_after_s() > 60


def test_with_hang_0_the_configured_deadlines_hold_for_ever() -> None:
    steps = Steps(hang_s=0.0).known()
    steps.begin()
    assert steps.overdue_after_s() > 60


def test_a_new_link_keeps_the_measured_pace() -> None:
    steps = Steps().known()
    steps.watch, steps.step = StepWatch(steps.watch.allowance), 0
    steps.begin()
    assert steps.overdue_after_s() == 600  # its first step may take its time
    steps.watch.finished(300.0)
    steps.begin()
    assert steps.overdue_after_s() == 1.5
