"""Which requests the parse limiter admits, and in which event-loop turn."""

from __future__ import annotations

import asyncio

import pytest

from services.gateway.admission.parse_limiter import ParseLimiter
from services.gateway.errors import Gone


async def test_a_few_requests_enter_per_loop_turn_in_order_of_arrival() -> None:
    parse_limiter, now, entered = ParseLimiter(per_turn=3), 0, []

    async def request(number: int) -> None:
        await parse_limiter.wait_turn()
        entered.append((number, now))

    tasks = [asyncio.create_task(request(number)) for number in range(10)]
    while len(entered) < 10:
        now += 1
        await asyncio.sleep(0)
    assert [number for number, _ in entered] == list(range(10))
    turns = [turn for _, turn in entered]
    assert max(turns.count(turn) for turn in turns) == 3
    await asyncio.gather(*tasks)


async def test_a_large_body_uses_up_the_budget_of_the_turns_that_follow() -> None:
    parse_limiter, now, entered = ParseLimiter(per_turn=4), 0, []

    async def request(num_bytes: int) -> None:
        await parse_limiter.wait_turn(num_bytes=num_bytes)
        entered.append(now)

    tasks = [asyncio.create_task(request(num_bytes)) for num_bytes in (10 * 2**16, 2**20, 0, 0)]
    while len(entered) < 4:
        now += 1
        await asyncio.sleep(0)
    first, second, *small = (turn - entered[0] for turn in entered)
    assert (first, second) == (0, 3), "costs 11 admissions, 4 per turn"
    assert small == [second + 5] * 2, "costs 17 admissions, 4 per turn"
    await asyncio.gather(*tasks)


async def test_requests_without_a_client_fail_at_their_turn_and_are_not_counted() -> None:
    parse_limiter, asked, entered = ParseLimiter(per_turn=1), [], []

    async def request(number: int) -> None:
        def check() -> Exception | None:
            asked.append(number)
            return Gone() if 0 < number < 6 else None

        await parse_limiter.wait_turn(check)
        entered.append(number)

    tasks = [asyncio.create_task(request(number)) for number in range(8)]
    await asyncio.sleep(0)
    assert asked == [0], "the others wait"
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert asked == list(range(8))
    assert entered == [0, 6, 7]
    assert [isinstance(outcome, Gone) for outcome in outcomes] == [False] + [True] * 5 + [False] * 2


async def test_a_check_that_fails_delays_no_other_request() -> None:
    parse_limiter = ParseLimiter(per_turn=1)

    def bug() -> None:
        raise RuntimeError("bug")

    tasks = [asyncio.create_task(parse_limiter.wait_turn(check)) for check in (lambda: None, bug, lambda: None)]
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None), RuntimeError, type(None)]


async def test_a_waiting_request_that_is_cancelled_is_forgotten() -> None:
    parse_limiter = ParseLimiter(per_turn=1)
    tasks = [asyncio.create_task(parse_limiter.wait_turn()) for _ in range(4)]
    await asyncio.sleep(0)  # the first is in
    tasks[1].cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None), asyncio.CancelledError, type(None), type(None)]


async def test_the_limiter_is_full_when_too_many_requests_wait() -> None:
    parse_limiter = ParseLimiter(per_turn=1, max_waiting=2)
    tasks = [asyncio.create_task(parse_limiter.wait_turn()) for _ in range(3)]
    assert not parse_limiter.is_full
    await asyncio.sleep(0)  # the first is in
    assert parse_limiter.is_full
    await asyncio.gather(*tasks)
    assert not parse_limiter.is_full


async def test_a_request_fails_with_the_error_that_its_check_returns() -> None:
    parse_limiter = ParseLimiter(per_turn=1)
    with pytest.raises(KeyError):
        await parse_limiter.wait_turn(lambda: KeyError("x"))
