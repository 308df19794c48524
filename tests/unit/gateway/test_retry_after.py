"""The ledger of refused clients: how many are expected back in each second."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.runtime.retry_after import ASSIGNED_SHARE, LONGEST_S, RetryAfter

PER_S = 10 / ASSIGNED_SHARE  # so that the ledger assigns ten positions a second
ROUNDING = 1e-9


def told(ledger: RetryAfter, now_s: float, count: int) -> list[float]:
    return [ledger._assign(now_s, PER_S, 1, 1) for _ in range(count)]


def advance(ledger: RetryAfter, now_s: float, num_arrivals: int) -> None:
    for _ in range(num_arrivals):
        ledger.arrived()
    ledger.measure(now_s)


def test_each_client_gets_a_later_time_than_the_one_before() -> None:
    ledger = RetryAfter()
    advance(ledger, 100.5, 0)
    assert told(ledger, 100.5, 30) == pytest.approx([(i + 1) / 10 for i in range(30)])
    assert told(ledger, 100.6, 1) == pytest.approx([3.1]), "the other clients are still expected earlier"


def test_no_time_exceeds_a_minute_and_the_overflow_is_spread() -> None:
    ledger = RetryAfter()
    advance(ledger, 100.0, 0)
    times = told(ledger, 100.0, 2000)
    assert max(times) <= LONGEST_S
    late = times[610:]
    assert min(late) >= LONGEST_S / 2
    seconds = [int(time) for time in late]
    assert max(map(seconds.count, seconds)) <= 2 * len(late) / (LONGEST_S / 2), "no second has far more than others"


def test_the_retry_times_of_clients_that_stay_away_are_given_to_others() -> None:
    ledger = RetryAfter()
    advance(ledger, 100.0, 0)
    told(ledger, 100.0, 400)
    for second in range(1, 6):
        advance(ledger, 100.0 + second, 0)
    assert ledger.num_expected < 20
    assert told(ledger, 105.0, 1)[0] < 1


def test_if_half_of_the_clients_due_so_far_came_half_of_the_later_ones_are_expected() -> None:
    ledger = RetryAfter()
    advance(ledger, 100.0, 0)
    told(ledger, 100.0, 400)
    for tick in range(5):  # of each second's 10 expected clients, 5 come one second late
        advance(ledger, 101.0 + tick, 5 if tick else 0)
    remain = ledger.num_expected
    assert remain == pytest.approx((400 - 50) / 2, rel=0.1)
    more = told(ledger, 105.0, 100)
    assert more[-1] == pytest.approx(100 / 5, rel=0.2), "each second gets as many new clients as were lost"


@pytest.mark.parametrize("late_s", [0.0, 0.9])
def test_clients_that_come_a_little_late_are_still_expected(late_s: float) -> None:
    ledger = RetryAfter()
    advance(ledger, 100.0, 0)
    coming = sorted(100.0 + time + late_s for time in told(ledger, 100.0, 300))
    for tick in range(501, 600):
        now_s = tick / 5
        come = [time for time in coming if time <= now_s]
        coming = coming[len(come) :]
        advance(ledger, now_s, len(come))
        assert ledger.num_expected >= len(coming) * 0.85 - 10
    assert told(ledger, now_s, 1)[0] > 9, "more than 100 of the 300 clients are still expected"


Event = tuple[float, int, int]  # seconds that pass, requests that come, requests that are refused


@settings(deadline=None)
@example(3.0, [(0.0, 0, 11), (3.0, 0, 0), (0.0, 4, 4)])  # rounding decides which second is chosen
@given(
    st.floats(0.05, 500), st.lists(st.tuples(st.floats(0, 70), st.integers(0, 300), st.integers(0, 60)), max_size=20)
)
def test_no_second_has_more_clients_than_positions(per_s: float, events: list[Event]) -> None:
    ledger, now_s = RetryAfter(), 50.0
    for passes_s, num_arrivals, num_refused in events:
        now_s += passes_s
        advance(ledger, now_s, num_arrivals)
        was_overbooked = False
        last_s = 0.0
        for _ in range(num_refused):
            after_s = ledger._assign(now_s, per_s, 1, 1)
            assert 0 < after_s <= LONGEST_S
            overbooked = ledger.num_expected > ASSIGNED_SHARE * per_s * (LONGEST_S + 1)
            was_overbooked = was_overbooked or overbooked or after_s >= LONGEST_S / 2
            if not was_overbooked:
                assert after_s >= last_s, "first come, first served"
                come = min(ledger._came, ledger._expected[0])  # expected in this second, and here already
                assert ledger.num_expected - come <= ASSIGNED_SHARE * per_s * LONGEST_S + 1 + ROUNDING
            last_s = after_s
        assert ledger.num_expected >= 0
        assert len(ledger._expected) == LONGEST_S + 1, "bounded"
