"""When a child is started again."""

from __future__ import annotations

import pytest

from gpu_worker.server import RESTART_STATUS
from services.cli.restarts import CONFIGURATION_ERROR, MAX_EARLY_DEATHS, STABLE_S, Restarts


def test_a_child_that_never_gets_ready_is_given_up_after_three_deaths() -> None:
    restarts = Restarts(0.0)
    assert [restarts.after_exit(1, 1.0) for _ in range(MAX_EARLY_DEATHS)] == [0.1, 0.2, None]


def test_a_configuration_error_at_start_is_final() -> None:
    assert Restarts(0.0).after_exit(CONFIGURATION_ERROR, 1.0) is None


def test_a_child_that_was_ready_is_started_for_ever_and_ever_less_often() -> None:
    restarts = Restarts(0.0, was_ready=True)
    waits = [restarts.after_exit(-9, 1.0) for _ in range(10)]
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0, 5.0])


def test_a_worker_that_wants_to_be_started_again_is() -> None:
    restarts = Restarts(0.0, was_ready=True)
    assert RESTART_STATUS != CONFIGURATION_ERROR
    assert restarts.after_exit(RESTART_STATUS, 1.0) == 0.1


def test_a_long_life_forgives() -> None:
    restarts = Restarts(0.0, was_ready=True)
    for _ in range(5):
        restarts.after_exit(-9, 1.0)
    restarts.started_s = 100.0
    assert restarts.after_exit(-9, 100.0 + STABLE_S) == 0.1
    assert restarts.early_deaths == 1
