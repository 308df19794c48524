"""Clocks are aligned within the bound that the round trips allow, and no message arrives before it was sent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.cli.trace.clocks import SAME_CLOCK, ClockOffset, RoundTrip, estimate

OFFSETS = st.integers(-(10**12), 10**12)
DELAYS = st.integers(0, 10**6)
TIMES = st.integers(0, 10**10)
TRIPS = st.lists(st.tuples(TIMES, DELAYS, TIMES, DELAYS), min_size=1, max_size=20)


def trip(offset: int, sent: int, there: int, worked: int, back: int) -> RoundTrip:
    """Of a clock that is ahead by `offset`."""
    received = sent + there + offset
    return RoundTrip(sent, received, received + worked, sent + there + worked + back)


@given(OFFSETS, TRIPS)
def test_the_offset_is_within_the_error_and_the_error_within_half_of_the_least_delay(
    offset: int, times: list[tuple[int, int, int, int]]
) -> None:
    trips = [trip(offset, *one) for one in times]
    found = estimate(trips)
    assert found is not None
    assert abs(found.offset - offset) <= found.error
    assert found.error <= min(one.delay for one in trips) / 2


@given(OFFSETS, TRIPS)
def test_no_message_arrives_before_it_was_sent(offset: int, times: list[tuple[int, int, int, int]]) -> None:
    trips = [trip(offset, *one) for one in times]
    found = estimate(trips)
    assert found is not None
    for one in trips:
        assert one.sent <= found.to_own(one.received) <= found.to_own(one.answered) <= one.ended


@given(OFFSETS, TRIPS, st.tuples(TIMES, DELAYS, TIMES, DELAYS))
def test_another_round_trip_makes_no_estimate_worse(
    offset: int, times: list[tuple[int, int, int, int]], more: tuple[int, int, int, int]
) -> None:
    trips = [trip(offset, *one) for one in times]
    before, after = estimate(trips), estimate([*trips, trip(offset, *more)])
    assert before is not None
    assert after is not None
    assert after.error <= before.error


@given(OFFSETS, TRIPS, TIMES, TIMES)
def test_times_keep_their_order(offset: int, times: list[tuple[int, int, int, int]], a: int, b: int) -> None:
    found = estimate(trip(offset, *one) for one in times)
    assert found is not None
    assert (found.to_own(a) <= found.to_own(b)) == (a <= b)


def test_messages_that_take_equally_long_show_the_exact_offset() -> None:
    assert estimate([trip(700, 0, 50, 1000, 50)]) == ClockOffset(700.0, 50.0)


def test_round_trips_after_a_drift_are_left_out() -> None:
    drifted = trip(5_000, 0, 40, 0, 40)
    assert estimate([trip(0, 0, 10, 0, 10), drifted]) == ClockOffset(0.0, 10.0)


def test_without_a_possible_round_trip_nothing_is_known() -> None:
    assert estimate([]) is None
    assert estimate([RoundTrip(100, 0, 50, 120)]) is None, "the other service cannot work longer than the trip takes"


def test_offsets_of_a_chain_add_up() -> None:
    nearer, beyond = ClockOffset(100.0, 5.0), ClockOffset(-30.0, 2.0)
    assert beyond.after(nearer) == ClockOffset(70.0, 7.0)
    assert beyond.after(SAME_CLOCK) == beyond
