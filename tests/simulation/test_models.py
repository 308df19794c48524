"""Small checkpoints with random weights run on the real worker under the real scheduler and cache cores, in one
process. Greedy outputs are those of transformers, token for token."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.v1.common_pb2 import FinishReason, SamplingParams
from scheduler_svc.core.types import SchedulerConfig
from scheduler_svc.policies.presets import PRESETS
from scheduler_svc.policies.registry import build, choose
from simulator.system import LocalSystem
from tests.support import checkpoints, reference
from tests.support.model_worker import ModelWorker

NUM_OUTPUT = 12
GREEDY = SamplingParams(top_p=1, max_tokens=NUM_OUTPUT, ignore_eos=True, seed=1)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {family: checkpoints.make(family, folder / family) for family in checkpoints.FAMILIES}


def prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 320) for _ in range(length)] for length in lengths]


def check(
    path: Path,
    asked: list[list[int]],
    *,
    window: int = 2,
    workers: int = 1,
    waves: int = 1,
    preset: str = "",
    expect_preemption: bool = False,
    expect_hits: bool = False,
    expect_promotions: bool = False,
    swap: bool = False,
    prefix_caching: bool = True,
    **settings: Any,
) -> None:
    """Submits all prompts together, `waves` times one after the other, and compares each output with that of
    transformers."""
    options = {"chunked_prefill": True, "mode": "swap" if swap else "recompute"}
    config = SchedulerConfig(window=window, prefix_caching=prefix_caching)
    system = LocalSystem(config, build(choose(preset, options=options)))
    for _ in range(workers):
        system.attach(ModelWorker(path, **{"num_blocks": 400, "max_num_seqs": 16} | settings))
    client = system.open("s")
    for wave in range(waves):
        for i, prompt in enumerate(asked):
            system.submit("s", wave * 100 + i, prompt, GREEDY)
        system.run()
        for i, prompt in enumerate(asked):
            assert client.endings[wave * 100 + i].reason == FinishReason.FINISH_REASON_LENGTH
            assert client.tokens[wave * 100 + i] == reference.greedy(path, prompt, NUM_OUTPUT), f"wave {wave}, {i}"
    system.assert_at_rest()
    if expect_preemption:
        assert system.scheduler.counters.preempted > 0
    if swap:
        assert system.scheduler.counters.swapped_in > 0
        assert system.cache.counters.swapped_in_blocks > 0
    if expect_hits:
        assert system.cache.counters.prefix_hit_tokens > 0
    if expect_promotions:
        assert system.cache.counters.promoted_blocks > 0
    if workers > 1:
        assert all(end.worker.num_steps for end in system.workers)  # type: ignore[attr-defined]


MIXED = prompts(0, [1, 3, 17, 40, 64, 90])


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
@pytest.mark.parametrize("block_size", [1, 8, 16, 128])
def test_mixed_lengths_and_block_sizes(models: dict[str, Path], family: str, block_size: int) -> None:
    check(models[family], MIXED, block_size=block_size, num_blocks=6400 // block_size)


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
@pytest.mark.parametrize("chunk", [7, 64])
def test_prefill_in_chunks(models: dict[str, Path], family: str, chunk: int) -> None:
    check(models[family], MIXED, block_size=8, max_batched_tokens=chunk, max_num_seqs=min(chunk, 16))


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_prefix_hit(models: dict[str, Path], family: str) -> None:
    check(models[family], MIXED, block_size=8, waves=2, expect_hits=True)


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_preemption_in_a_tiny_pool(models: dict[str, Path], family: str) -> None:
    asked = prompts(1, [9, 10, 11, 12])
    check(models[family], asked, block_size=4, num_blocks=13, expect_preemption=True)


@pytest.mark.parametrize("preset", ["paceline", "vllm-v0"])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("window", [1, 3])
def test_swapped_in_a_tiny_pool(models: dict[str, Path], preset: str, prefix_caching: bool, window: int) -> None:
    """KV that was swapped to host memory gives the same tokens. With prefix caching, blocks that the device still
    caches are not copied back."""
    asked = prompts(1, [9, 10, 11, 12, 13, 14])
    tiny: dict[str, Any] = {"block_size": 4, "num_blocks": 13, "num_host_blocks": 40}
    check(models["llama3"], asked, preset=preset, prefix_caching=prefix_caching, window=window, swap=True, **tiny)


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
@pytest.mark.parametrize("window", [1, 3])
def test_evicted_kv_comes_back_from_host_memory(models: dict[str, Path], family: str, window: int) -> None:
    """Each wave evicts most blocks of the wave before, and hits the blocks of it that host memory has kept."""
    asked = prompts(3, [41, 30, 37, 44, 25, 39])
    tiny: dict[str, Any] = {"block_size": 4, "num_blocks": 20, "num_host_blocks": 100}
    check(models[family], asked, window=window, waves=3, expect_promotions=True, **tiny)


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("workers", [1, 2])
def test_windows_and_workers(models: dict[str, Path], window: int, workers: int) -> None:
    check(models["llama3"], MIXED, window=window, workers=workers, block_size=16)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets(models: dict[str, Path], preset: str) -> None:
    """Some presets let decodes wait while a step has only prefills, some allocate blocks for each chunk of a prompt.
    All give the same tokens."""
    settings: dict[str, Any] = {"block_size": 4, "num_blocks": 40, "max_batched_tokens": 20}
    check(models["qwen3"], MIXED, preset=preset, waves=2, **settings)


def test_a_scored_prompt_in_a_tiny_pool(models: dict[str, Path]) -> None:
    """The prompts are prefilled in chunks and preempted, and one comes twice. Each position gets the score of
    transformers."""
    asked = prompts(4, [9, 10, 11, 12, 30])
    asked.append(asked[-1])
    system = LocalSystem()
    system.attach(ModelWorker(models["llama3"], block_size=4, num_blocks=13, max_batched_tokens=8, max_num_seqs=8))
    client = system.open("s")
    scored = SamplingParams(top_p=1, max_tokens=NUM_OUTPUT, ignore_eos=True, prompt_logprobs=True)
    for i, prompt in enumerate(asked):
        system.submit("s", i, prompt, scored)
    system.run()
    assert system.scheduler.counters.preempted > 0
    for i, prompt in enumerate(asked):
        assert client.tokens[i] == reference.greedy(models["llama3"], prompt, NUM_OUTPUT)
        right = reference.logprobs(models["llama3"], prompt)
        expected = [float(right[j - 1, prompt[j]]) for j in range(1, len(prompt))]
        assert [client.prompt_scores[i][j] for j in range(1, len(prompt))] == pytest.approx(expected, abs=1e-3)
    system.assert_at_rest()


def test_seeded_sampling_is_the_same_alone_in_a_batch_and_after_preemption(models: dict[str, Path]) -> None:
    asked = prompts(2, [5 + i % 13 for i in range(32)])
    sampled = [SamplingParams(temperature=0.9, top_p=0.95, top_k=50, max_tokens=10, seed=i) for i in range(32)]
    for i in range(0, 32, 3):  # these also depend on the sequence's earlier tokens
        sampled[i].MergeFrom(
            SamplingParams(
                repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.5, min_p=0.02, typical_p=0.95,
                bad_words=[np.array([i % 9, 5], "<i4").tobytes()], logit_bias={40 + i: 2.0},
            )
        )  # fmt: skip

    def run(which: range, **settings: Any) -> tuple[dict[int, list[int]], int]:
        system = LocalSystem()
        system.attach(ModelWorker(models["qwen3"], **{"block_size": 4, "max_num_seqs": 32} | settings))
        client = system.open("s")
        for i in which:
            system.submit("s", i, asked[i], sampled[i])
        system.run()
        return client.tokens, system.scheduler.counters.preempted

    together, _ = run(range(32), num_blocks=400)
    squeezed, preempted = run(range(32), num_blocks=40)
    assert preempted > 0
    assert squeezed == together
    for i in (0, 7, 31):
        alone, _ = run(range(i, i + 1), num_blocks=400)
        assert alone[i] == together[i]
    assert len({tuple(tokens) for tokens in together.values()}) > 16  # it does sample
