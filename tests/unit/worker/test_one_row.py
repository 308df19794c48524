"""One thread or all for a step of one row: what is faster, soon and for most steps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import pytest

from gpu_worker.cpu.layers.one_row import COMPARED_STEPS, LEAST_STEPS_BETWEEN, ThreadsOfOneRow

SMALL, LIMIT, LARGE = 900, 1000, 5000
MOST_STEPS_UNTIL_COMPARED = 4096 + 2 * COMPARED_STEPS


class Steps:
    """Steps that take as long as `seconds` says of whether they take one thread."""

    def __init__(self, seconds: Callable[[bool], float]) -> None:
        self.seconds, self.threads, self._now_s = seconds, ThreadsOfOneRow(LIMIT), 7.0

    def take(self, count: int, read_bytes: int = SMALL) -> list[bool]:
        """Which of these steps take one thread."""
        taken = []
        for _ in range(count):
            taken.append(self.threads.begin(read_bytes, self._now_s))
            assert self.threads.took_one == taken[-1]
            self._now_s += self.seconds(taken[-1])
        return taken

    def pause(self, seconds: float) -> None:
        self.threads.begin_other()
        self._now_s += seconds


@pytest.mark.parametrize("read_bytes", [SMALL, LIMIT, LIMIT + 1, LARGE])
@pytest.mark.parametrize("faster", [False, True])
def test_steps_take_what_is_faster_after_a_comparison(read_bytes: int, faster: bool) -> None:
    steps = Steps(lambda one: 2.0 if one == faster else 3.0)
    compared = steps.take(2 * COMPARED_STEPS, read_bytes)
    assert compared[0] == (read_bytes <= LIMIT)
    assert sum(compared) == COMPARED_STEPS
    assert steps.take(LEAST_STEPS_BETWEEN, read_bytes) == [faster] * LEAST_STEPS_BETWEEN
    assert steps.take(10_000, read_bytes).count(not faster) < 200


@pytest.mark.parametrize("first", [False, True])
def test_steps_change_when_the_other_number_becomes_faster(first: bool) -> None:
    steps = Steps(lambda one: 2.0 if one == first else 3.0)
    steps.take(20_000)
    assert steps.take(1)[0] == first
    steps.seconds = lambda one: 3.0 if one == first else 2.0
    steps.take(MOST_STEPS_UNTIL_COMPARED)
    assert steps.take(1)[0] != first
    assert steps.take(2000).count(first) < 200


def test_steps_stay_with_their_number_of_threads_for_a_small_gain() -> None:
    steps = Steps(lambda one: 2.0 if one else 1.92)
    assert steps.take(20_000).count(False) < 20_000 * 0.02
    steps.seconds = lambda one: 2.0 if one else 1.88
    steps.take(MOST_STEPS_UNTIL_COMPARED)
    assert steps.take(20_000).count(True) < 20_000 * 0.02


def test_few_slow_steps_decide_nothing() -> None:
    """A service may take the core for long."""
    steps = Steps(lambda one: 2.0 if one else 3.0)
    steps.take(COMPARED_STEPS)
    steps.seconds = lambda one: 200.0 if one else 3.0
    steps.take(4)
    steps.seconds = lambda one: 2.0 if one else 3.0
    steps.take(COMPARED_STEPS - 4)
    assert steps.take(100) == [True] * 100


def test_many_slow_steps_decide_though_most_are_fast() -> None:
    """With both cores taken, some steps are interrupted."""
    durations = cycle([2.0, 2.0, 6.0])
    steps = Steps(lambda one: 3.0 if one else next(durations))
    assert steps.take(10_000).count(False) < 300


def test_steps_of_other_sizes_are_compared_apart() -> None:
    """One thread is faster until keys and values are many."""
    steps = Steps(lambda one: 2.0 if one else 3.0)
    steps.take(500)
    steps.seconds = lambda one: 9.0 if one else 5.0
    steps.take(500, LARGE)
    assert steps.take(50, LARGE) == [False] * 50
    steps.seconds = lambda one: 2.0 if one else 3.0
    assert steps.take(50) == [True] * 50


def test_a_step_counts_for_its_own_size() -> None:
    """Small and large ones in turns: for small ones one thread is faster."""
    steps = Steps(lambda one: 2.0 if one else 3.0)
    taken: dict[int, list[bool]] = {SMALL: [], LARGE: []}
    for _ in range(1000):
        steps.seconds = lambda one: 2.0 if one else 3.0
        taken[SMALL] += steps.take(1, SMALL)
        steps.seconds = lambda one: 30.0 if one else 20.0
        taken[LARGE] += steps.take(1, LARGE)
    assert taken[SMALL].count(False) < 100
    assert taken[LARGE].count(True) < 100


def test_the_next_comparison_comes_soon_after_a_change() -> None:
    steps = Steps(lambda one: 2.0 if one else 3.0)
    steps.take(20_000)
    steps.seconds = lambda one: 3.0 if one else 2.0
    while steps.take(1) == [True]:
        pass
    steps.take(2 * COMPARED_STEPS)
    assert steps.take(LEAST_STEPS_BETWEEN + 2 * COMPARED_STEPS).count(True) == COMPARED_STEPS


def test_steps_that_never_count_take_mostly_the_first_number_of_threads() -> None:
    steps = Steps(lambda one: 2.0)
    taken = []
    for _ in range(5000):
        taken += steps.take(1)
        steps.pause(1.0)
    assert taken.count(False) < 200


def test_the_pause_before_another_step_does_not_count() -> None:
    steps = Steps(lambda one: 3.0 if one else 2.0)
    for _ in range(500):
        steps.take(2)
        steps.pause(0.0 if steps.threads.took_one else 100.0)
        assert not steps.threads.took_one
    assert steps.take(1000).count(True) < 100
