"""MAX_UTILIZATION does not look at every request, but plans the same steps as the plain form of its rule."""

from __future__ import annotations

import random
from typing import Any

import pytest

from paceline.v1.common_pb2 import SamplingParams
from paceline.v1.worker_pb2 import StepPlan, StepResult
from scheduler_svc.core.policy.step import CapacityPolicy, Step, Verdict
from scheduler_svc.core.policy.views import Running
from scheduler_svc.core.requests.prefixes import PrefixIndex
from scheduler_svc.core.requests.request import RequestView
from scheduler_svc.core.types import SchedulerConfig
from scheduler_svc.policies.capacity.max_utilization import MaxUtilization
from scheduler_svc.policies.order.priority import Priority
from scheduler_svc.policies.registry import build, choose
from simulator.system import LocalSystem
from simulator.toy_worker import ToyWorker
from tests.unit.scheduler.test_placement import submit_at_once

TWO_STAGE = {"batch": "two-stage", "preemption": "last-in"}
ORDERS = ["fcfs", "priority", "lof", "deadline", "random", "fair", "lpm", "hrrn"]
FAILING = f"{__name__}:Failing"


class Plain(CapacityPolicy):
    """The plain rule: goes through one list of the running and the waiting requests."""

    reserves_prompt = True
    preempts_for_waiting = True
    longest = 0  # length of the longest list of waiting requests

    def begin(self, step: Step) -> None:
        self.fitting: set[int] = set()
        step.pause(self.victims(step))

    def victims(self, step: Step) -> list[Running]:
        running = sorted(step.running, key=lambda item: item.request.queue_position)
        waiting = list(step.waiting())
        Plain.longest = max(Plain.longest, len(waiting))
        active: list[Running | RequestView] = [*running, *waiting]
        if active and step.rank(request_of(active[0])) is not None:
            active.sort(key=lambda item: step.rank(request_of(item)))
            if step.preempted:
                end = min(map(step.rank, step.preempted))
                active = [item for item in active if isinstance(item, Running) or step.rank(item) < end]
        elif step.preempted:
            active = list(running)
        slots, free_blocks = step.max_num_seqs - step.num_running + len(running), step.available_blocks
        paused, starting, i = list[Running](), PrefixIndex[RequestView](step.block_size), 0
        while i < len(active):
            item = active[i]
            if isinstance(item, Running):
                need = max(0, step.blocks_for(item.num_computed_tokens + 1) - item.num_blocks)
            elif step.another_computes_prefix_of(item, starting):
                i += 1
                continue
            else:
                need = step.need_blocks(item, step.uncached_tokens(item))
            if slots > 0 and need <= free_blocks:
                slots, free_blocks, i = slots - 1, free_blocks - need, i + 1
                if isinstance(item, RequestView):
                    self.fitting.add(item.arrival_index)
                    starting.add(item, item.num_tokens)
                continue
            behind = [(j, item) for j, item in enumerate(active[i:], i) if isinstance(item, Running)]
            if not behind:
                break
            j, victim = behind[-1]
            paused.append(victim)
            free_blocks += victim.num_blocks
            del active[j:]
        return paused

    def admit(self, step: Step, request: RequestView, need_blocks: int) -> Verdict:
        if request.arrival_index in self.fitting:
            self.fitting.remove(request.arrival_index)
            return Verdict.ADMIT
        return Verdict.SKIP if self.fitting else Verdict.STOP


def request_of(item: Running | RequestView) -> RequestView:
    return item.request if isinstance(item, Running) else item


class Recorder(ToyWorker):
    def reset(self, keeps_blocks: bool = False) -> None:
        super().reset(keeps_blocks)
        self.plans: list[bytes] = []

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan.SerializeToString(deterministic=True))
        return super().run(plan)


def play(capacity: str, order: str, seed: int) -> tuple[list[bytes], LocalSystem]:
    rng = random.Random(seed)
    mode = rng.choice(["recompute", "swap"])
    policies = build(choose("", {**TWO_STAGE, "order": order, "capacity": capacity}, {"mode": mode}))
    allows: Any = {"on_policy_error": lambda error: None} if order == FAILING else {}
    system = LocalSystem(policies=policies, **allows)
    size: dict[str, Any] = {"num_blocks": rng.randint(14, 36), "max_num_seqs": rng.randint(2, 8)}
    worker = Recorder(block_size=4, max_batched_tokens=64, num_host_blocks=rng.choice([0, 200]), **size)
    system.attach(worker)
    system.open("s", window=1 << 20)
    shared = [rng.randrange(9, 90) for _ in range(30)]
    handles = list(range(rng.randint(8, 30)))
    while handles:
        prompt = shared[: rng.choice([0, 0, 3, 14])] + [rng.randrange(9, 90) for _ in range(rng.randint(1, 16))]
        fields: dict[str, Any] = {"priority": float(rng.randint(0, 2)), "tenant": rng.choice("ab")}
        if rng.random() < 0.3:
            fields["deadline_s"] = float(rng.randint(1000, 2000))
        sampling = SamplingParams(top_p=1.0, max_tokens=rng.randint(1, 24), seed=rng.randrange(99), ignore_eos=True)
        system.submit("s", handles.pop(), prompt, sampling, **fields)
        system.run_for(rng.choice([0, 0, 1, 5, 30]))
        system.now_s += rng.random()
    system.run()
    system.assert_at_rest()
    return worker.plans, system


@pytest.mark.parametrize("order", ORDERS)
def test_the_same_steps_as_by_the_plain_rule(order: str) -> None:
    Plain.longest = preempted = 0
    for seed in range(12):
        expected, _ = play(f"{__name__}:{Plain.__name__}", order, seed)
        plans, system = play("max-utilization", order, seed)
        assert plans == expected, f"seed {seed}"
        preempted += system.scheduler.counters.preempted
    assert preempted > 10
    assert Plain.longest > 5


class Failing(Priority):
    """An order that fails at its 20th `add`. Another order then replaces it."""

    added = 0

    def add(self, request: RequestView) -> None:
        Failing.added += 1
        if Failing.added == 20:
            raise RuntimeError("lost count")
        super().add(request)


def test_the_same_steps_as_by_the_plain_rule_when_the_order_fails() -> None:
    failed = 0
    for seed in [54, 85, *range(100, 112)]:
        Failing.added = 0
        expected, _ = play(f"{__name__}:{Plain.__name__}", FAILING, seed)
        Failing.added = 0
        plans, system = play("max-utilization", FAILING, seed)
        assert plans == expected, f"seed {seed}"
        failed += system.scheduler.counters.policy_errors
    assert failed > 8


def test_with_all_slots_taken_the_waiting_requests_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    system = LocalSystem(policies=build(choose("trtllm-max-util")))
    system.attach(ToyWorker(block_size=4, num_blocks=400, max_num_seqs=8, max_batched_tokens=64))
    system.open("s", window=1 << 20)
    for handle in range(200):
        system.submit("s", handle, [9 + handle] * 8, SamplingParams(top_p=1.0, max_tokens=40, ignore_eos=True))
    looks = list[int]()
    waiting, running, begin = Step.waiting, Step.running, MaxUtilization.begin

    def counted(self: MaxUtilization, step: Step) -> None:
        looks.append(0)
        begin(self, step)

    monkeypatch.setattr(MaxUtilization, "begin", counted)
    system.run_for(50)
    assert len(next(iter(system.scheduler.workers.values())).batch.running) == 8

    def count(items: Any) -> Any:
        for item in items:
            looks[-1] += 1
            yield item

    monkeypatch.setattr(Step, "waiting", lambda self: count(waiting(self)))
    monkeypatch.setattr(Step, "running", property(lambda self: tuple(count(running.__get__(self)))))
    looks.clear()
    system.run_for(60)
    assert len(looks) >= 15
    assert sorted(looks)[len(looks) // 2] <= 2  # the first request, once for capacity and once for the batch


@pytest.mark.parametrize("capacity", ["guaranteed-no-evict", "max-utilization"])
def test_equal_prompts_start_together_if_only_their_last_token_is_to_be_computed(capacity: str) -> None:
    """Both prompts are cached to their end. The last block is copied for each prompt, so waiting would save nothing."""
    worker = Recorder(block_size=4, num_blocks=64, max_num_seqs=4, max_batched_tokens=64)
    system = LocalSystem(policies=build(choose("", {**TWO_STAGE, "capacity": capacity})))
    system.attach(worker)
    system.open("s", window=1 << 20)
    submit_at_once(system, [[9] * 8])
    system.run()
    num_plans = len(worker.plans)
    submit_at_once(system, [[9] * 8, [9] * 8], first=2)
    system.run()
    later = [StepPlan.FromString(plan) for plan in worker.plans[num_plans:]]
    assert max(len(plan.new_sequences) for plan in later) == 2


def test_without_prefix_caching_equal_prompts_start_together() -> None:
    worker = Recorder(block_size=4, num_blocks=64, max_num_seqs=4, max_batched_tokens=64)
    policies = build(choose("", {**TWO_STAGE, "capacity": "guaranteed-no-evict"}))
    system = LocalSystem(SchedulerConfig(prefix_caching=False), policies)
    system.attach(worker)
    system.open("s", window=1 << 20)
    submit_at_once(system, [[9] * 20, [9] * 20])
    system.run()
    assert max(len(StepPlan.FromString(plan).new_sequences) for plan in worker.plans) == 2
