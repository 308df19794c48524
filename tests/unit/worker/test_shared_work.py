"""Threads take units of work from each other (gpu_worker/cpu/threads.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from gpu_worker.cpu.threads import COUNTER, next_unit, shared_work


def _take_unit(counters: Any, began: Any, thread: int, threads: int, units: int) -> Any:
    return next_unit((counters, began[thread], thread, threads), units)


def _began_work(counters: Any, threads: int) -> Any:
    return shared_work(counters, 0, threads)[1]


_take, _began = njit(_take_unit), njit(_began_work)


@given(st.data(), st.integers(1, 5))
def test_each_unit_of_several_pieces_of_work_is_taken_once(data: st.DataObject, threads: int) -> None:
    """In whatever order the threads take them. They meet between the pieces."""
    counters = np.zeros(threads * COUNTER, np.int64)
    began = np.stack([_began(counters, threads) for _ in range(threads)])
    for units in data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=4)):
        taken, running = [], list(range(threads))
        while running:
            thread = data.draw(st.sampled_from(running))
            unit = _take(counters, began, thread, threads, units)
            if unit < 0:
                running.remove(thread)
            else:
                taken.append(unit)
        assert sorted(taken) == list(range(units))


def test_a_thread_takes_its_own_share_first_and_then_that_of_one_that_waits() -> None:
    counters = np.zeros(2 * COUNTER, np.int64)
    began = np.stack([_began(counters, 2) for _ in range(2)])
    assert _take(counters, began, 0, 2, 6) == 0
    assert [_take(counters, began, 1, 2, 6) for _ in range(6)] == [3, 4, 5, 1, 2, -1]
    assert _take(counters, began, 0, 2, 6) == -1
