"""A plan that changes nothing but block tables runs the last step again, one token further, as if all its arrays were
made anew."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from gpu_worker.build import BuiltWorker
from gpu_worker.errors import ProtocolViolation
from gpu_worker.steps.repeated import RepeatedStep
from gpu_worker.steps.runner import ModelRunner
from paceline.v1.common_pb2 import SamplingParams
from paceline.v1.worker_pb2 import StepPlan, StepResult
from tests.unit.worker.driver import GREEDY, Driver, pack
from tests.unit.worker.families import VOCAB, Reference

References = Callable[[str], Reference]
Build = Callable[..., BuiltWorker]

_rng = np.random.default_rng(12)
PROMPTS = [_rng.integers(0, VOCAB, size=n).tolist() for n in (1, 7, 16, 33, 70)]
SEEDED = SamplingParams(temperature=1.1, top_p=0.9, seed=5, max_tokens=1)
SCORED = SamplingParams(top_p=1.0, max_tokens=1, logprobs=True, num_top_logprobs=2)
BANNED = SamplingParams(temperature=1.0, top_p=1.0, seed=7, min_tokens=12, stop_token_ids=range(100, 130), max_tokens=1)
PENALISED = SamplingParams(top_p=1.0, frequency_penalty=1.5, max_tokens=1)


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that repeat the last one."""
    steps: list[int] = []
    repeat = ModelRunner._repeat

    def noted(runner: ModelRunner, plan: StepPlan, repeated: RepeatedStep) -> Any:
        steps.append(plan.step)
        return repeat(runner, plan, repeated)

    monkeypatch.setattr(ModelRunner, "_repeat", noted)
    return steps


def _run(runner: ModelRunner, seed: int) -> list[tuple[Any, ...]]:
    """Sequences arrive, pause as draft rows, and end. Returns what each result says."""
    dice, results = random.Random(seed), []
    driver = Driver(runner, chunk_tokens=dice.choice([5, 64]))
    samplings = [GREEDY, GREEDY, SEEDED, SCORED, dice.choice([BANNED, PENALISED, SEEDED])]
    waiting = list(zip(PROMPTS, samplings, strict=True))
    while waiting or driver.running:
        if waiting and dice.random() < 0.15:
            driver.add(waiting[-1][0], 10 + dice.randrange(60), waiting.pop()[1])
        for sequence in driver.running.values():
            may_draft = not sequence.fresh and sequence.sampling in (GREEDY, SEEDED)
            if may_draft and dice.random() < 0.02:
                driver.draft(sequence, [dice.randrange(VOCAB)])
            elif sequence.held and dice.random() < 0.7:
                driver.resume(sequence)
        results.append(_content(driver.run_step()))
        for sequence in [s for s in driver.running.values() if s.ended]:
            driver.free(sequence)
    kept = sorted(s.SerializeToString(deterministic=True) for s in runner.kept(2**20))
    runner.reset()
    return [*results, tuple(kept)]


def _content(result: StepResult) -> tuple[Any, ...]:
    result.started_us = result.finished_us = 0
    return (result.SerializeToString(deterministic=True),)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("family", ["llama-tied", "mistral"])
def test_results_are_those_of_new_arrays(
    family: str, deterministic: bool, dtype: str, reference: References, build: Build, repeats: list[int]
) -> None:
    settings = {"block_size": 16, "dtype": dtype, "deterministic": deterministic}
    runner = build(reference(family).folder, **settings).runner
    for seed in range(6):
        with pytest.MonkeyPatch.context() as patch:
            repeats.clear()
            found = _run(runner, seed)
            assert len(repeats) > 5
            patch.setattr(runner, "_advancing", None)
            repeats.clear()
            assert _run(runner, seed) == found
            assert not repeats


def _decoding(runner: ModelRunner, sampling: SamplingParams = GREEDY) -> Driver:
    """A driver of a sequence with four tokens, of which the last was sampled by a decode."""
    driver = Driver(runner)
    driver.add([3, 1], 200, sampling)
    driver.run_step()
    driver.run_step()
    return driver


@pytest.mark.parametrize("block_size", [1, 8])
def test_a_step_repeats_with_new_blocks(
    block_size: int, reference: References, build: Build, repeats: list[int]
) -> None:
    runner = build(reference("llama-tied").folder, block_size=block_size).runner
    driver = _decoding(runner)
    for _ in range(20):
        driver.run_step()
    assert repeats == list(range(3, 23))
    # Step n computes token n + 1.
    assert runner._slots.table_blocks == -(-23 // block_size)


def test_a_block_before_it_is_needed_is_used_later(reference: References, build: Build, repeats: list[int]) -> None:
    runner = build(reference("llama-tied").folder, block_size=8).runner
    driver = _decoding(runner)
    expected = reference("llama-tied").greedy([3, 1], 12)
    block = driver.free_blocks.pop()
    results = [runner.launch(StepPlan(step=3, grow_slots=pack([0]), grow_blocks=pack([block]))).result()]
    results += [runner.launch(StepPlan(step=step)).result() for step in range(4, 13)]
    assert repeats == list(range(3, 13))
    tokens = [int(np.frombuffer(result.token_ids, "<i4")[0]) for result in results]
    assert driver.running[0].output + tokens == expected


@pytest.mark.parametrize(("sampling", "num_repeats"), [(SEEDED, 5), (SCORED, 5), (BANNED, 0), (PENALISED, 0)], ids=str)
def test_a_step_repeats_only_if_nothing_else_changes_its_logits(
    sampling: SamplingParams, num_repeats: int, reference: References, build: Build, repeats: list[int]
) -> None:
    driver = _decoding(build(reference("llama-tied").folder, block_size=16).runner, sampling)
    for _ in range(5):
        driver.run_step()
    assert len(repeats) == num_repeats


def test_a_plan_that_says_more_ends_the_repetition(reference: References, build: Build, repeats: list[int]) -> None:
    runner = build(reference("llama-tied").folder, block_size=16).runner
    driver = _decoding(runner)
    driver.run_step()
    assert repeats == [3]
    runner.launch(StepPlan(step=4, skip_decodes=True))
    assert not len(np.frombuffer(runner.launch(StepPlan(step=5, hold_slots=pack([0]))).result().token_ids, "<i4"))
    assert not len(np.frombuffer(runner.launch(StepPlan(step=6)).result().token_ids, "<i4"))
    assert len(np.frombuffer(runner.launch(StepPlan(step=7, resume_slots=pack([0]))).result().token_ids, "<i4")) == 1
    assert repeats == [3]
    runner.launch(StepPlan(step=8))
    assert repeats == [3, 8]
    runner.launch(StepPlan(step=9, free_slots=pack([0])))
    runner.launch(StepPlan(step=10))
    assert repeats == [3, 8]
    runner.reset()
    runner.launch(StepPlan(step=1))
    assert repeats == [3, 8]


def test_a_prompt_of_one_token_is_not_repeated(reference: References, build: Build, repeats: list[int]) -> None:
    """Each row of its step samples, as of a step of decodes, but its token is in the plan."""
    runner = build(reference("llama-tied").folder, block_size=16).runner
    driver = _decoding(runner)
    other = driver.add([5], 20)
    driver.run_step()
    driver.run_step()
    assert not repeats
    driver.run_step()
    assert repeats == [5]
    assert len(other.output) == 3


@pytest.mark.parametrize("step", [4, 7])
def test_a_plan_out_of_turn_is_refused(step: int, reference: References, build: Build, repeats: list[int]) -> None:
    """No step has failed, so the requests of all slots are reported, also of those without a row."""
    runner = build(reference("llama-tied").folder, block_size=16).runner
    driver = _decoding(runner)
    other = driver.add([5, 6], 20)
    driver.run_step()
    runner.launch(StepPlan(step=4, hold_slots=pack([other.slot])))
    runner.launch(StepPlan(step=5))
    assert repeats == [5]
    with pytest.raises(ProtocolViolation, match=f"step {step} follows step 5"):
        runner.launch(StepPlan(step=step))
    assert runner.request_ids() == ["r0", "r1"]
    assert runner.kept(2**20) == []


def test_a_repeated_step_tells_when_its_kernels_start(
    reference: References, build: Build, repeats: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the kernels, and after the plan is applied if it takes all cores."""
    runner = build(reference("llama-tied").folder, block_size=16).runner
    driver = _decoding(runner)
    calls: list[int] = []
    runner.call_before_kernels(lambda: calls.append(runner._slots._last_step))
    for leaves_core in (True, False):
        monkeypatch.setattr(runner, "leaves_core", lambda _num_rows, answer=leaves_core: answer)
        driver.run_step()
    assert repeats == [3, 4]
    assert calls == [3, 4, 4]


def test_a_sequence_without_a_place_is_refused(reference: References, build: Build, repeats: list[int]) -> None:
    """At the end of its blocks, and at its longest."""
    for settings in ({"block_size": 8}, {"block_size": 16, "max_model_len": 8}):
        repeats.clear()
        runner = build(reference("llama-tied").folder, **settings).runner
        driver = _decoding(runner)
        for step in range(3, 8):
            runner.launch(StepPlan(step=step))
        assert repeats == [3, 4, 5, 6, 7]
        with pytest.raises(ProtocolViolation, match=r"too few|longer than"):
            runner.launch(StepPlan(step=8))
        assert repeats[-1] == 8
        assert driver.running


def test_the_tokens_of_repeated_steps_are_kept(reference: References, build: Build, repeats: list[int]) -> None:
    runner = build(reference("llama-tied").folder, block_size=16).runner
    driver = _decoding(runner)
    for _ in range(4):
        driver.run_step()
    assert len(repeats) == 4
    [kept] = runner.kept(2**20)
    assert np.frombuffer(kept.token_ids, "<i4").tolist() == driver.running[0].tokens
    assert kept.num_computed_tokens == driver.running[0].num_computed


def test_a_row_that_fails_fails_again(
    reference: References, build: Build, repeats: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = build(reference("llama-tied").folder, block_size=16).runner
    driver = _decoding(runner)
    decode = ModelRunner._decode

    def spoiled(self: ModelRunner, *arguments: Any) -> Any:
        drawn = decode(self, *arguments)
        return replace(drawn, failed=torch.ones_like(drawn.failed))

    monkeypatch.setattr(ModelRunner, "_decode", spoiled)
    for step in (3, 4):
        result = runner.launch(StepPlan(step=step)).result()
        assert [error.slot for error in result.errors] == [0]
    assert repeats == [3, 4]
    assert driver.running
    assert runner.kept(2**20) == []
