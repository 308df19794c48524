"""Which peers an observer gives up. A test stalls the heartbeats and the observer, on a clock of its own."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.runtime.liveness import BEAT_S, OPENING_S, REMEMBER_S, TIMES_LIMIT, Watch

LIMIT_S = 1.5
Stalls = list[tuple[float, float]]  # (when, for how long)


def stalls(longest_s: float) -> st.SearchStrategy[Stalls]:
    one = st.tuples(st.floats(0.3, 20.0), st.floats(0.0, longest_s))
    return st.lists(one, max_size=6).map(sorted)


def beats(until_s: float, stalled: Stalls) -> list[float]:
    """The times at which a loop with a period of BEAT_S runs."""
    times, now_s = [], 0.0
    pending = list(stalled)
    while now_s <= until_s:
        while pending and pending[0][0] <= now_s:
            now_s += pending.pop(0)[1]
        times.append(now_s)
        now_s += BEAT_S
    return times


def verdict_s(watch: Watch, spoken: list[float], observed: list[float]) -> float | None:
    """When the observer gives the peer up. At each run it reads the heartbeats that have come, then decides."""
    waiting = list(spoken)
    for now_s in observed:
        while waiting and waiting[0] <= now_s:
            waiting.pop(0)
            watch.heard(now_s)
        if watch.passed(now_s) is not None:
            return now_s
    return None


def promised() -> Watch:
    watch = Watch(LIMIT_S, 0.0, opened=True)
    watch.promised = True
    return watch


@given(stalls(60.0))
def test_a_stalled_observer_gives_no_peer_up(observer: Stalls) -> None:
    assert verdict_s(promised(), beats(400.0, []), beats(100.0, observer)) is None


@given(stalls(LIMIT_S - 2 * BEAT_S), stalls(60.0))
def test_a_peer_stalled_for_less_than_the_limit_is_not_given_up(peer: Stalls, observer: Stalls) -> None:
    far = [(when_s + 2.0 * i, long_s) for i, (when_s, long_s) in enumerate(peer)]  # no stall directly follows another
    assert verdict_s(promised(), beats(400.0, far), beats(100.0, observer)) is None


@given(st.floats(0.0, 20.0))
def test_a_hang_is_noticed_within_the_limit_and_two_beats(dies_s: float) -> None:
    spoken = [time for time in beats(30.0, []) if time <= dies_s]
    noticed_s = verdict_s(promised(), spoken, beats(30.0, []))
    assert noticed_s is not None
    assert LIMIT_S < noticed_s - spoken[-1] <= LIMIT_S + 2 * BEAT_S + 1e-6


@given(st.floats(0.0, 20.0), stalls(1.0), stalls(3.0))
def test_a_hang_is_noticed_within_a_multiple_of_the_limit_on_a_stalled_machine(
    dies_s: float, peer: Stalls, observer: Stalls
) -> None:
    spoken = [time for time in beats(60.0, peer) if time <= dies_s]
    noticed_s = verdict_s(promised(), spoken, beats(60.0, observer))
    assert noticed_s is not None
    stalled_s = sum(long_s for _, long_s in observer)
    assert noticed_s - dies_s <= TIMES_LIMIT * LIMIT_S + 2 * BEAT_S + stalled_s + 1e-6


def test_a_peer_with_late_heartbeats_gets_more_time() -> None:
    watch = promised()
    watch.heard(BEAT_S)
    assert watch.allowed_s == LIMIT_S
    watch.heard(1.0 + BEAT_S + BEAT_S)
    assert watch.allowed_s == pytest.approx(LIMIT_S + 2.0)
    for beat in range(8, 400):
        watch.heard(beat * BEAT_S)
    assert 400 * BEAT_S > 2 * REMEMBER_S
    assert watch.allowed_s == LIMIT_S, "but not for ever"
    watch.heard(1000.0)
    assert watch.allowed_s == TIMES_LIMIT * LIMIT_S


def test_the_first_heartbeat_may_be_late_on_a_crowded_machine() -> None:
    watch = promised()
    for load, times in ((0.5, 1.0), (2.0, 1.0), (4.0, 2.0), (50.0, TIMES_LIMIT)):
        assert watch.passed(0.0, load) is None
        assert watch.allowed_s == times * LIMIT_S


def test_only_a_peer_that_promised_heartbeats_must_send_them() -> None:
    watch = Watch(LIMIT_S, 0.0, opened=True)
    assert verdict_s(watch, [0.0], beats(100.0, [])) is None
    assert math.isinf(watch.allowed_s)


def test_every_peer_must_answer_the_opening_of_a_link() -> None:
    watch = Watch(LIMIT_S, 0.0, opened=False)
    noticed_s = verdict_s(watch, [], beats(100.0, []))
    assert noticed_s is not None
    assert OPENING_S < noticed_s <= OPENING_S + 2 * BEAT_S
