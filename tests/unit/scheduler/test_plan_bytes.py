"""A plan carries every token of its new sequences, cached or not. It must fit into one message of the link."""

from __future__ import annotations

from collections import Counter

import pytest

from paceline.v1.common_pb2 import SamplingParams
from scheduler_svc.core.policy import step
from scheduler_svc.core.workers.steps import MAX_PLAN_BYTES
from scheduler_svc.policies.presets import PRESETS
from scheduler_svc.policies.registry import build, choose
from services.runtime.rpc import MAX_MESSAGE_BYTES
from simulator.system import LocalSystem
from simulator.toy_worker import ToyWorker, expected_output

SAMPLING = SamplingParams(top_p=1.0, max_tokens=3, ignore_eos=True)
SHARED = list(range(1000, 1400))
NUM_BYTES = 4 * len(SHARED)


@pytest.mark.parametrize("preset", PRESETS)
def test_sequences_that_do_not_fit_into_one_message_go_in_several(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 5 * NUM_BYTES
    monkeypatch.setattr(step, "MAX_PLAN_BYTES", limit)
    system = LocalSystem(policies=build(choose(preset)))
    system.open("s", window=1 << 20)
    end = system.attach(ToyWorker(block_size=16, num_blocks=1000, max_num_seqs=32, max_batched_tokens=512))
    prompts = {handle: [*SHARED, handle] for handle in range(1, 31)}
    system.submit("s", 1, prompts[1], SAMPLING)
    system.run()
    for handle in list(prompts)[1:]:
        system.submit("s", handle, prompts[handle], SAMPLING)
    placed = Counter[int]()
    while moves := system.moves():
        if end.plans:
            plan = end.plans[0]
            placed[len(plan.new_sequences)] += 1
            assert sum(len(new.token_ids) for new in plan.new_sequences) <= limit
        system.move(*moves[0])
    assert max(placed) == 4, "as many as fit with their parameters"
    outputs = {handle: expected_output(prompt, SAMPLING) for handle, prompt in prompts.items()}
    assert system.clients["s"].tokens == outputs
    system.assert_at_rest()


def test_a_sequence_that_is_too_large_for_a_shared_plan_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "MAX_PLAN_BYTES", NUM_BYTES // 2)
    system = LocalSystem()
    system.open("s", window=1 << 20)
    system.attach(ToyWorker(block_size=16, num_blocks=1000, max_num_seqs=32, max_batched_tokens=2048))
    for handle in range(1, 4):
        system.submit("s", handle, [*SHARED, handle], SAMPLING)
    system.run()
    assert len(system.clients["s"].endings) == 3
    system.assert_at_rest()


def test_an_offline_request_that_does_not_fit_beside_the_online_ones_goes_in_a_later_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = 3 * NUM_BYTES // 2
    monkeypatch.setattr(step, "MAX_PLAN_BYTES", limit)
    system = LocalSystem()
    system.open("s", window=1 << 20)
    end = system.attach(ToyWorker(block_size=16, num_blocks=1000, max_num_seqs=32, max_batched_tokens=2048))
    for handle in (1, 2):
        system.submit("s", handle, [*SHARED, handle], SAMPLING, offline=handle == 2)
    placed = list[int]()
    while moves := system.moves():
        if end.plans and end.plans[0].new_sequences:
            placed.append(len(end.plans[0].new_sequences))
        system.move(*moves[0])
    assert set(placed) == {1}
    assert len(system.clients["s"].endings) == 2
    system.assert_at_rest()


def test_the_limit_leaves_room_for_block_tables() -> None:
    assert 2 * MAX_PLAN_BYTES < MAX_MESSAGE_BYTES
