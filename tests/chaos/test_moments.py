"""The soak and the kill matrix tell allowed from forbidden breaks of a client's stream."""

from __future__ import annotations

import pytest

from tests.chaos.moments import Cell, Moment, judge
from tests.support.asking import Break, Gateway

VICTIM, OTHER = Gateway("http://a", "a"), Gateway("http://b", "b")


def moment(service: str, fault: str) -> Moment:
    """From the 100th to the 110th second."""
    return Moment([Cell(service, fault, "")], VICTIM, 100.0, 110.0)


def sent(time_s: float, gateway: Gateway = VICTIM, asked_s: float = 99.0) -> Break:
    return Break("sent", "503 {}", gateway, asked_s, asked_s, time_s)


def lost(time_s: float, gateway: Gateway = VICTIM, asked_s: float = 99.0) -> Break:
    return Break("lost", "ReadError", gateway, asked_s, asked_s, time_s)


def gave_up(time_s: float, gateway: Gateway = VICTIM) -> Break:
    return Break("gave up", "ReadTimeout", gateway, 90.0, time_s - 10.0, time_s)


@pytest.mark.parametrize("service", ["worker", "cache", "scheduler"])
@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP", "SIGTERM", "cut", "silent"])
@pytest.mark.parametrize("broken", [sent(101.0), lost(101.0)])
def test_an_error_is_wrong_even_after_a_fault_of_another_service(service: str, fault: str, broken: Break) -> None:
    problem = judge(broken, [moment(service, fault)]).problem
    assert f"{service} {fault}" in problem
    assert broken.why in problem


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP", "SIGTERM", "cut", "silent"])
@pytest.mark.parametrize(
    "broken", [sent(101.0, OTHER), lost(101.0, OTHER), sent(99.5), lost(99.5), lost(111.0, asked_s=111)]
)
def test_an_error_of_another_gateway_or_at_another_time_is_wrong(fault: str, broken: Break) -> None:
    assert judge(broken, [moment("gateway", fault)]).problem


def test_a_killed_gateway_may_break_connections_but_send_no_error() -> None:
    assert not judge(lost(101.0), [moment("gateway", "SIGKILL")]).problem
    assert judge(sent(101.0), [moment("gateway", "SIGKILL")]).problem


def test_a_channel_may_report_a_failed_connection_for_a_moment_after_a_gateway_is_back() -> None:
    why = "UNAVAILABLE: failed to connect to all addresses"
    back = [Break("lost", why, VICTIM, time_s, time_s, time_s) for time_s in (111.0, 112.0)]
    assert [bool(judge(broken, [moment("gateway", "SIGKILL")]).problem) for broken in back] == [False, True]


def test_a_draining_gateway_may_refuse_new_requests_but_finishes_running_ones() -> None:
    leaving = [moment("gateway", "SIGTERM")]
    assert not judge(lost(101.0, asked_s=100.5), leaving).problem
    assert not judge(sent(101.0, asked_s=100.5), leaving).problem
    assert judge(lost(101.0), leaving).problem
    assert judge(sent(101.0), leaving).problem


@pytest.mark.parametrize("fault", ["SIGSTOP", "cut", "silent"])
def test_an_error_of_a_gateway_that_comes_back_is_wrong(fault: str) -> None:
    assert judge(sent(107.0), [moment("gateway", fault)]).problem
    assert not judge(gave_up(107.0), [moment("gateway", fault)]).problem


def test_a_client_may_leave_a_healthy_gateway_only_during_a_fault() -> None:
    scheduler = [moment("scheduler", "silent")]
    assert judge(gave_up(105.0), scheduler) == ("", True)
    assert "nothing" in judge(gave_up(99.0), scheduler).problem
    assert "nothing" in judge(gave_up(121.0), scheduler).problem
    assert judge(gave_up(105.0, OTHER), [moment("gateway", "SIGSTOP")]) == ("", True)
    assert judge(gave_up(105.0), [moment("gateway", "SIGSTOP")]) == ("", False)
