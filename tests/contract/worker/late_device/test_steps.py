"""A worker's steps on a GPU that is late (tests/support/late_device) give the results of a CPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from bench.device.load import GREEDY, LoadRequest
from demo import CHECKPOINT
from gpu_worker.attention.flashinfer import FlashInferAttention
from gpu_worker.errors import ProtocolViolation
from paceline.v1.common_pb2 import SamplingParams
from paceline.v1.worker_pb2 import StepPlan
from tests.contract.worker.late_device.rig import (
    BANNED,
    PROCESSED,
    SAMPLED,
    SAMPLINGS,
    SCORED,
    check_equal,
    cpu_runner,
    gpu_runner,
    make_plans,
    make_requests,
    play,
    prepare,
)
from tests.support import embedding_checkpoints
from tests.support.grammars import GRAMMARS
from tests.support.late_device.device import DeviceFault, LateDevice
from tests.support.late_device.worker import late_gpu
from tests.support.launched_system import check_moved, make_prompts, run_system
from tests.unit.worker.families import VOCAB, Reference
from tests.unit.worker.inputs import Inputs

Checkpoints = Callable[[str], Reference]
REQUESTS = make_requests(12)
# Seed, eagerness of the device, steps in flight.
PACES = [(5, 0.2, 1), (1, 0.0, 2), (2, 0.0, 4), (3, 0.5, 3), (4, 0.97, 2)]


@pytest.mark.parametrize(("seed", "eagerness", "window"), PACES)
@pytest.mark.parametrize("family", ["llama3-rope", "mistral"])
def test_greedy_tokens_are_as_on_a_cpu(
    family: str, seed: int, eagerness: float, window: int, reference: Checkpoints
) -> None:
    folder = reference(family).folder
    runner = cpu_runner(folder)
    plans = make_plans(runner, REQUESTS)
    expected = play(runner, plans)
    with late_gpu(seed, eagerness) as device:
        runner = gpu_runner(folder)
        assert isinstance(runner._attention, FlashInferAttention)
        check_equal(play(runner, plans, window), expected)
    assert device.num_replays > 10


def test_a_model_on_torch_is_as_on_a_cpu(reference: Checkpoints) -> None:
    """Models that FlashInfer cannot serve and `deterministic` workers use this backend."""
    folder = reference("mistral").folder
    runner = cpu_runner(folder)
    plans = make_plans(runner, REQUESTS, [GREEDY, SAMPLED])
    expected = play(runner, plans)
    with late_gpu(seed=1):
        check_equal(play(gpu_runner(folder, attention_backend="torch"), plans, window=3), expected)


@pytest.mark.parametrize(("seed", "eagerness", "window"), PACES[2:4])
def test_every_kind_of_sampling_is_as_on_a_cpu(
    seed: int, eagerness: float, window: int, reference: Checkpoints
) -> None:
    folder = reference("qwen3").folder
    runner = cpu_runner(folder)
    plans = make_plans(runner, REQUESTS, SAMPLINGS)
    expected = play(runner, plans)
    with late_gpu(seed, eagerness):
        check_equal(play(gpu_runner(folder), plans, window), expected)


def test_a_batch_in_which_only_a_ban_prevents_sampling_in_the_graph_is_as_on_a_cpu(reference: Checkpoints) -> None:
    folder = reference("qwen3").folder
    runner = cpu_runner(folder)
    plans = make_plans(runner, [LoadRequest(5, 0, 12)] * 4, [SAMPLED, BANNED])
    expected = play(runner, plans)
    with late_gpu(seed=3):
        check_equal(play(gpu_runner(folder), plans, window=2), expected)


# Operations of a decode step that the host queues one by one: the copies of its inputs and of FlashInfer's plan, three
# events, the results (2). Sampling is in the graph; log probabilities and penalties are not.
QUEUED = {"greedy": (GREEDY, 7), "sampled": (SAMPLED, 7), "scored": (SCORED, 16)}


# Operations in the graph of a model with two layers, with those of sampling, and the replay itself.
REPLAYED = 47


@pytest.mark.parametrize("name", QUEUED)
def test_a_decode_step_queues_few_operations_beside_its_graph(name: str, reference: Checkpoints) -> None:
    sampling, budget = QUEUED[name]
    with late_gpu() as device:
        runner = gpu_runner(reference("llama3-rope").folder)
        plans = make_plans(runner, [LoadRequest(5, 0, 12)] * 4, [sampling])
        queued, replayed = [], []
        for plan in plans:
            before, in_graphs = device.num_queued - device.num_replayed, device.num_replayed
            step = runner.launch(plan)
            step.result()
            if step.stats.decode_tokens and not step.stats.prefill_tokens:
                queued.append(device.num_queued - device.num_replayed - before)
                replayed.append(device.num_replayed - in_graphs)
        assert device.num_replays == len(queued) > 10
    assert max(queued) == budget
    assert max(replayed) == REPLAYED


@pytest.mark.parametrize(("seed", "eagerness", "window"), PACES[1:2] + PACES[3:4])
def test_grammars_are_followed(seed: int, eagerness: float, window: int) -> None:
    grammars = [GRAMMARS["regex"], GRAMMARS["choice"]]
    samplings = [GREEDY, *(SamplingParams(top_p=1, grammar=grammar, ignore_eos=True) for grammar in grammars)]
    runner = cpu_runner(CHECKPOINT)
    plans = make_plans(runner, make_requests(6), samplings)
    prepare(runner, grammars)
    expected = play(runner, plans)
    with late_gpu(seed, eagerness):
        runner = gpu_runner(CHECKPOINT)
        prepare(runner, grammars)
        check_equal(play(runner, plans, window), expected)


def test_swaps_copies_and_forks_are_as_on_a_cpu(reference: Checkpoints) -> None:
    folder, prompts = reference("llama3-rope").folder, make_prompts(VOCAB)[:2] + make_prompts(VOCAB)[4:7]
    options = {"dtype": "float32", "num_blocks": 20}
    _, expected = run_system(folder, "cpu", "paceline", 1, prompts, 20, attention_backend="torch", **options)
    with late_gpu(seed=5, eagerness=0.2):
        system, tokens = run_system(folder, "cuda", "paceline", 3, prompts, 20, graph_max_seqs=6, **options)
    assert tokens == expected
    check_moved(system)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_are_as_on_a_cpu(pooling: embedding_checkpoints.Pooling, tmp_path: Path) -> None:
    folder = embedding_checkpoints.make("qwen3", tmp_path, pooling)
    inputs = [list(range(1, n)) for n in (3, 20, 41)]
    expected = Inputs(cpu_runner(folder), 7).run(inputs)
    with late_gpu(1):
        for slot, vector in Inputs(gpu_runner(folder), 7).run(inputs).items():
            assert np.abs(vector - expected[slot]).max() < 1e-4


@pytest.mark.parametrize("window", [2, 3, 4])
def test_a_step_is_launched_while_the_last_one_has_not_run(window: int, reference: Checkpoints) -> None:
    """A launch waits at most for the copies of the last plan, never for its forward pass."""
    with late_gpu(seed=1) as device:
        runner = gpu_runner(reference("llama3-rope").folder)
        plans = make_plans(runner, REQUESTS, SAMPLINGS)
        launched = deque([runner.launch(plans[0])])
        for plan in plans[1:]:
            launched.append(runner.launch(plan))
            assert not launched[-2].done.is_passed()
            if len(launched) == window:
                launched.popleft().result()
    assert device.num_replays > 10


def test_a_grammar_waits_for_the_last_step_after_its_forward_pass_is_queued() -> None:
    asked = SamplingParams(top_p=1, grammar=GRAMMARS["regex"], ignore_eos=True)
    with late_gpu(seed=1) as device:
        runner = gpu_runner(CHECKPOINT)
        prepare(runner, [asked.grammar])
        plans = make_plans(runner, make_requests(2, longest=5), [asked])
        last = runner.launch(plans[0])
        for plan in plans[1:-1]:
            before, at_wait = device.num_queued, list[int]()
            device.on_wait = partial(_note_queued, device, at_wait)
            launched = runner.launch(plan)
            assert last.done.is_passed()
            assert at_wait[-1] - before > 50, "operations of the forward pass"
            last.result()
            last = launched


def _note_queued(device: LateDevice, seen: list[int]) -> None:
    seen.append(device.num_queued)


def test_a_runner_serves_on_after_a_failed_step(reference: Checkpoints) -> None:
    """The step fails while others are in flight. A new link then gets the same plans."""
    folder = reference("llama3-rope").folder
    runner = cpu_runner(folder)
    plans = make_plans(runner, REQUESTS, [GREEDY, PROCESSED])
    expected = play(runner, plans)
    with late_gpu(seed=2):
        runner = gpu_runner(folder)
        launched = [runner.launch(plan) for plan in plans[:5]]
        with pytest.raises(ProtocolViolation):
            runner.launch(StepPlan(step=99))
        assert not launched[-1].done.is_passed()
        assert runner.kept(1 << 20) == []
        runner.check()
        assert launched[-1].done.is_passed()
        check_equal(play(runner, plans, window=2), expected)


def test_the_check_after_a_failed_step_finds_a_lost_device(reference: Checkpoints) -> None:
    with late_gpu(seed=2) as device:
        runner = gpu_runner(reference("llama3-rope").folder)
        launched = runner.launch(make_plans(runner, REQUESTS)[0])
        device.put(lambda: 1 / 0)
        launched.result()
        with pytest.raises(DeviceFault, match="device-side assert"):
            runner.check()


def test_a_link_that_ended_keeps_the_tokens_of_launched_steps(reference: Checkpoints) -> None:
    folder = reference("llama3-rope").folder
    runner = cpu_runner(folder)
    plans = make_plans(runner, REQUESTS)[:9]
    play(runner, plans)
    expected = runner.kept(1 << 20)
    with late_gpu(seed=1):
        runner = gpu_runner(folder)
        for plan in plans:
            runner.launch(plan)
        assert runner.kept(1 << 20) == expected
