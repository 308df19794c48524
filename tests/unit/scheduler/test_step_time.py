"""The step-time model: what it learns from steps, what it ignores, and what it keeps when steps give no information."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.workers.step_time import (
    OTHER_SPEED_STEPS,
    TRUSTED_STEPS,
    UNKNOWN,
    FleetStepTimes,
    OutputLength,
    StepTime,
    StepTimeFit,
)

TRUE = StepTime(base_s=4.6e-3, token_s=2e-5, context_s=3e-8, row_s=1e-5)

Step = tuple[int, int, int]  # prompt tokens, context tokens, rows

models = st.builds(
    StepTime,
    base_s=st.floats(1e-4, 0.1),
    token_s=st.floats(1e-6, 1e-3),
    context_s=st.floats(0, 1e-6),
    row_s=st.floats(0, 1e-3),
)


def mixed_steps(seed: int, count: int) -> Iterator[Step]:
    rng = random.Random(seed)
    for _ in range(count):
        rows = rng.randrange(1, 200)
        yield rng.choice([0, 0, 0, rng.randrange(1, 4000)]), rows * rng.randrange(50, 2000), rows


def learn(fit: StepTimeFit, true: StepTime, steps: Iterator[Step], jitter: float = 0.0, seed: int = 0) -> StepTimeFit:
    rng = random.Random(seed)
    for step in steps:
        fit.add(*step, true.of(*step) * (1 + jitter * rng.uniform(-1, 1)))
    return fit


def error(model: StepTime, true: StepTime, step: Step) -> float:
    return abs(model.of(*step) / true.of(*step) - 1)


@settings(deadline=None, max_examples=60)
@given(models, st.integers(0, 100))
def test_the_fit_predicts_steps_that_it_has_not_seen(true: StepTime, seed: int) -> None:
    fit = learn(StepTimeFit(), true, mixed_steps(seed, 600))
    assert max(error(fit.time, true, step) for step in mixed_steps(seed + 1, 50)) < 0.05


def test_the_fit_finds_each_coefficient() -> None:
    fit = learn(StepTimeFit(), TRUE, mixed_steps(1, 1000), jitter=0.05)
    assert fit.time == pytest.approx(TRUE, rel=0.1)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 10**6), st.integers(1, 256), st.floats(0, 60)), max_size=80)
)
def test_after_any_steps_the_model_is_finite_and_grows_with_each_input(
    steps: list[tuple[int, int, int, float]],
) -> None:
    fit = StepTimeFit()
    for step in steps:
        fit.add(*step)
        assert all(0 <= value < 1e9 for value in fit.time)


def test_stalls_change_the_model_little() -> None:
    fit = learn(StepTimeFit(), TRUE, mixed_steps(1, 300), jitter=0.05)
    for i, step in enumerate(mixed_steps(2, 300)):
        fit.add(*step, 5.0 if i % 60 == 0 else TRUE.of(*step))
    assert max(error(fit.time, TRUE, step) for step in mixed_steps(3, 50)) < 0.15


def test_the_fit_follows_a_machine_that_gets_slower() -> None:
    slow = StepTime(*(8 * value for value in TRUE))
    fit = learn(StepTimeFit(), TRUE, mixed_steps(1, 300))
    learn(fit, slow, mixed_steps(2, 800))
    assert max(error(fit.time, slow, step) for step in mixed_steps(3, 50)) < 0.05


def test_long_decoding_keeps_the_cost_of_a_prompt_token() -> None:
    fit = learn(StepTimeFit(), TRUE, mixed_steps(1, 300))
    learn(fit, TRUE, ((0, rows * 500, rows) for rows in [40, 41, 42] * 2000))
    assert fit.time.token_s == pytest.approx(TRUE.token_s, rel=0.1)


def test_equal_steps_keep_the_shares_of_the_earlier_model() -> None:
    """8 rows at each step: base, context and rows cannot be told apart."""
    slow = StepTime(*(2 * value for value in TRUE))
    fit = learn(StepTimeFit(TRUE), slow, iter([(0, 8000, 8)] * 400))
    assert fit.time.of(0, 8000, 8) == pytest.approx(slow.of(0, 8000, 8), rel=0.01)
    assert fit.time.row_s < 10 * slow.row_s
    assert fit.time.base_s > 0.8 * slow.base_s


def test_a_worker_without_a_step_has_the_model_of_the_fleet() -> None:
    fleet, known, fresh = FleetStepTimes(), StepTimeFit(), StepTimeFit()
    fleet.begin([known, fresh])
    assert fresh.time == UNKNOWN
    learn(known, TRUE, mixed_steps(1, 300))
    fleet.begin([known, fresh])
    assert fresh.time == known.time
    learn(fresh, TRUE, mixed_steps(2, 1))
    learn(known, StepTime(*(2 * value for value in TRUE)), mixed_steps(3, 300))
    before = fresh.time
    fleet.begin([known, fresh])
    assert fresh.time == before, "after its first step a worker has its own model"


def test_a_fleet_remembers_the_last_worker_that_left() -> None:
    fleet, gone, fresh = FleetStepTimes(), learn(StepTimeFit(), TRUE, mixed_steps(1, 300)), StepTimeFit()
    fleet.left(gone)
    fleet.left(StepTimeFit())
    fleet.begin([fresh])
    assert fresh.time == gone.time


def test_the_model_follows_a_faster_worker_within_a_few_steps() -> None:
    fast = StepTime(*(value / 2 for value in TRUE))
    fit = learn(StepTimeFit(TRUE), fast, mixed_steps(1, 40))
    assert max(error(fit.time, fast, step) for step in mixed_steps(3, 50)) < 0.2


def test_the_same_steps_give_the_same_model() -> None:
    first, second = (learn(StepTimeFit(), TRUE, mixed_steps(1, 500), jitter=0.2) for _ in range(2))
    assert first.time == second.time


def test_the_mean_output_length_follows_ended_requests() -> None:
    length = OutputLength()
    assert length.mean_tokens is None
    for tokens in (10, 20):
        length.add(tokens)
    assert length.mean_tokens == 15
    for _ in range(1000):
        length.add(100)
    assert length.mean_tokens == pytest.approx(100, rel=0.01)


def test_a_model_is_measured_after_a_number_of_steps() -> None:
    fit = StepTimeFit()
    for number in range(1, TRUSTED_STEPS + 1):
        fit.add(100, 0, 1, 0.01)
        assert fit.is_measured is (number == TRUSTED_STEPS)


def test_a_few_slow_steps_do_not_mean_a_slower_machine() -> None:
    fit = learn(StepTimeFit(), TRUE, mixed_steps(1, 1000))
    for _ in range(OTHER_SPEED_STEPS - 1):
        before = fit.time
        fit.add(0, 50_000, 100, 3 * TRUE.of(0, 50_000, 100))
        assert fit.time.of(0, 50_000, 100) < 1.5 * before.of(0, 50_000, 100)
