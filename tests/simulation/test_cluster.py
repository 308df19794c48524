"""The cluster simulation: a cost model gives the time of each step, and a seed determines the whole run.

The run itself asserts that each request gets exactly the tokens that it would get alone.
"""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_svc.policies.registry import build, choose
from simulator.cluster import ClientSession, Cluster, Turn
from simulator.fleet import StepCost, WorkerSpec
from simulator.workloads import WORKLOADS, make_sessions


def cluster(*fleet: WorkerSpec, seed: int = 0, jitter: float = 0.0) -> Cluster:
    return Cluster(fleet, build(choose()), seed, jitter)


def prompt(num_tokens: int, first: int = 1) -> np.ndarray:
    return np.arange(first, first + num_tokens, dtype=np.int32)


def request(at_s: float, num_tokens: int, num_output_tokens: int, first: int = 1) -> ClientSession:
    return ClientSession(at_s, [Turn(0.0, prompt(num_tokens, first), num_output_tokens)])


def trail(run: Cluster) -> list[tuple[float, float, float, int]]:
    return [(asked.asked_s, asked.first_s, asked.ended_s, asked.cached_tokens) for asked in run.asked]


def test_a_step_takes_the_time_that_the_cost_model_gives() -> None:
    cost = StepCost(base_s=0.01, new_s=1e-4, context_s=1e-6, row_s=1e-3, pair_s=0.0)
    run = cluster(WorkerSpec(cost))
    run.run([request(1.0, 100, 3)])
    first_s = 1.0 + 0.01 + 100 * 1e-4
    assert run.asked[0].first_s == pytest.approx(first_s)
    # Two decode steps: each has one row, which attends to 101 and 102 tokens.
    assert run.asked[0].ended_s == pytest.approx(first_s + 2 * (0.01 + 1e-3) + (101 + 102) * 1e-6)


def test_attention_of_a_prefill_grows_with_the_square_of_its_length() -> None:
    spec = WorkerSpec(StepCost(base_s=0.0, new_s=0.0, context_s=0.0, row_s=0.0, pair_s=1e-6))
    times = []
    for num_tokens in (1_000, 2_000):
        run = cluster(spec)
        run.run([request(0.0, num_tokens, 1)])
        times.append(run.asked[0].first_s)
    assert times[1] == pytest.approx(4 * times[0])


def test_a_faster_worker_takes_less_time() -> None:
    spec = WorkerSpec()
    times = []
    for cost in (spec.cost, spec.cost.faster(2)):
        run = cluster(spec.altered(cost=cost))
        run.run([request(0.0, 500, 20)])
        times.append(run.now_s)
    assert times[0] == pytest.approx(2 * times[1])


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("concurrency", [0, 12])
def test_the_same_seed_gives_the_same_run(name: str, concurrency: int) -> None:
    trails = []
    for seed in (3, 3, 4):
        run = cluster(WorkerSpec(), WorkerSpec(), seed=seed, jitter=0.03)
        run.run(make_sessions(WORKLOADS[name], 2, seed, scale=0.03), concurrency)
        trails.append(trail(run))
    assert trails[0] == trails[1]
    assert trails[0] != trails[2]


def test_the_next_turn_begins_after_the_pause_and_reuses_the_last_turn() -> None:
    turns = [Turn(0.0, prompt(64), 16), Turn(2.0, prompt(8, 1_000), 4)]
    run = cluster(WorkerSpec())
    run.run([ClientSession(0.0, turns)])
    first, second = run.asked
    assert second.asked_s == pytest.approx(first.ended_s + 2.0)
    assert len(second.prompt) == 64 + 16 + 8
    assert second.cached_tokens == 64 + 16 - 1, "all but the last output token, which was never computed"


def test_a_closed_loop_run_keeps_a_fixed_number_of_sessions_open() -> None:
    sessions = make_sessions(WORKLOADS["conversations"], 1, 0, scale=0.2)
    run = cluster(WorkerSpec())
    run.run(sessions, concurrency=5)
    ends = sorted((asked.ended_s, -1) for asked in run.asked)
    events = sorted([*ends, *((asked.asked_s, 1) for asked in run.asked)])
    open_requests = np.cumsum([change for _, change in events])
    assert open_requests.max() == 5
    middle = open_requests[len(events) // 10 : len(events) // 2]
    assert (middle == 5).mean() > 0.4, "the next request begins as soon as one ends"


def test_requests_of_a_worker_that_dies_are_computed_elsewhere() -> None:
    sessions = [request(0.0, 200, 400, first=1_000 * i + 1) for i in range(8)]
    run = cluster(WorkerSpec(dies_s=1.0), WorkerSpec())
    run.run(sessions)
    dead, alive = run.lived
    assert dead.alive_s == pytest.approx(1.0)
    assert dead.worker.num_sampled > 0
    assert all(asked.ended_s > 1.0 for asked in run.asked)
    assert alive.worker.num_sampled < 8 * 400, "tokens that were delivered are not generated again"
    assert alive.worker.num_prompt_tokens > 8 * 200


def test_a_worker_that_joins_gets_requests() -> None:
    sessions = [request(0.05 * i, 400, 100, first=1_000 * i + 1) for i in range(60)]
    run = cluster(WorkerSpec(), WorkerSpec(joins_s=1.0))
    run.run(sessions)
    assert run.lived[1].worker.num_sampled > 0
    assert run.lived[1].alive_s == pytest.approx(run.now_s - 1.0)


def test_a_run_in_which_no_request_can_end_is_given_up() -> None:
    run = cluster(WorkerSpec(joins_s=1e9))
    with pytest.raises(RuntimeError, match="no request has ended"):
        run.run([request(0.0, 10, 10)])
