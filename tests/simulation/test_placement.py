"""Placement by predicted time with the real cores: a shared prompt spreads, conversations return to their cached KV.

Workers are simulated in virtual time with the step times of an 8B model on an H200 (simulator/fleet.py).
"""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_svc.policies.registry import build, choose
from simulator.cluster import ClientSession, Cluster, Turn
from simulator.fleet import WorkerSpec
from simulator.workloads import WORKLOADS, draw, make_sessions

PREFIX_TOKENS = 1500
OUTPUT_TOKENS = 48


def one_prompt(count: int, per_s: float, seed: int = 0) -> list[ClientSession]:
    """The first request brings a prefix of 1,500 tokens into a worker's cache. From second 2 on, requests share this
    prefix and have 8 own tokens each."""
    rng = np.random.default_rng(seed)
    prefix = draw(rng, PREFIX_TOKENS)
    arrivals_s = [0.0, *(2.0 + rng.exponential(1 / per_s, count).cumsum() if per_s else [2.0] * count)]
    return [
        ClientSession(float(at_s), [Turn(0.0, np.concatenate((prefix, draw(rng, 8))), OUTPUT_TOKENS)])
        for at_s in arrivals_s
    ]


def played(sessions: list[ClientSession], *fleet: WorkerSpec, placement: str = "", concurrency: int = 0) -> Cluster:
    cluster = Cluster(fleet, build(choose("", {"placement": placement})), seed=1)
    cluster.run(sessions, concurrency)
    return cluster


def shares(cluster: Cluster) -> list[float]:
    """Each worker's share of the output tokens, in the order of the fleet."""
    sampled = {lived.worker.name: lived.worker.num_sampled for lived in cluster.lived}
    return [sampled[name] / sum(sampled.values()) for name in sorted(sampled)]


def cached_tokens(cluster: Cluster) -> int:
    return sum(asked.cached_tokens for asked in cluster.asked)


@pytest.mark.parametrize(("per_s", "concurrency"), [(0.0, 32), (2.5, 0), (60.0, 0)])
def test_a_shared_prompt_spreads_over_two_workers(per_s: float, concurrency: int) -> None:
    cluster = played(one_prompt(64, per_s), WorkerSpec(), WorkerSpec(), concurrency=concurrency)
    assert min(shares(cluster)) >= 0.4, shares(cluster)
    computed = [lived.worker.num_prompt_tokens for lived in cluster.lived]
    assert max(computed) < 2 * PREFIX_TOKENS + 64 * 8, "no worker computes the prefix twice"


def test_under_load_two_workers_serve_a_shared_prompt_faster_than_one() -> None:
    """A step of 64 rows takes 8 ms, and a step of 32 rows 6.3 ms. So two workers with half a batch each are not twice
    as fast as one. Therefore this test gives two workers twice as many clients as one worker."""
    sessions = one_prompt(1500, 0.0)
    one = played(sessions, WorkerSpec(), concurrency=64)
    two = played(sessions, WorkerSpec(), WorkerSpec(), concurrency=128)
    assert one.now_s / two.now_s > 1.8


def test_two_workers_reuse_as_much_of_conversations_as_one() -> None:
    sessions = make_sessions(WORKLOADS["conversations"], capacity=1.0, seed=3, scale=0.4)
    one = played(sessions, WorkerSpec())
    two = played(sessions, WorkerSpec(), WorkerSpec())
    assert cached_tokens(two) >= 0.95 * cached_tokens(one)
    assert min(shares(two)) > 0.3


def test_a_worker_that_joins_cold_takes_its_share() -> None:
    cluster = played(one_prompt(600, 60.0), WorkerSpec(), WorkerSpec(joins_s=4.0))
    late = [asked for asked in cluster.asked if asked.asked_s > 4.0]
    expected = sum(asked.num_output_tokens for asked in late) / 2
    assert shares(cluster)[1] * len(cluster.asked) * OUTPUT_TOKENS > 0.8 * expected


def test_a_slower_worker_gets_less_and_a_worker_with_a_small_pool_gets_some() -> None:
    spec = WorkerSpec()
    slower = spec.altered(cost=spec.cost.faster(0.5))
    fast_share, slow_share = shares(played(one_prompt(800, 150.0), spec, slower))
    assert fast_share > 1.5 * slow_share > 0
    cluster = played(one_prompt(800, 150.0), spec, spec.altered(num_blocks=400))
    assert shares(cluster)[1] > 0.1


def test_equal_runs_make_equal_placements() -> None:
    first, second = (played(one_prompt(64, 20.0), WorkerSpec(), WorkerSpec()) for _ in range(2))
    assert [(a.first_s, a.ended_s) for a in first.asked] == [(a.first_s, a.ended_s) for a in second.asked]
