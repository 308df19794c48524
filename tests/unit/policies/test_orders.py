"""Order policies, driven as the scheduler does: requests come, leave, run and stop."""

from __future__ import annotations

import gc
import itertools
import random
from typing import Any

import numpy as np
import pytest

from paceline.v1.common_pb2 import SamplingParams
from scheduler_svc.core.admission.queue import WaitingQueue
from scheduler_svc.core.policy.order import OrderPolicy, PolicyError
from scheduler_svc.core.requests.request import PrefixMatch, Request, SubmissionMetadata, view_of
from scheduler_svc.policies.order.deadline import EarliestDeadlineFirst
from scheduler_svc.policies.order.dfs_weight import DepthFirstByWeight
from scheduler_svc.policies.order.hrrn import HighestResponseRatioNext
from scheduler_svc.policies.order.lpm import LongestPrefixMatch
from scheduler_svc.policies.order.priority import Priority
from scheduler_svc.policies.order.random import Random
from scheduler_svc.policies.registry import build, choose


def test_a_goal_below_the_limit_of_its_api_key_counts_as_the_limit() -> None:
    order = EarliestDeadlineFirst()
    honest = request(1, [1], ttft_slo_s=1.0, min_slo_s=1.0)
    greedy = request(2, [1], arrival_s=0.1, ttft_slo_s=0.001, min_slo_s=1.0)
    hurried = request(3, [1], arrival_s=0.1, deadline_s=0.2, min_slo_s=1.0)
    trusted = request(4, [1], arrival_s=0.1, ttft_slo_s=0.5)
    wait(order, hurried, greedy, honest, trusted, request(5, [1], min_slo_s=1.0))
    assert [one.arrival_index for one in order.ordered(0.1)] == [4, 1, 2, 3, 5]


def request(
    arrival_index: int, tokens: list[int], cached: int = 0, arrival_s: float = 0.0, *, ran: bool = False, **fields: Any
) -> Request:
    prompt, sampling = np.array(tokens, np.int32).tobytes(), SamplingParams(max_tokens=4)
    name, metadata = str(arrival_index), SubmissionMetadata(**fields)
    made = Request(arrival_index, "", arrival_index, name, prompt, bytearray(), sampling, arrival_s, metadata)
    made.history.has_run = ran
    made.queue_position, made.matches = arrival_index, {1: PrefixMatch(cached)}
    return made


def wait(order: OrderPolicy, *requests: Request) -> None:
    for one in requests:
        order.add(view_of(one))


def run(order: OrderPolicy, one: Request, now_s: float = 0.0) -> None:
    """As Lifecycle.bind does."""
    order.remove(view_of(one))
    order.started(view_of(one))
    one.history.has_run = True
    if one.history.started_s is None:
        one.history.started_s = now_s


def serve(order: OrderPolicy, one: Request) -> None:
    wait(order, one)
    run(order, one)
    order.stopped(view_of(one))


def names(order: OrderPolicy) -> list[int]:
    return [view.arrival_index for view in order.ordered(0.0)]


# ── namespaces ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("field", ["lora", "cache_salt"])
def test_lpm_delays_no_request_for_a_prefix_of_another_namespace(field: str) -> None:
    order = LongestPrefixMatch()
    wait(order, *(request(i, [7] * 100, **dict[str, Any]({field: name})) for i, name in enumerate("abab", 1)))
    wait(order, request(5, [9] * 20))
    assert names(order) == [1, 2, 5, 3, 4]


@pytest.mark.parametrize("field", ["lora", "cache_salt"])
def test_dfs_weight_counts_a_branch_by_namespace(field: str) -> None:
    order = DepthFirstByWeight()
    wait(order, *(request(i, [7] * 40, 32, **dict[str, Any]({field: name})) for i, name in enumerate("abab", 1)))
    wait(order, *(request(i, [8] * 40, 32) for i in (5, 6, 7)))
    assert names(order) == [5, 6, 7, 1, 3, 2, 4]


# ── dfs-weight ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_dfs_weight_puts_the_branch_of_the_oldest_request_first_among_equal_branches() -> None:
    order = DepthFirstByWeight()
    branches = [request(i, [i] * 40, 32) for i in range(1, 5)]
    wait(order, *branches)
    assert names(order) == [1, 2, 3, 4]
    order.remove(view_of(branches[0]))
    branches[0].queue_position = 9
    wait(order, branches[0])
    assert names(order) == [2, 3, 4, 1], "by its queue position, which a preemption may have changed"


def by_the_rule(requests: list[Request], depth: int = 0) -> list[int]:
    """The order of dfs-weight for requests in one branch down to `depth`, with strides of 1."""
    own = [one for one in requests if one.best_matched_tokens == depth]
    branches: dict[int, list[Request]] = {}
    for one in requests:
        if one.best_matched_tokens > depth:
            branches.setdefault(int(np.frombuffer(one.prompt, np.int32)[depth]), []).append(one)
    ranked = sorted(branches.values(), key=lambda branch: (-len(branch), min(one.queue_position for one in branch)))
    below = [arrival_index for branch in ranked for arrival_index in by_the_rule(branch, depth + 1)]
    return below + [one.arrival_index for one in sorted(own, key=lambda one: one.queue_position)]


@pytest.mark.parametrize("seed", range(20))
def test_dfs_weight_keeps_the_rule_after_any_changes(seed: int) -> None:
    rng, order, waiting = random.Random(seed), DepthFirstByWeight(stride_tokens=1), dict[int, Request]()
    places = itertools.count(1000)
    for arrival_index in range(1, 200):
        one = request(arrival_index, [rng.randrange(3) for _ in range(6)], rng.randrange(6))
        wait(order, one)
        waiting[arrival_index] = one
        for event in ("remove", "rematch", "requeue"):
            one = waiting[rng.choice(list(waiting))]
            if event == "rematch":
                one.matches = {1: PrefixMatch(rng.randrange(6))}
                order.rematched(view_of(one))
            elif rng.random() < 0.5:
                order.remove(view_of(one))
                if event == "requeue" or len(waiting) < 2:
                    one.queue_position = rng.choice([next(places), -next(places)])
                    wait(order, one)
                else:
                    del waiting[one.arrival_index]
        assert names(order) == by_the_rule(list(waiting.values()))


def test_dfs_weight_finds_the_oldest_at_any_depth() -> None:
    """Also below thousands of nodes, after the oldest request of all has left."""
    order = DepthFirstByWeight(stride_tokens=1)
    deep = [request(i, [7] * 5000 + [i], 5001) for i in (1, 3)]
    wait(order, *deep, request(2, [8] * 5, 4))
    order.remove(view_of(deep[0]))
    assert names(order) == [2, 3]


# ── random ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_random_orders_of_two_seeds_have_nothing_to_do_with_each_other() -> None:
    drawn = []
    for seed in range(6):
        order = Random(seed)
        wait(order, *(request(i, [1]) for i in range(1, 101)))
        drawn.append({arrival_index: rank for rank, arrival_index in enumerate(names(order))})
    pairs = list(itertools.combinations(range(1, 101), 2))
    for one, other in itertools.combinations(drawn, 2):
        alike = sum((one[a] < one[b]) == (other[a] < other[b]) for a, b in pairs)
        assert 0.4 < alike / len(pairs) < 0.6


# ── hrrn ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_hrrn_keeps_the_age_of_a_requeued_request() -> None:
    order, old = HighestResponseRatioNext(), request(1, [1] * 100)
    wait(order, old)
    for i in range(2, 12):
        serve(order, request(i, [i] * 100))
    run(order, old)
    order.stopped(view_of(old))
    wait(order, old, request(50, [50] * 50))
    serve(order, request(51, [51] * 10))
    assert names(order) == [1, 50], "1,110 tokens of age for 100 to compute, and 10 for 50"


def test_hrrn_puts_cached_preempted_requests_first() -> None:
    order = HighestResponseRatioNext()
    old = request(1, [1] * 100)
    wait(order, old)
    serve(order, request(2, [2] * 1000))
    new, resumed = request(3, [3] * 40, cached=39), request(4, [4] * 40, cached=40, ran=True)
    resumed.add_output(np.array([5, 6], np.int32).tobytes())
    wait(order, new, resumed)
    assert names(order) == [4, 1, 3], "a new request is not put first: its last token must always be computed"


def test_hrrn_counts_a_refused_request_once() -> None:
    order, refused = HighestResponseRatioNext(), request(1, [1] * 100)
    long, short = request(2, [2] * 300), request(3, [3] * 5)
    wait(order, long)
    serve(order, request(9, [9] * 120))
    wait(order, refused, short)
    for _ in range(10):
        run(order, refused)
        order.stopped(view_of(refused))
        wait(order, refused)
    assert names(order) == [3, 1, 2], "ratios of age to tokens: 100 / 5, 100 / 100 and 220 / 300"


def test_hrrn_remembers_no_request_that_has_ended() -> None:
    order = HighestResponseRatioNext()
    for i in range(1, 1000):
        serve(order, request(i, [i] * 10))
        cancelled = request(i + 1000, [i] * 10)
        wait(order, cancelled)
        order.remove(view_of(cancelled))
        assert names(order) == []
    # A request and its view refer to each other. A scheduler breaks this cycle when a request ends; this test does not.
    gc.collect()
    assert len(order._entries) == 0
    assert len(order._arrived_at) == 1, "the last request, which this test still references"


def test_hrrn_ages_requests_that_a_tenants_limit_hides() -> None:
    order, free = HighestResponseRatioNext(), {"a": 40}
    queue = WaitingQueue(order, lambda error: pytest.fail(str(error)), lambda tenant: free[tenant])
    first, *others = [request(i, [i] * 10, tenant="a") for i in range(1, 6)]
    for one in (first, *others):
        queue.add(one)
    hidden = others[-1]
    assert names(order) == [1, 2, 3]
    queue.remove(first)
    queue.started(first)
    for i in range(10, 20):
        serve(order, request(i, [i] * 10, tenant="b"))
    free["a"] = 1000
    queue.free_tokens_changed("a")
    assert order._entries[hidden.arrival_index].arrived_at == 0


# ── deadline ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def given_up(order: OrderPolicy, now_s: float) -> list[int]:
    return [view.arrival_index for view in order.hopeless(now_s)]


def test_deadline_gives_no_request_up_under_light_traffic() -> None:
    """A short prompt comes every four seconds, and none waits in between. So no rate is measured."""
    order = EarliestDeadlineFirst()
    for i in range(10):
        short = request(i + 1, [1] * 20, deadline_s=4 * i + 100.0)
        wait(order, short)
        for k in range(16):
            if k == 1:
                run(order, short)
            assert given_up(order, 4 * i + k / 4) == []
    long = request(50, [1] * 1500, deadline_s=90.0)
    wait(order, long)
    for k in range(20):
        assert given_up(order, 40 + k / 4) == []


def test_deadline_gives_no_request_up_because_slots_are_short() -> None:
    """One slot, a prompt of twenty tokens every five seconds, and always a waiting request.

    For four of the five seconds the request in the slot decodes, so the others wait.
    """
    order = EarliestDeadlineFirst()
    queue = [request(i, [1] * 20, deadline_s=200.0) for i in range(1, 12)]
    wait(order, *queue, request(50, [1] * 1500, deadline_s=90.0))
    running: Request | None = None
    for tick in range(200):
        if tick % 20 == 0:
            if running is not None:
                order.stopped(view_of(running))
            running = queue.pop(0)
            run(order, running)
        elif tick % 4 == 0 and running is not None:
            running.add_output(bytes(4))
        assert given_up(order, tick / 4) == []


def test_deadline_gives_up_a_hopeless_request_early_under_steady_prefill() -> None:
    order = EarliestDeadlineFirst()
    queue = [request(i, [1] * 100, deadline_s=1000.0) for i in range(1, 100)]
    hopeless, in_time = (request(i, [1] * 1000, deadline_s=1000.0) for i in (1001, 1002))
    wait(order, *queue, hopeless, in_time)
    for tick in range(12):  # 400 tokens a second
        run(order, queue.pop())
        now_s = tick / 4
        if tick == 5:
            for one, left_s in (hopeless, 2.0), (in_time, 5.0):
                order.remove(view_of(one))
                one.metadata.deadline_s = now_s + left_s
                wait(order, one)
        assert given_up(order, now_s) == ([1001] if tick >= 5 else []), f"at {now_s} s"


def test_deadline_measures_anew_after_a_moment_without_waiting_requests() -> None:
    order = EarliestDeadlineFirst()
    one, other, late = request(1, [1] * 10), request(2, [1] * 10), request(3, [1] * 1000, deadline_s=50.0)
    wait(order, one, other)
    run(order, one)
    assert given_up(order, 0.0) == []
    run(order, other)
    last = request(4, [1] * 10)
    wait(order, late, last)
    assert given_up(order, 1.0) == []
    assert given_up(order, 1.9) == []
    run(order, last)
    assert given_up(order, 2.0) == [3], "10 tokens in a second in which a request always waited"


# ── priority ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("order", "option", "value"),
    [
        ("priority", "ageing_per_s", 1e308),
        ("deadline", "prefill_tokens_per_s", 1e308),
        ("fair", "output_token_weight", 1e308),
        ("fair", "tenant_weights", {"a": 1e308}),
        ("fair", "tenant_weights", {"a": 1e-308}),
    ],
)
def test_numbers_that_would_make_all_keys_infinite_are_refused(order: str, option: str, value: object) -> None:
    with pytest.raises(PolicyError, match=f"options.{option}: Input should be (less|greater) than or equal to"):
        build(choose(overrides={"order": order}, options={option: value}))


def test_the_fastest_ageing_still_tells_arrivals_apart() -> None:
    order = build(choose(overrides={"order": "priority"}, options={"ageing_per_s": 1e9})).order
    assert isinstance(order, Priority)
    wait(order, *(request(i, [1], arrival_s=1e6 - i, priority=i) for i in range(1, 5)))
    assert names(order) == [4, 3, 2, 1]


def test_hrrn_does_not_count_recomputed_tokens() -> None:
    order, resumed = HighestResponseRatioNext(), request(1, [1] * 100, ran=True)
    wait(order, resumed)
    before = order._served_tokens
    order.started(view_of(resumed))
    assert order._served_tokens == before


def test_deadline_orders_by_goals_for_the_first_token_and_gives_up_none_of_them() -> None:
    order = EarliestDeadlineFirst(prefill_tokens_per_s=100.0)
    goals = [request(1, [1] * 1000, ttft_slo_s=9.0), request(2, [1], arrival_s=4.0, ttft_slo_s=1.0)]
    wait(
        order, *goals, request(3, [1], deadline_s=7.0), request(4, [1]), request(5, [1], deadline_s=8.0, ttft_slo_s=2.0)
    )
    assert names(order) == [5, 2, 3, 1, 4]
    assert given_up(order, 6.5) == []
    assert given_up(order, 7.5) == [3]
