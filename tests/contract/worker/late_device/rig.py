"""Plays the same plans on a CPU and on a simulated GPU."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.device.load import GREEDY, Load, LoadRequest
from gpu_worker.build import build_worker
from gpu_worker.sampling.compiled import PreparedGrammars
from gpu_worker.settings import WorkerSettings
from gpu_worker.steps.launched import LaunchedStep
from gpu_worker.steps.runner import ModelRunner
from paceline.v1.common_pb2 import SamplingParams
from paceline.v1.worker_pb2 import StepPlan, StepResult
from tests.unit.worker.driver import pack
from tests.unit.worker.families import VOCAB

SETTINGS: dict[str, Any] = {
    "threads": 1,
    "dtype": "float32",
    "num_blocks": 200,
    "max_num_seqs": 8,
    "max_batched_tokens": 48,
}
# Graphs of 1, 2, 4 and 6 rows: steps of decodes alone are padded, fit exactly, or are too large for a graph.
GRAPH_MAX_SEQS = 6

SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, ignore_eos=True, seed=3)
PROCESSED = SamplingParams(
    top_p=1, repetition_penalty=1.2, frequency_penalty=0.2, logit_bias={5: 1.0, 9: -2.0},
    bad_words=[pack([4]), pack([5, 6])], ignore_eos=True,
)  # fmt: skip
SCORED = SamplingParams(
    top_p=1, logprobs=True, num_top_logprobs=2, prompt_logprobs=True, num_top_prompt_logprobs=1, ignore_eos=True
)
BANNED = SamplingParams(  # two thirds of the tokens, until there are eight
    top_p=1, min_tokens=8, stop_token_ids=[i for i in range(VOCAB) if i % 3], temperature=1.0, ignore_eos=True, seed=5
)
TYPICAL = SamplingParams(top_p=1, typical_p=0.5, temperature=1.0, ignore_eos=True, seed=7)
ALLOWED = SamplingParams(top_p=1, allowed_token_ids=pack(range(40, 90)), temperature=1.0, ignore_eos=True, seed=9)
SAMPLINGS = [GREEDY, SAMPLED, PROCESSED, SCORED, BANNED, TYPICAL, ALLOWED]


def make_requests(count: int, longest: int = 40, outputs: int = 24, seed: int = 4) -> list[LoadRequest]:
    rng = random.Random(seed)
    return [LoadRequest(rng.randint(1, longest), 0, rng.randint(1, outputs)) for _ in range(count)]


def cpu_runner(folder: Path, **settings: Any) -> ModelRunner:
    options = SETTINGS | {"attention_backend": "torch"} | settings
    made = WorkerSettings(model=str(folder), device="cpu", **options)
    return build_worker(made).runner


def gpu_runner(folder: Path, **settings: Any) -> ModelRunner:
    """Call it inside of late_gpu()."""
    options = {"graph_max_seqs": GRAPH_MAX_SEQS, "attention_backend": "flashinfer"} | settings
    return build_worker(WorkerSettings(model=str(folder), device="cuda", **SETTINGS | options)).runner


def make_plans(
    runner: ModelRunner, requests: Sequence[LoadRequest], samplings: Sequence[SamplingParams] = (GREEDY,)
) -> list[StepPlan]:
    """The requests take the samplings in turn."""
    plans = [step.plan for step in Load(runner.limits, list(requests)).steps(7)]
    for plan in plans:
        for sequence in plan.new_sequences:
            sequence.sampling.CopyFrom(samplings[int(sequence.request_id) % len(samplings)])
    return plans


def play(runner: ModelRunner, plans: Sequence[StepPlan], window: int = 1) -> list[StepResult]:
    """`window`: how many steps are in flight."""
    results: list[StepResult] = []
    launched: deque[LaunchedStep] = deque()
    for plan in plans:
        launched.append(runner.launch(plan))
        if len(launched) == window:
            results.append(launched.popleft().result())
    return [*results, *(step.result() for step in launched)]


def prepare(runner: ModelRunner, grammars: Sequence[str]) -> None:
    """Begin a link with requests that may use these grammars."""
    prepared = PreparedGrammars()
    for number, grammar in enumerate(grammars, 1):
        assert not prepared.prepare(runner.tokenizer, number, grammar)
    runner.reset(prepared)


def check_equal(results: Sequence[StepResult], expected: Sequence[StepResult]) -> None:
    """Tokens and errors are equal, and log probabilities up to rounding."""
    for number, (mine, other) in enumerate(zip(results, expected, strict=True), 1):
        assert mine.token_ids == other.token_ids, f"step {number}"
        assert list(mine.errors) == list(other.errors), f"step {number}"
        assert len(mine.logprobs) == len(other.logprobs)
        for a, b in zip(mine.logprobs, other.logprobs, strict=True):
            assert (a.slot, a.top_token_ids) == (b.slot, b.top_token_ids)
            _check_near(a.top_logprobs, b.top_logprobs)
            assert abs(a.logprob - b.logprob) < 1e-3
        assert len(mine.prompt_logprobs) == len(other.prompt_logprobs)
        for c, d in zip(mine.prompt_logprobs, other.prompt_logprobs, strict=True):
            assert (c.slot, c.logprobs.start, c.logprobs.ranks) == (d.slot, d.logprobs.start, d.logprobs.ranks)
            assert c.logprobs.top_token_ids == d.logprobs.top_token_ids
            _check_near(c.logprobs.logprobs, d.logprobs.logprobs)


def _check_near(mine: bytes, other: bytes) -> None:
    assert np.allclose(np.frombuffer(mine, "<f4"), np.frombuffer(other, "<f4"), atol=1e-3)
