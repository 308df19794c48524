"""When a child is started again, and what the message about its end says."""

from __future__ import annotations

import signal

import pytest

from services.cli.up.restarts import MAX_EARLY_DEATHS, STABLE_S, Restarts, describe_exit
from services.runtime.exit_status import CONFIGURATION_ERROR, NO_MEMORY, REFUSED, RESTART

KILLED = -signal.SIGKILL


def test_a_child_that_never_gets_ready_is_given_up_after_three_deaths() -> None:
    restarts = Restarts(0.0)
    assert [restarts.after_exit(1, 1.0) for _ in range(MAX_EARLY_DEATHS)] == [0.1, 0.2, None]


def test_three_deaths_before_ready_count_however_long_each_start_took() -> None:
    """The kernel may kill a worker after minutes of loading."""
    restarts = Restarts(0.0)
    assert [restarts.after_exit(KILLED, 10 * STABLE_S) for _ in range(MAX_EARLY_DEATHS)] == [0.1, 0.2, None]


@pytest.mark.parametrize("status", [CONFIGURATION_ERROR, NO_MEMORY, REFUSED])
def test_an_error_that_another_start_would_repeat_is_final(status: int) -> None:
    assert Restarts(0.0).after_exit(status, 1.0) is None


def test_a_refused_worker_stays_down_even_if_it_was_ready_before() -> None:
    assert Restarts(0.0, was_ready=True).after_exit(REFUSED, 1.0) is None
    assert Restarts(0.0, was_ready=True).after_exit(NO_MEMORY, 1.0) is not None


def test_a_child_that_was_ready_is_always_restarted_with_growing_delays() -> None:
    restarts = Restarts(0.0, was_ready=True)
    waits = [restarts.after_exit(KILLED, 1.0) for _ in range(10)]
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0, 5.0])


def test_a_worker_that_asks_for_a_restart_is_restarted() -> None:
    assert Restarts(0.0, was_ready=True).after_exit(RESTART, 1.0) == 0.1


def test_a_long_life_resets_the_delay_and_the_deaths() -> None:
    restarts = Restarts(0.0, was_ready=True)
    for _ in range(5):
        restarts.after_exit(KILLED, 1.0)
    restarts.started_s = 100.0
    assert restarts.after_exit(KILLED, 100.0 + STABLE_S) == 0.1
    assert restarts.early_deaths == 1


@pytest.mark.parametrize(
    ("status", "oom_kills", "killed_here", "text"),
    [
        (KILLED, None, False, "was killed by signal 9 (SIGKILL): the kernel may have been out of memory"),
        (KILLED, 0, False, "was killed by signal 9 (SIGKILL): the kernel may have been out of memory"),
        (KILLED, 2, False, "was killed by signal 9 (SIGKILL): the kernel was out of memory and killed 2 process(es) "
         "since the start"),
        (KILLED, None, True, "was ended by signal 9"),
        (-signal.SIGSEGV, None, False, "was ended by signal 11"),
        (1, None, False, "ended with status 1: the device is gone"),
    ],
)  # fmt: skip
def test_the_message_names_the_cause_of_a_childs_end(
    status: int, oom_kills: int | None, killed_here: bool, text: str
) -> None:
    last_lines = ["info something", "paceline worker: the device is gone", "one more line"]
    assert describe_exit(status, last_lines, oom_kills, killed_here) == text


def test_without_an_error_line_of_the_child_the_message_names_its_status() -> None:
    assert describe_exit(1, ["Traceback", "KeyError: 3"], None, False) == "ended with status 1"
