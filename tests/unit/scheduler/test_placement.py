"""Which worker takes a waiting request. Each worker gets a share, and admits as much of it in a step as fits."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from paceline.v1.common_pb2 import SamplingParams
from paceline.v1.inference_pb2 import SessionRequest, Submission
from paceline.v1.worker_pb2 import StepPlan, StepResult
from scheduler_svc.core.types import SchedulerConfig
from scheduler_svc.policies.presets import PRESETS
from scheduler_svc.policies.registry import build, choose
from simulator.system import LocalSystem
from simulator.toy_worker import ToyWorker


class Recorder(ToyWorker):
    """Notes which requests each of its steps admits."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**{"block_size": 4, "num_blocks": 400, "max_num_seqs": 16, "max_batched_tokens": 64} | sizes)
        self.let_in: list[list[str]] = []

    def run(self, plan: StepPlan) -> StepResult:
        self.let_in.append([new.request_id for new in plan.new_sequences])
        return super().run(plan)


def system_of(workers: list[Recorder], preset: str = "", max_num_seqs: int = 0) -> LocalSystem:
    system = LocalSystem(SchedulerConfig(window=1, max_num_seqs=max_num_seqs), build(choose(preset)))
    for worker in workers:
        system.attach(worker)
    system.open("s", window=1 << 20)
    return system


def submit_at_once(system: LocalSystem, prompts: list[list[int]], max_tokens: int = 6, first: int = 1) -> None:
    submissions = [
        Submission(
            handle=i,
            request_id=str(i),
            prompt_token_ids=np.array(prompt, np.int32).tobytes(),
            sampling=SamplingParams(top_p=1.0, max_tokens=max_tokens, seed=1, ignore_eos=True),
        )
        for i, prompt in enumerate(prompts, first)
    ]
    system.scheduler.session_message("s", SessionRequest(submissions=submissions), system.now_s)
    system.poll()


@pytest.mark.parametrize("preset", PRESETS)
def test_a_burst_fills_the_first_steps_of_all_workers(preset: str) -> None:
    workers = [Recorder(), Recorder(), Recorder()]
    system = system_of(workers, preset)
    submit_at_once(system, [[9 + i] * 8 for i in range(60)])
    system.run()
    for worker in workers:
        first = next(names for names in worker.let_in if names)
        assert len(first) == 8, "a budget of 64 tokens has room for 8 prompts of 8"
    assert sum(len(names) for worker in workers for names in worker.let_in) == 60
    system.assert_at_rest()


def test_equal_requests_alternate_between_workers() -> None:
    workers = [Recorder(), Recorder()]
    system = system_of(workers)
    submit_at_once(system, [[9 + i] * 8 for i in range(6)])
    system.run()
    assert [worker.let_in[0] for worker in workers] == [["1", "3", "5"], ["2", "4", "6"]]


def test_a_long_prompt_leaves_the_others_to_the_other_worker() -> None:
    workers = [Recorder(max_batched_tokens=256), Recorder(max_batched_tokens=256)]
    system = system_of(workers)
    submit_at_once(system, [[9] * 200, *([10 + i] * 8 for i in range(6))])
    system.run()
    assert [worker.let_in[0] for worker in workers] == [["1"], ["2", "3", "4", "5", "6", "7"]]


def test_a_cached_prefix_attracts_requests_until_waiting_costs_more() -> None:
    workers = [Recorder(max_batched_tokens=256, max_num_seqs=64), Recorder(max_batched_tokens=256, max_num_seqs=64)]
    system = system_of(workers)
    shared = [7000 + i for i in range(100)]
    submit_at_once(system, [shared])
    system.run()
    [owner] = [worker for worker in workers if worker.num_computed]
    for worker in workers:
        worker.let_in.clear()
    submit_at_once(system, [[*shared, 20 + i] for i in range(12)], first=2)
    system.run()
    first = {worker is owner: worker.let_in[0] for worker in workers}
    assert first[True][:4] == ["2", "3", "4", "5"]
    assert first[False], "the other worker is faster in the end"
    assert len(first[True]) > len(first[False])


def test_where_one_worker_has_no_slots_the_other_takes_all() -> None:
    workers = [Recorder(max_num_seqs=2), Recorder()]
    system = system_of(workers)
    submit_at_once(system, [[9 + i] * 4 for i in range(12)], max_tokens=40)
    rng = random.Random(0)
    for _ in range(60):
        system.move(*rng.choice(system.moves()))
    assert [sum(len(names) for names in worker.let_in) for worker in workers] == [2, 10]
    system.run()
    system.assert_at_rest()


def test_a_worker_full_by_the_schedulers_own_limit_has_no_slots() -> None:
    workers = [Recorder(max_batched_tokens=256), Recorder(max_batched_tokens=256)]
    system = system_of(workers, max_num_seqs=2)
    submit_at_once(system, [[9] * 200, *([10 + i] * 8 for i in range(3))])
    rng = random.Random(0)
    for _ in range(12):
        system.move(*rng.choice(system.moves()))
    assert [sorted(itertools.chain(*worker.let_in)) for worker in workers] == [["1", "4"], ["2", "3"]]
    assert not len(system.scheduler.queue)


def test_a_worker_with_enough_blocks_takes_the_requests_that_need_them() -> None:
    workers = [Recorder(num_blocks=10), Recorder(num_blocks=100)]
    system = system_of(workers)
    submit_at_once(system, [[9 + i] * 60 for i in range(4)])
    system.run()
    assert [name for names in workers[0].let_in for name in names] == []
    assert [name for names in workers[1].let_in for name in names] == ["1", "2", "3", "4"]


def test_slots_that_a_pending_step_takes_are_not_shared_out() -> None:
    """No request waits for such a slot while younger requests run on another worker."""
    workers = [Recorder(max_num_seqs=2, max_batched_tokens=512), Recorder(max_num_seqs=4, max_batched_tokens=512)]
    system = system_of(workers)
    submit_at_once(system, [[9 + i] * 4 for i in range(8)], max_tokens=100)
    for _ in range(60):
        system.move(*system.moves()[0])
    assert [request.handle for request in system.scheduler.queue] == [7, 8]


@pytest.mark.parametrize("preset", ["trtllm-no-evict", "sglang", "trtllm-static"])
def test_a_request_that_a_policy_rejects_at_one_worker_runs_on_another(preset: str) -> None:
    """Even though the first worker has the prefix of the request."""
    workers = [Recorder(num_blocks=100, max_batched_tokens=256) for _ in range(2)]
    system, shared = system_of(workers, preset), [500 + i for i in range(100)]
    submit_at_once(system, [shared])
    system.run()
    [owner] = [worker for worker in workers if worker.num_computed]
    [other] = [worker for worker in workers if worker is not owner]
    submit_at_once(system, [[*shared, 7]], max_tokens=250, first=2)
    system.run_for(30)
    submit_at_once(system, [[*shared, 8]], max_tokens=150, first=3)
    system.run()
    assert ["2"] in owner.let_in
    assert ["3"] in other.let_in
    system.assert_at_rest()
