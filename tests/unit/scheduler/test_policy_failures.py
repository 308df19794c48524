"""What `policy get` says of policies that failed, and that a NaN sort key is a failure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.v1.admin_pb2 import GetPolicyRequest, GetPolicyResponse, PolicyChoice, SetPolicyRequest
from paceline.v1.common_pb2 import SamplingParams
from scheduler_svc.admin import Admin
from scheduler_svc.core.policy.interfaces import BatchPolicy, PlacementPolicy, Policies
from scheduler_svc.core.policy.worker_view import WorkerView
from scheduler_svc.policies.api import KeyedOrder, RequestView, Step, Verdict
from scheduler_svc.policies.capacity.watermark import Watermark
from scheduler_svc.policies.order.fcfs import FirstComeFirstServed
from scheduler_svc.policies.registry import build, choose
from simulator.system import LocalSystem
from simulator.toy_worker import ToyWorker, expected_output

PARAMS = SamplingParams(top_p=1.0, max_tokens=4, seed=1, ignore_eos=True)


class Divides(Watermark):
    def admit(self, step: Step, request: RequestView, need_blocks: int) -> Verdict:
        return self.share(need_blocks, 0)

    def share(self, of: int, among: int) -> Verdict:
        return Verdict.ADMIT if of / among else Verdict.SKIP


class ForgetsOne(FirstComeFirstServed):
    def ordered(self, now_s: float) -> Iterator[RequestView]:
        return iter(list(super().ordered(now_s))[1:])


class Key(KeyedOrder):
    """All requests have the key `made`."""

    made: Any = None

    def key(self, request: RequestView) -> Any:
        return self.made


class ConstantKey(Key):
    key_is_constant = True


def system_of(**kinds: Any) -> tuple[LocalSystem, Admin]:
    policies: Policies = dataclasses.replace(build(choose()), **kinds)
    system = LocalSystem(policies=policies, on_policy_error=lambda error: None)
    system.open("s")
    system.attach(ToyWorker(block_size=4, num_blocks=64, max_num_seqs=2, max_batched_tokens=64))
    names = {kind: f"mine:{type(policy).__name__}" for kind, policy in kinds.items()}
    return system, Admin(system.scheduler, choose("", names))


def serve(system: LocalSystem, count: int = 3) -> None:
    """Each request gets its tokens, whatever the policies do."""
    for handle in range(1, count + 1):
        system.submit("s", handle, [handle, 7, 9], PARAMS)
    system.run()
    for handle in range(1, count + 1):
        assert system.clients["s"].tokens[handle] == expected_output([handle, 7, 9], PARAMS)


async def get(admin: Admin) -> GetPolicyResponse:
    return await admin.GetPolicy(GetPolicyRequest(), None)  # type: ignore[arg-type]


async def test_a_policy_that_fails_in_some_steps_is_named_with_its_error() -> None:
    system, admin = system_of(capacity=Divides(0.01, 0.05))
    assert not (await get(admin)).failures
    serve(system)
    answer = await get(admin)
    [failure] = answer.failures
    assert (failure.kind, failure.policy) == ("capacity", "mine:Divides")
    assert 0 < failure.count == system.scheduler.counters.policy_errors <= answer.num_steps
    assert failure.last_error.startswith("ZeroDivisionError: division by zero (test_policy_failures.py:")
    assert (answer.fallback.preset, answer.fallback.capacity) == ("paceline", "watermark")


async def test_an_order_that_leaves_a_request_out_fails_with_the_error_of_the_core() -> None:
    system, admin = system_of(order=ForgetsOne())
    serve(system)
    [failure] = (await get(admin)).failures
    assert (failure.kind, failure.policy) == ("order", "mine:ForgetsOne")
    assert "1 of 1 waiting requests are left out" in failure.last_error


async def test_failures_count_from_the_last_change_of_policies() -> None:
    system, admin = system_of(capacity=Divides(0.01, 0.05))
    serve(system)
    await admin.SetPolicy(SetPolicyRequest(choice=PolicyChoice(preset="sglang")), None)  # type: ignore[arg-type]
    answer = await get(admin)
    assert (list(answer.failures), answer.num_steps) == ([], 0)


@pytest.mark.parametrize("order", [Key, ConstantKey])
@pytest.mark.parametrize(
    "key", [math.nan, (1, math.nan), ("a", (2.0, (math.nan,))), (float("nan"), 1)], ids=["bare", "tuple", "deep", "own"]
)
async def test_a_nan_sort_key_fails_the_order_and_no_request(order: type[Key], key: Any) -> None:
    policy = order()
    policy.made = key
    system, admin = system_of(order=policy)
    serve(system)
    answer = await get(admin)
    assert answer.failed_order == f"mine:{order.__name__}"
    [failure] = answer.failures
    assert failure.kind == "order"
    assert "nan" in failure.last_error
    assert "which cannot be sorted" in failure.last_error
    assert system.scheduler.counters.policy_errors == failure.count == 1


@pytest.mark.parametrize("key", [0, math.inf, (1, -math.inf), ("a", 2), None, b"x"], ids=str)
async def test_other_sort_keys_are_fine(key: Any) -> None:
    policy = Key()
    policy.made = key
    system, admin = system_of(order=policy)
    serve(system)
    assert not (await get(admin)).failures


class NamesAnother(Watermark):
    def admit(self, step: Step, request: RequestView, need_blocks: int) -> Verdict:
        raise ValueError("order: says a policy that is another one")


def test_any_error_of_a_policy_counts_as_the_policys_error() -> None:
    """The policy that raised is blamed, not a policy that the text names."""
    system, _ = system_of(capacity=NamesAnother())
    system.submit("s", 1, [9], PARAMS)
    system.run()
    assert set(system.scheduler._step_scheduler.failures.by_kind) == {"capacity"}


class PlacesMore(BatchPolicy):
    def schedule(self, step: Step) -> None:
        step.run_decodes()
        for request in step.waiting():
            if step.consider(request, 1) is Verdict.ADMIT:
                step.place(request, 2)


class ByChunks(Watermark):
    reserves_prompt = False


def test_a_batch_policy_that_schedules_more_tokens_than_its_blocks_hold_fails() -> None:
    """A batch policy that schedules more tokens than it asked blocks for fails."""
    errors = list[Exception]()
    policies = dataclasses.replace(build(choose()), batch=PlacesMore(), capacity=ByChunks())
    system = LocalSystem(policies=policies, on_policy_error=errors.append)
    system.open("s")
    system.attach(ToyWorker(block_size=4, num_blocks=64, max_num_seqs=2, max_batched_tokens=64))
    system.submit("s", 1, [9] * 20, PARAMS)
    system.run()
    assert "2 tokens with blocks reserved for 1" in str(errors[0])


class Notes(PlacementPolicy):
    def __init__(self) -> None:
        self.told = list[int]()

    def place(self, request: RequestView, workers: Sequence[WorkerView], full: Sequence[WorkerView]) -> WorkerView:
        return workers[0]

    def bound(self, request: RequestView, worker_id: int) -> str:
        self.told.append(worker_id)
        return ""


def test_with_one_worker_a_placement_policy_is_not_called() -> None:
    placement = Notes()
    system, _ = system_of(placement=placement)
    system.submit("s", 1, [9], PARAMS)
    system.run()
    assert placement.told == []


class SkipsEachRequest(Watermark):
    asked = 0

    def admit(self, step: Step, request: RequestView, need_blocks: int) -> Verdict:
        self.asked += 1
        return Verdict.SKIP


def test_a_request_that_is_never_admitted_fails_only_after_several_decisions() -> None:
    capacity = SkipsEachRequest()
    system, _ = system_of(capacity=capacity)
    system.submit("s", 1, [9], PARAMS)
    system.run()
    for _ in range(2 * system.scheduler.config.stuck_decisions):
        system.poll()
    assert "no progress is possible" in system.clients["s"].endings[1].message
    assert capacity.asked >= system.scheduler.config.stuck_decisions > 1
    assert not system.scheduler.workers[1].asked_for_pins, "all blocks are available, so no pin is in the way"


def test_a_request_that_is_added_again_is_in_the_order_once() -> None:
    """`add` replaces the key of a request that the order already has."""
    order, request = Key(), cast(RequestView, SimpleNamespace(arrival_index=1, queue_position=1))
    order.made = 5
    order.add(request)
    order.made = 4
    order.add(request)
    assert list(order.ordered(0.0)) == [request]
    order.remove(request)
    assert list(order.ordered(0.0)) == []


class Overspends(BatchPolicy):
    def schedule(self, step: Step) -> None:
        step.run_decodes()
        for request in step.waiting():
            step.admit(request, step.uncached_tokens(request))


class RunsMoreThanRemains(BatchPolicy):
    def schedule(self, step: Step) -> None:
        step.run_decodes()
        for sequence in step.running:
            if not sequence.is_decoding:
                step.run(sequence, sequence.remaining_tokens + 1)
        for request in step.waiting():
            step.admit(request, 8)


def errors_beside_right_output(batch: BatchPolicy, prompt: list[int]) -> list[str]:
    """What the policy's failures say. The request gets the right tokens all the same."""
    errors: list[Exception] = []
    policies = dataclasses.replace(build(choose()), batch=batch)
    system = LocalSystem(policies=policies, on_policy_error=errors.append)
    client = system.open("s")
    system.attach(ToyWorker(block_size=4, num_blocks=64, max_num_seqs=2, max_batched_tokens=64))
    system.submit("s", 1, prompt, PARAMS)
    system.run()
    assert client.tokens[1] == expected_output(prompt, PARAMS)
    return [str(error) for error in errors]


def test_a_batch_policy_that_spends_more_than_the_budget_fails_and_no_request() -> None:
    errors = errors_beside_right_output(Overspends(), list(range(7, 107)))
    assert any("100 tokens, with 64 left in the budget" in error for error in errors)


def test_a_batch_policy_that_runs_more_tokens_than_remain_fails_and_no_request() -> None:
    errors = errors_beside_right_output(RunsMoreThanRemains(), list(range(7, 31)))
    assert "17 tokens of 16 that remain" in errors[0]
