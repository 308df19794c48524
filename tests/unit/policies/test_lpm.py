"""The in-batch rule of `lpm` (from SGLang's schedule_policy.py), tested with the scheduler's waiting queue."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.v1.common_pb2 import SamplingParams
from scheduler_svc.core.admission.queue import WaitingQueue
from scheduler_svc.core.policy.order import OrderPolicy
from scheduler_svc.core.requests.request import PrefixMatch, Request
from scheduler_svc.policies.order.lpm import LongestPrefixMatch

SHARED = list(range(100, 140))


def fails(error: Exception) -> OrderPolicy:
    raise error


@pytest.fixture
def queue() -> WaitingQueue:
    return WaitingQueue(LongestPrefixMatch(), fails)


def wait(queue: WaitingQueue, arrival_index: int, tokens: list[int], cached: int = 0) -> Request:
    prompt = np.array(tokens, np.int32).tobytes()
    request = Request(
        arrival_index, "", arrival_index, str(arrival_index), prompt, bytearray(), SamplingParams(max_tokens=1), 0.0
    )
    request.queue_position = arrival_index
    request.matches = {1: PrefixMatch(cached)}
    queue.add(request)
    return request


def order(queue: WaitingQueue) -> list[int]:
    return [request.arrival_index for request in queue.ordered(0.0)]


def test_the_longest_match_goes_first_and_equal_uncached_prefixes_wait_for_one_request(queue: WaitingQueue) -> None:
    leader = wait(queue, 1, [*SHARED, 1])
    follower = wait(queue, 2, [*SHARED, 2], cached=16)
    wait(queue, 3, [7] * 40, cached=32)
    wait(queue, 4, [8] * 40)
    assert order(queue) == [3, 1, 4, 2], "the leader is ordered by its own cached tokens; its follower goes last"
    queue.remove(leader)
    assert order(queue) == [3, 2, 4], "the next one leads, with its own match"
    queue.add(leader)
    assert order(queue) == [3, 1, 4, 2]
    follower.matches = {1: PrefixMatch(33)}
    queue.rematched([follower])
    assert order(queue) == [2, 3, 1, 4], "with more than the threshold cached it waits for no leader"


def test_followers_are_in_order_of_arrival_even_if_parts_are_cached(queue: WaitingQueue) -> None:
    other = [7] * 16 + list(range(200, 240))
    wait(queue, 1, [*SHARED, 1])
    wait(queue, 2, [*other, 1], cached=16)
    wait(queue, 3, [*SHARED, 2])
    wait(queue, 4, [*other, 2], cached=16)
    assert order(queue) == [2, 1, 3, 4]


def test_a_match_that_shrinks_to_the_threshold_joins_the_group(queue: WaitingQueue) -> None:
    threshold = LongestPrefixMatch().check_threshold
    wait(queue, 1, [*SHARED, 1])
    cached = wait(queue, 2, [*SHARED, 2], cached=threshold + 1)
    wait(queue, 3, [8] * 41)
    assert order(queue)[0] == 2
    cached.matches = {1: PrefixMatch(threshold)}
    queue.rematched([cached])
    assert order(queue) == [1, 3, 2], "it follows the first one, which computes the same prefix"
