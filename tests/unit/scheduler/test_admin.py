"""AdminService on a core without a server: the policies in force, also after an order policy has failed."""

from __future__ import annotations

import dataclasses
import random
import sys
from typing import Any

import grpc
import pytest

from paceline.v1.admin_pb2 import ExplainRequest, GetPolicyRequest, PolicyChoice, SetPolicyRequest
from paceline.v1.common_pb2 import SamplingParams
from scheduler_svc import admin
from scheduler_svc.admin import Admin
from scheduler_svc.core.policy.interfaces import Policies
from scheduler_svc.policies.order.fcfs import FirstComeFirstServed
from scheduler_svc.policies.registry import KINDS, build, choose
from simulator.system import LocalSystem
from simulator.toy_worker import ToyWorker, expected_output
from tests.support.hostile import hostile, raises

PARAMS = SamplingParams(top_p=1.0, max_tokens=8, seed=1, ignore_eos=True)


class Aborted(Exception):
    pass


class Context:
    async def abort(self, code: grpc.StatusCode, message: str) -> None:
        raise Aborted(code, message)


def system_with(policies: Policies) -> tuple[LocalSystem, list[Exception]]:
    errors: list[Exception] = []
    system = LocalSystem(policies=policies, on_policy_error=errors.append)
    system.open("s")
    system.attach(ToyWorker(block_size=4, num_blocks=64, max_num_seqs=2, max_batched_tokens=64))
    return system, errors


async def in_force(admin: Admin) -> PolicyChoice:
    return (await admin.GetPolicy(GetPolicyRequest(), Context())).choice  # type: ignore[arg-type]


async def set_policy(admin: Admin, **choice: Any) -> PolicyChoice:
    return (await admin.SetPolicy(SetPolicyRequest(choice=PolicyChoice(**choice)), Context())).choice  # type: ignore[arg-type]


@pytest.mark.parametrize("hook", ["add", "remove", "rematched", "started", "stopped", "hopeless"])
async def test_an_order_that_fails_is_replaced_until_another_is_set(hook: str) -> None:
    bad = hostile("order", hook, raises, random.Random(0), 1.0)
    system, errors = system_with(dataclasses.replace(build(choose("vllm-v1")), order=bad))
    admin = Admin(system.scheduler, choose("vllm-v1", {"order": "lpm"}))
    assert (await in_force(admin)).order == "lpm"
    for handle in range(1, 7):
        system.submit("s", handle, list(range(10, 10 + handle)), PARAMS)
    system.scheduler.tick(0.0)
    system.scheduler.tick(0.0)
    system.run()
    assert len(errors) == system.scheduler.counters.policy_errors == 1
    for handle in range(1, 7):
        assert system.clients["s"].tokens[handle] == expected_output(list(range(10, 10 + handle)), PARAMS)
    assert (await in_force(admin)).order == "fair"
    assert (await set_policy(admin, order="lpm")).order == "lpm"
    assert (await in_force(admin)).order == "lpm"
    system.assert_at_rest()


async def test_an_invalid_choice_is_refused_and_changes_nothing() -> None:
    system, _ = system_with(build(choose()))
    admin = Admin(system.scheduler, choose())
    before = system.scheduler.policies
    for choice, word in (
        ({"preset": "best"}, "preset: 'best' is none of paceline"),
        ({"options": {"watermark": "{"}}, "options.watermark: '{' is not JSON"),
        ({"options": {"watermark": "[" * 100_000}}, r"options.watermark: '\[{80}' is not JSON"),
        ({"options": {"watermark": "true"}}, "options.watermark: Input should be a valid number"),
        ({"options": {"watermark": "NaN"}}, "options.watermark: Input should be a finite number"),
        ({"preset": "sglang", "options": {"watermark": "0.5"}}, "options.watermark: none of the policies has it"),
        ({"order": "json:loads"}, "order: 'json:loads' names a module. Only the scheduler's own configuration"),
        ({"capacity": "this:x"}, r"--capacity.*watermark.*entry point of paceline\.policies"),
        ({"placement": "no.such.module:x", "preset": "vllm-v1"}, "placement: 'no.such.module:x' names a module"),
    ):
        with pytest.raises(Aborted, match=word) as aborted:
            await set_policy(admin, **choice)
        assert aborted.value.args[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert system.scheduler.policies is before
    assert (await in_force(admin)).preset == "paceline"
    with pytest.raises(Aborted, match="nothing is known"):
        await admin.Explain(ExplainRequest(request_id="x"), Context())  # type: ignore[arg-type]


async def test_after_an_order_has_failed_a_change_starts_from_the_current_policies() -> None:
    bad = hostile("order", "add", raises, random.Random(0), 1.0)
    system, _ = system_with(dataclasses.replace(build(choose()), order=bad))
    admin = Admin(system.scheduler, choose("", {"order": "lpm"}))
    system.submit("s", 1, [9], PARAMS)
    answer = await admin.GetPolicy(GetPolicyRequest(), Context())  # type: ignore[arg-type]
    assert (answer.choice.order, answer.failed_order) == ("fair", "lpm")
    assert (await set_policy(admin, options={"watermark": "0.02"})).order == "fair"
    answer = await admin.GetPolicy(GetPolicyRequest(), Context())  # type: ignore[arg-type]
    assert (answer.choice.order, answer.failed_order) == ("fair", "")


async def test_the_options_of_an_order_that_failed_go_with_it() -> None:
    bad = hostile("order", "add", raises, random.Random(0), 1.0)
    system, _ = system_with(dataclasses.replace(build(choose()), order=bad))
    admin = Admin(system.scheduler, choose("", {"order": f"{__name__}:Wordy"}, {"num_words": 3, "watermark": 0.03}))
    system.submit("s", 1, [9], PARAMS)
    answer = await admin.GetPolicy(GetPolicyRequest(), Context())  # type: ignore[arg-type]
    kept = {"resume_watermark": "0.05", "watermark": "0.03"}
    assert dict(answer.choice.options) == kept
    assert dict((await set_policy(admin, batch="prefill-first")).options) == kept


async def test_a_call_imports_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Module paths are for the scheduler's own configuration. A call may name only modules that are configured."""
    monkeypatch.delitem(sys.modules, "this", raising=False)
    system, _ = system_with(build(choose()))
    admin = Admin(system.scheduler, choose("", {"order": f"{__name__}:Silent"}))
    for kind in KINDS:
        with pytest.raises(Aborted, match=f"{kind}: 'this:x' names a module"):
            await set_policy(admin, **{kind: "this:x"})
    assert "this" not in sys.modules
    assert (await set_policy(admin, order="lpm")).order == "lpm"
    assert (await set_policy(admin, order=f"{__name__}:Silent")).order == f"{__name__}:Silent"
    with pytest.raises(Aborted, match="names a module"):
        await set_policy(admin, order=f"{__name__}:Wordy")


class Silent(FirstComeFirstServed):
    """A policy that only the command line names."""


class Wordy(FirstComeFirstServed):
    def __init__(self, num_words: int = 1_000_000) -> None:
        super().__init__()
        raise ValueError("\ud800" + "words " * num_words)


async def test_a_policys_words_fit_a_status() -> None:
    system, _ = system_with(build(choose()))
    admin = Admin(system.scheduler, choose("", {"order": f"{__name__}:Wordy"}))
    with pytest.raises(Aborted) as aborted:
        await set_policy(admin, order=f"{__name__}:Wordy")
    message = aborted.value.args[1]
    assert message.startswith("order Wordy: \\ud800words")
    assert len(message) < 3000
    system.submit("s", 1, [9], PARAMS)
    system.scheduler.timeline.event(
        next(iter(system.scheduler.sessions["s"].live.values())), "preempted", "\ud800", 0.0
    )
    answer = await admin.Explain(ExplainRequest(request_id="s-1"), Context())  # type: ignore[arg-type]
    assert "\\ud800" in [row.detail for row in answer.explanations]


async def test_explain_takes_the_id_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer also names the sequence of each row, and the number of sequences."""
    system, _ = system_with(build(choose()))
    service = Admin(system.scheduler, choose())
    for handle in range(1, 4):
        system.submit("s", handle, [9, 9], PARAMS, answer_id="cmpl-a")
    system.submit("s", 4, [9], PARAMS, answer_id="cmpl-b")
    system.run()

    async def rows(request_id: str) -> tuple[list[str], int]:
        answer = await service.Explain(ExplainRequest(request_id=request_id), Context())  # type: ignore[arg-type]
        return list(dict.fromkeys(row.request_id for row in answer.explanations)), answer.num_sequences

    assert await rows("cmpl-a") == (["s-1", "s-2", "s-3"], 3)
    assert await rows("cmpl-b") == (["s-4"], 1)
    assert await rows("s-2") == (["s-2"], 1)
    monkeypatch.setattr(admin, "MAX_SEQUENCES", 2)
    assert await rows("cmpl-a") == (["s-1", "s-2"], 3)
