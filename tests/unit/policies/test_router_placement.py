"""The placement rules of routers: each against its definition, and all of them on real cores."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field

import pytest

from scheduler_svc.core.policy.interfaces import PlacementPolicy
from scheduler_svc.policies.placement import on_arrival
from scheduler_svc.policies.placement.cache_aware import CacheAware
from scheduler_svc.policies.placement.least_loaded import LeastLoaded
from scheduler_svc.policies.placement.overlap_cost import OverlapCost
from scheduler_svc.policies.placement.round_robin import RoundRobin
from scheduler_svc.policies.placement.two_choices import TwoChoices
from scheduler_svc.policies.registry import build, choose
from simulator.system import LocalSystem
from tests.unit.scheduler.test_placement import Recorder, submit_at_once

RULES = (RoundRobin, LeastLoaded, TwoChoices, CacheAware, OverlapCost)


@dataclass
class FakeRequest:
    arrival_index: int
    num_tokens: int = 100
    referenced: dict[int, int] = field(default_factory=dict)

    def referenced_tokens(self, worker_id: int) -> int:
        return self.referenced.get(worker_id, 0)


@dataclass
class FakeWorker:
    id: int
    num_rows: int = 0
    cached: int = 0
    queued_prefill_tokens: int = 0
    num_blocks: int = 1000
    free_blocks: int = 1000
    block_size: int = 16

    def cached_tokens(self, request: FakeRequest) -> int:
        return self.cached


def place(policy: PlacementPolicy, number: int, *workers: FakeWorker, full: tuple[FakeWorker, ...] = ()) -> int:
    chosen = policy.place(FakeRequest(number), list(workers), list(full))  # type: ignore[arg-type]
    return chosen.id


def placed(policy: PlacementPolicy, request: FakeRequest, *workers: FakeWorker) -> int:
    return policy.place(request, list(workers), []).id  # type: ignore[arg-type]


def rows(*counts: int) -> list[FakeWorker]:
    return [FakeWorker(i, count) for i, count in enumerate(counts, 1)]


@pytest.mark.parametrize("rule", RULES)
def test_a_choice_is_made_once_and_waits_for_its_worker(rule: type[PlacementPolicy]) -> None:
    policy = rule()
    workers = rows(3, 3, 3)
    first = place(policy, 1, *workers)
    chosen = next(worker for worker in workers if worker.id == first)
    chosen.num_rows = chosen.queued_prefill_tokens = 10_000
    others = [worker for worker in workers if worker.id != first]
    assert place(policy, 1, *others, full=(chosen,)) == first
    assert place(policy, 1, *others) != first, "the worker is gone"


@pytest.mark.parametrize("rule", RULES)
def test_the_reason_of_a_placement_is_given_when_the_request_is_bound(rule: type[PlacementPolicy]) -> None:
    policy = rule()
    chosen = place(policy, 1, *rows(0, 1))
    assert policy.bound(FakeRequest(1), chosen)  # type: ignore[arg-type]
    assert policy.bound(FakeRequest(1), chosen) == "", "a choice is forgotten once it is bound"  # type: ignore[arg-type]
    assert policy.bound(FakeRequest(2), 1) == "", "no choice was made for it"  # type: ignore[arg-type]


def test_choices_of_requests_that_never_run_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_arrival, "MAX_CHOICES", 3)
    policy = RoundRobin()
    assert [place(policy, number, *rows(0, 0)) for number in range(5)] == [1, 2, 1, 2, 1]
    assert list(policy._chosen) == [2, 3, 4]


def test_round_robin_takes_turns_and_goes_on_past_a_worker_that_left() -> None:
    policy = RoundRobin()
    first, second, third = rows(0, 0, 0)
    assert [place(policy, i, first, second, third) for i in range(4)] == [1, 2, 3, 1]
    assert [place(policy, i, first, third) for i in range(10, 13)] == [3, 1, 3]
    assert place(policy, 20, first, third, full=(second,)) == 1
    assert place(policy, 21, first, third, full=(second,)) == 2, "a full worker keeps its turn"


def test_least_loaded_counts_requests() -> None:
    assert place(LeastLoaded(), 1, *rows(4, 2, 3)) == 2
    assert place(LeastLoaded(), 1, *rows(2, 2, 3)) == 1


def test_two_choices_draws_each_pair_equally_often_and_takes_the_better_worker() -> None:
    policy = TwoChoices()
    chosen = Counter(place(policy, number, *rows(1, 2, 3)) for number in range(3_000))
    assert chosen[3] == 0, "it is the worse one of every pair"
    assert 1_900 < chosen[1] < 2_100, "it is in two of three pairs"
    assert 900 < chosen[2] < 1_100


def test_two_choices_depend_on_the_seed_alone() -> None:
    draws = [[place(TwoChoices(seed), n, *rows(1, 2, 3, 4)) for n in range(50)] for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


def test_cache_aware_follows_the_prefix_while_the_load_is_even() -> None:
    def chosen(cached: int, load: int, idle: int = 0) -> int:
        return place(CacheAware(), 1, FakeWorker(1, load, cached), FakeWorker(2, idle))

    assert chosen(cached=31, load=64) == 1, "64 requests more are allowed"
    assert chosen(cached=31, load=65) == 2
    assert chosen(cached=31, load=195, idle=130) == 1, "not more than 1.5 times as many"
    assert chosen(cached=31, load=196, idle=130) == 2


def test_cache_aware_needs_a_share_of_the_request() -> None:
    policy = CacheAware()
    assert place(policy, 1, FakeWorker(1, cached=31), FakeWorker(2)) == 1
    # 69 tokens were new to worker 1, so worker 2 has the smaller tree.
    assert place(policy, 2, FakeWorker(1, cached=30), FakeWorker(2)) == 2
    assert place(policy, 3, FakeWorker(1), FakeWorker(2)) == 1, "100 were new to worker 2"


def test_overlap_cost_weighs_prefill_blocks_against_blocks_in_use() -> None:
    busy = FakeWorker(1, cached=96, free_blocks=995)
    assert placed(OverlapCost(), FakeRequest(1, 112), busy, FakeWorker(2)) == 1, "1 + 5 blocks against 7"
    busy.free_blocks = 993
    assert placed(OverlapCost(), FakeRequest(1, 112), busy, FakeWorker(2)) == 2, "1 + 7 blocks against 7"
    assert placed(OverlapCost(2.0), FakeRequest(1, 112), busy, FakeWorker(2)) == 1, "2 + 7 blocks against 14"
    busy.queued_prefill_tokens = 96
    assert placed(OverlapCost(2.0), FakeRequest(1, 112), busy, FakeWorker(2)) == 2, "14 + 7 blocks against 14"


def test_overlap_cost_counts_a_shared_block_only_once() -> None:
    workers = FakeWorker(1, cached=96, free_blocks=993), FakeWorker(2)
    assert placed(OverlapCost(), FakeRequest(1, 112, referenced={1: 96}), *workers) == 1, "1 + 7 + 1 blocks against 14"


@pytest.mark.parametrize("rule", RULES)
def test_every_request_ends_on_real_workers(rule: type[PlacementPolicy]) -> None:
    errors: list[Exception] = []
    policies = dataclasses.replace(build(choose()), placement=rule())
    system = LocalSystem(policies=policies, on_policy_error=errors.append)
    workers = [Recorder(max_num_seqs=3), Recorder(), Recorder(num_blocks=40)]
    for worker in workers:
        system.attach(worker)
    system.open("s", window=1 << 20)
    prompts = [[9 + i % 3] * 20 + [100 + i] * (i % 5) for i in range(40)]
    submit_at_once(system, prompts)
    system.run()
    assert len(system.clients["s"].endings) == 40
    assert not errors
    system.assert_at_rest()
    let_in = [{name for names in worker.let_in for name in names} for worker in workers]
    assert set.union(*let_in) == {str(i) for i in range(1, 41)}
    assert rule is CacheAware or all(let_in), "each worker has its share"
