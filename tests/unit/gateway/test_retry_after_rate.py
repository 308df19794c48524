"""How fast requests finish, and when refused clients are told to come back."""

from __future__ import annotations

import heapq
import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.runtime.retry_after import RetryAfter

FULL = 20  # live requests of a full server


def busy(departures: RetryAfter, seconds: int, per_s: int, begin_s: float = 0.0) -> float:
    """`per_s` requests finish in each second, and a request is refused in each second. Returns the time."""
    departures.measure(begin_s)
    for second in range(seconds):
        departures.refuse(begin_s + second, FULL)
        for _ in range(per_s):
            departures.arrived()
            departures.finished(FULL - 1)
        departures.measure(begin_s + second + 1)
    return begin_s + seconds


def test_retry_times_follow_each_other_at_the_rate_at_which_requests_finish() -> None:
    departures = RetryAfter()
    assert departures.refuse(0.0, FULL) == 1.0, "nothing was measured"
    now_s = busy(departures, 1, per_s=10) + 1000
    assert departures.per_s == 10
    departures.measure(now_s)
    told = [departures.refuse(now_s, FULL) for _ in range(4)]
    assert told == pytest.approx([1 / 9, 2 / 9, 3 / 9, 4 / 9]), "a tenth of the rate is kept in reserve"


def test_the_rate_follows_a_full_server_and_does_not_fall_while_the_server_is_idle() -> None:
    departures = RetryAfter()
    now_s = busy(departures, 1, per_s=10)
    for second in range(60):  # few requests come
        departures.finished(0)
        departures.measure(now_s + second + 1)
    assert departures.per_s == 10
    now_s = busy(departures, 120, per_s=2, begin_s=now_s + 60)
    assert departures.per_s == pytest.approx(2.0, rel=0.02), "the requests are longer now"


def test_waves_of_returning_clients_do_not_look_like_a_slow_server() -> None:
    """In each second the server refuses a request, and then runs out of requests."""
    departures = RetryAfter()
    now_s = busy(departures, 1, per_s=10)
    for second in range(60):
        departures.refuse(now_s + second, FULL)
        for live in (3, 2, 1, 0):
            departures.finished(live)
        departures.measure(now_s + second + 1)
    assert departures.per_s == 10


def test_a_server_that_was_hardly_used_is_found_to_be_quicker_at_once() -> None:
    departures = RetryAfter()
    departures.measure(0.0)
    departures.finished(0)
    departures.measure(10.0)
    assert departures.per_s == pytest.approx(0.1)
    for _ in range(100):
        departures.finished(30)
    departures.measure(11.0)
    assert departures.per_s == pytest.approx(80)


class Server:
    """A server with `slots` slots, `per_s` requests a second and a queue. Refused users come back when told to."""

    def __init__(self, per_s: float, slots: int, queue: int, seed: int) -> None:
        self.departures = RetryAfter()
        self.now_s = 0.0
        self.refusals: dict[int, int] = {}  # by user
        self.served = 0
        self._per_s, self._slots, self._capacity = per_s, slots, slots + queue
        self._running, self._waiting = 0, 0
        self._random = random.Random(seed)
        self._order = itertools.count()
        self._events: list[tuple[float, int, int | None]] = []  # when, order, user; None: a request is done

    def come(self, user: int, in_s: float = 0.0) -> None:
        heapq.heappush(self._events, (self.now_s + in_s, next(self._order), user))

    def run(self, until_s: float) -> None:
        tick_s = self.now_s
        while tick_s < until_s:
            while self._events and self._events[0][0] <= tick_s:
                self.now_s, _, user = heapq.heappop(self._events)
                if user is None:
                    self._done()
                else:
                    self._arrive(user)
            self.now_s = tick_s
            self.departures.measure(tick_s)
            tick_s += 0.2

    def _arrive(self, user: int) -> None:
        num_live = self._running + self._waiting
        if num_live < self._capacity:
            self.departures.arrived()
            self._waiting += 1
            self._fill()
            return
        told_s = max(1, math.ceil(self.departures.refuse(self.now_s, num_live)))  # whole seconds, as HTTP has it
        assert told_s <= 60
        self.refusals[user] = self.refusals.get(user, 0) + 1
        self.come(user, told_s + self._random.uniform(0, 0.05))

    def _fill(self) -> None:
        while self._waiting and self._running < self._slots:
            self._waiting -= 1
            self._running += 1
            took_s = self._slots / self._per_s * self._random.uniform(0.5, 1.5)
            heapq.heappush(self._events, (self.now_s + took_s, next(self._order), None))

    def _done(self) -> None:
        self._running -= 1
        self.served += 1
        self._fill()
        self.departures.finished(self._running + self._waiting)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), per_s=st.floats(20, 200), crowd=st.integers(2, 25), before=st.booleans())
def test_a_client_that_comes_back_at_its_time_is_admitted(seed: int, per_s: float, crowd: int, before: bool) -> None:
    """The users come at the same moment, with up to 25 s of work.

    With `before`, the server has just refused other clients that never come back.
    """
    server = Server(per_s, slots=32, queue=round(per_s), seed=seed)
    for i in range(int(12 * per_s)):
        server.come(-1, i / per_s)
    server.run(12.0)
    if before:
        for _ in range(int(10 * per_s)):
            server.departures.refuse(server.now_s, 64)
    server.run(18.0)
    served, num_users = server.served, int(crowd * per_s)
    server.refusals.clear()
    for user in range(num_users):
        server.come(user)
    server.run(18.0 + 2 * crowd + 10)
    assert server.served - served == num_users
    again = sum(1 for times in server.refusals.values() if times > 1)
    assert again <= 0.1 * num_users + 5, f"{again} of {num_users} came in vain"
