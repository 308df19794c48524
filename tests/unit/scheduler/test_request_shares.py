"""A request of many sequences leaves room for others, under the default preset. Counted in steps, not in seconds."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from paceline.v1.common_pb2 import SamplingParams
from paceline.v1.inference_pb2 import BeamOptions
from paceline.v1.worker_pb2 import StepPlan, StepResult
from scheduler_svc.core.types import SchedulerConfig
from scheduler_svc.policies.preemption.largest_share import LargestShare
from scheduler_svc.policies.presets import PRESETS
from scheduler_svc.policies.registry import build, choose
from simulator.system import Client, LocalSystem
from simulator.toy_worker import ToyWorker

SLOTS = 16
SHORT = SamplingParams(top_p=1.0, max_tokens=4, ignore_eos=True)
# The preset `paceline` without its fairness.
FIRST_COME: dict[str, Any] = {"order": "fcfs", "preemption": "last-in"}


def start(num_blocks: int, num_workers: int = 1, overrides: dict[str, str] | None = None) -> tuple[LocalSystem, Client]:
    system = LocalSystem(SchedulerConfig(), build(choose("", overrides)))
    for _ in range(num_workers):
        sizes = {"block_size": 4, "max_num_seqs": SLOTS, "max_batched_tokens": 256}
        system.attach(ToyWorker(num_blocks=num_blocks, **sizes))
    return system, system.open("s", window=1 << 20)


def submit_samples(system: LocalSystem, first: int, n: int, max_tokens: int, tenant: str = "") -> None:
    sampling = SamplingParams(top_p=1.0, max_tokens=max_tokens, ignore_eos=True)
    for handle in range(first, first + n):
        fork_of = first if handle > first else 0
        system.submit("s", handle, [50 + first] * 9, sampling, fork_of=fork_of, tenant=tenant)


def steps_to_first_tokens(system: LocalSystem, client: Client, handles: range, rng: random.Random) -> list[int]:
    """Steps of all workers until each of these has its first token."""
    before, seen = system.scheduler.counters.steps, dict[int, int]()
    while len(seen) < len(handles):
        system.move(*rng.choice(system.moves()))
        for handle in handles:
            if handle in client.tokens:
                seen.setdefault(handle, system.scheduler.counters.steps - before)
    return list(seen.values())


def play(system: LocalSystem, num_moves: int, rng: random.Random) -> None:
    for _ in range(num_moves):
        system.move(*rng.choice(system.moves()))


@pytest.mark.parametrize(("num_blocks", "num_workers"), [(4000, 1), (300, 1), (4000, 2)])
def test_samples_that_hold_every_slot_are_preempted_for_other_requests(num_blocks: int, num_workers: int) -> None:
    """Eight requests of 16 samples hold all slots, or (300 blocks) the whole pool, for hundreds of steps."""
    system, client = start(num_blocks, num_workers)
    rng = random.Random(1)
    for request in range(8):
        submit_samples(system, 1 + 16 * request, 16, 200)
    play(system, 100 * num_workers, rng)
    workers = system.scheduler.workers.values()
    assert num_blocks < 4000 or all(len(worker.batch.running) == SLOTS for worker in workers)
    others = range(1000, 1008)
    for handle in others:
        system.submit("s", handle, [handle] * 9, SHORT)
    assert max(steps_to_first_tokens(system, client, others, rng)) <= 12 * num_workers
    system.run()
    assert all(len(client.tokens[handle]) == 200 for handle in range(1, 129))
    system.assert_at_rest()


def test_a_request_always_keeps_one_sequence() -> None:
    system, client = start(4000)
    submit_samples(system, 1, 16, 40)
    system.run_for(30)
    for handle in range(1000, 1100):
        system.submit("s", handle, [handle] * 9, SHORT)
    (worker,) = system.scheduler.workers.values()
    while 1 not in client.endings:
        system.move(*system.moves()[0])
        assert any(request.handle < 100 for request in worker.batch.running.values()), "the samples have stopped"
    system.run()
    assert len(client.endings) == 116
    system.assert_at_rest()


def test_no_sequence_is_preempted_for_further_samples_or_while_a_slot_is_free() -> None:
    system, client = start(4000)
    submit_samples(system, 1, 8, 60)
    submit_samples(system, 101, 8, 60)
    system.run_for(40)
    submit_samples(system, 201, 8, 60)  # its first sample needs a slot, the others wait
    system.run()
    assert system.scheduler.counters.preempted == 1
    assert len(client.endings) == 24


@pytest.mark.parametrize("num_blocks", [4000, 300])
def test_searches_let_other_requests_in_between_their_steps(num_blocks: int) -> None:
    system, client = start(num_blocks)
    rng = random.Random(1)
    sampling = SamplingParams(top_p=1.0, max_tokens=30, ignore_eos=True)
    for handle in range(1, 5):
        system.submit("s", handle, [50 + handle] * 9, sampling, beam=BeamOptions(width=16, num_return=1))
    play(system, 60, rng)
    others = range(1000, 1010)
    for handle in others:
        system.submit("s", handle, [handle] * 9, SHORT)
    assert max(steps_to_first_tokens(system, client, others, rng)) <= 12
    system.run()
    assert len(client.endings) == 14
    system.assert_at_rest()


def test_a_preemption_is_in_the_timeline_and_the_sequence_is_not_computed_again() -> None:
    system, _ = start(4000)
    submit_samples(system, 1, 16, 200)
    system.run_for(60)
    system.submit("s", 1000, [7] * 9, SHORT)
    system.run()
    spans = [span for handle in range(1, 17) for span in system.scheduler.timeline.explain(f"s-{handle}", 1.0) or ()]
    assert [span.detail for span in spans if span.reason == "preempted"] == ["preempted for a waiting request"]
    assert system.cache.counters.prefix_query_tokens < 16 * 9 + 9 + 1


def test_the_largest_share_of_running_sequences_is_preempted() -> None:
    """When blocks are missing, the sequences of the tenant that holds most are preempted, first those of its request
    with most samples. The other tenant's request runs on."""
    system, _ = start(120)
    submit_samples(system, 1, 8, 100, tenant="flood")
    system.submit("s", 50, [3] * 9, SamplingParams(top_p=1.0, max_tokens=100, ignore_eos=True), tenant="flood")
    system.run_for(40)
    system.submit("s", 60, [4] * 9, SamplingParams(top_p=1.0, max_tokens=100, ignore_eos=True), tenant="other")
    system.run()
    preempted = {
        handle
        for handle in [*range(1, 9), 50, 60]
        if any(span.reason == "preempted" for span in system.scheduler.timeline.explain(f"s-{handle}", 1.0) or ())
    }
    assert preempted
    assert preempted <= set(range(1, 9))
    system.assert_at_rest()


class Recorded(ToyWorker):
    """Keeps the plans that it is given."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(block_size=4, num_blocks=num_blocks, max_num_seqs=6, max_batched_tokens=32)
        self.plans: list[bytes] = []

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan.SerializeToString(deterministic=True))
        return super().run(plan)


def plans(overrides: dict[str, str], seed: int, tenant: str) -> list[list[bytes]]:
    """What the workers are sent, under a load that fills queue and pool."""
    rng = random.Random(seed)
    system = LocalSystem(SchedulerConfig(), build(choose("", overrides)))
    workers = [Recorded(rng.choice([21, 24])) for _ in range(rng.choice([1, 2]))]
    for worker in workers:
        system.attach(worker)
    system.open("s", window=1 << 20)
    for handle in range(1, 60):
        prompt = [rng.choice([7, 8])] * rng.randrange(1, 40)
        sampling = SamplingParams(top_p=1.0, max_tokens=rng.randrange(1, 40), ignore_eos=True)
        system.submit("s", handle, prompt, sampling, tenant=tenant, priority=float(rng.randrange(3)))
        for _ in range(rng.randrange(12)):
            if moves := system.moves():
                system.now_s += 0.01
                system.move(*rng.choice(moves))
    while moves := system.moves():
        system.move(*rng.choice(moves))
    assert system.scheduler.counters.preempted
    return [worker.plans for worker in workers]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("tenant", ["", "one"])
def test_for_one_tenant_the_default_makes_the_same_plans_as_first_come_first_served(seed: int, tenant: str) -> None:
    assert plans({}, seed, tenant) == plans(FIRST_COME, seed, tenant)


def test_the_default_differs_from_first_come_first_served_in_nothing_else() -> None:
    old = replace(PRESETS["paceline"], **FIRST_COME)
    assert old == choose("", FIRST_COME)
    assert (PRESETS["paceline"].order, PRESETS["paceline"].preemption) == ("fair", "largest-share")


def test_a_flood_of_one_tenant_does_not_hold_up_another() -> None:
    system, client = start(4000)
    sampling = SamplingParams(top_p=1.0, max_tokens=20, ignore_eos=True)
    for handle in range(1, 501):
        system.submit("s", handle, [handle] * 9, sampling, tenant="flood")
    rng = random.Random(0)
    play(system, 60, rng)
    system.submit("s", 1000, [3] * 9, SHORT, tenant="other")
    assert max(steps_to_first_tokens(system, client, range(1000, 1001), rng)) <= 30, "until a slot is free"
    system.run()
    assert len(client.endings) == 501


@pytest.mark.parametrize("order", ["fair", "fcfs", "priority", "lpm", "hrrn"])
def test_no_sequence_is_preempted_if_the_order_would_admit_it_again_first(order: str) -> None:
    """The waiting tenant was served more (`fair`), or the samples came first. So the samples keep their slots."""
    system, client = start(4000, overrides={"order": order, "preemption": "largest-share"})
    submit_samples(system, 1, 16, 300, tenant="samples")
    system.run_for(60)
    if order == "fair":
        system.submit("s", 900, [9] * 3000, SHORT, tenant="served")
        while 900 not in client.endings:
            system.move(*system.moves()[0])
    preempted = system.scheduler.counters.preempted
    system.submit("s", 901, [8] * 9, SHORT, tenant="served")
    while 901 not in client.tokens:
        system.move(*system.moves()[0])
    assert system.scheduler.counters.preempted - preempted <= 1
    system.run()
    assert len(client.endings) == (18 if order == "fair" else 17)
    system.assert_at_rest()


def test_a_policy_that_names_every_running_sequence_keeps_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LargestShare, "for_waiting", lambda self, step: step.running)
    system, _ = start(4000)
    submit_samples(system, 1, SLOTS, 200)
    system.run_for(60)
    system.submit("s", 1000, [7] * 9, SHORT)
    (worker,) = system.scheduler.workers.values()
    while not system.scheduler.counters.preempted:
        assert len(worker.batch.running) == SLOTS
        system.move(*system.moves()[0])
    assert system.scheduler.counters.preempted == SLOTS - 1
