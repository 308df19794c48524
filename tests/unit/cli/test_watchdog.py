"""When `paceline up` kills a child process as hung."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.up.health import PROBE_TIMEOUT_S, HealthState, check_health
from services.cli.up.watchdog import PROBE_EVERY_S, Watchdog
from services.runtime.rpc import GrpcServer

TAKES_S = PROBE_EVERY_S + PROBE_TIMEOUT_S


def test_a_process_that_stops_answering_is_killed() -> None:
    watchdog = Watchdog(10.0)
    assert not watchdog.probed(True, PROBE_EVERY_S)
    assert [watchdog.probed(False, TAKES_S) for _ in range(4)] == [False, False, False, True]


def test_a_process_that_never_answered_may_be_loading() -> None:
    watchdog = Watchdog(10.0)
    assert not any(watchdog.probed(False, TAKES_S) for _ in range(1000))


def test_a_hang_limit_of_zero_kills_no_process() -> None:
    watchdog = Watchdog(0)
    assert not any(watchdog.probed(i == 0, TAKES_S) for i in range(1000))


@given(st.lists(st.floats(0.0, 1000.0), max_size=3))
def test_a_watchdog_that_was_stopped_itself_kills_no_process(stops_s: list[float]) -> None:
    """The watchdog does not kill after three unanswered probes, however long the probes took."""
    watchdog = Watchdog(10.0)
    watchdog.probed(True, PROBE_EVERY_S)
    assert not any(watchdog.probed(False, seconds) for seconds in stops_s)


@pytest.mark.parametrize("serving", [True, False])
async def test_any_health_status_counts_as_an_answer(serving: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    server = GrpcServer("127.0.0.1", 0)
    port = await server.start()
    server.set_serving(serving)
    with monkeypatch.context() as patch:
        patch.setattr("services.cli.up.health.PROBE_TIMEOUT_S", 30.0)
        assert await check_health(f"127.0.0.1:{port}") is (HealthState.SERVING if serving else HealthState.ANSWERS)
    await server.stop(0)
    assert await check_health(f"127.0.0.1:{port}") is HealthState.SILENT


async def test_an_accepted_connection_is_no_answer() -> None:
    """The kernel accepts connections for a frozen process; gRPC's threads do so when the event loop is stuck."""
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        assert await check_health(f"127.0.0.1:{frozen.getsockname()[1]}") is HealthState.SILENT
