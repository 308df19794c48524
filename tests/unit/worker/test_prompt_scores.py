"""Log probabilities of prompt tokens, against transformers' logits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from gpu_worker.build import BuiltWorker
from gpu_worker.sampling import prompt_scores
from gpu_worker.sampling.prompt_scores import ScoredChunk, score_prompts
from gpu_worker.steps.results import NO_NUMBER
from paceline.v1.common_pb2 import PromptLogprobs, SamplingParams
from tests.unit.worker.driver import Driver
from tests.unit.worker.families import Reference

PROMPT = [int(token) for token in np.random.default_rng(5).integers(0, 199, 60)]
SCORED = SamplingParams(top_p=1, max_tokens=9, prompt_logprobs=True, num_top_prompt_logprobs=4)


def expected(checkpoint: Reference, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return checkpoint.model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)


def check(parts: list[PromptLogprobs], right: torch.Tensor, prompt: list[int], num_top: int) -> None:
    parts.sort(key=lambda part: part.start)
    starts = np.cumsum([1] + [len(part.logprobs) // 4 for part in parts])
    assert [part.start for part in parts] == starts[:-1].tolist()
    assert starts[-1] == len(prompt), "every token but the first, once"
    logprobs = torch.from_numpy(np.concatenate([np.frombuffer(part.logprobs, "<f4") for part in parts]).copy())
    targets = torch.tensor(prompt[1:])
    chosen = right.gather(1, targets[:, None])
    torch.testing.assert_close(logprobs, chosen.squeeze(-1), atol=1e-4, rtol=1e-4)
    ranks = np.concatenate([np.frombuffer(part.ranks, "<i4") for part in parts])
    assert ranks.tolist() == ((right > chosen).sum(-1) + 1).tolist()
    ids = np.concatenate([np.frombuffer(part.top_token_ids, "<i4") for part in parts]).reshape(len(ranks), -1)
    values = np.concatenate([np.frombuffer(part.top_logprobs, "<f4") for part in parts]).reshape(len(ranks), -1)
    best = right.topk(num_top)
    assert ids.tolist() == best.indices.tolist()
    torch.testing.assert_close(torch.from_numpy(values.copy()), best.values, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk", [1, 7, 59, 60, 64])
def test_every_position_of_a_prompt_is_scored_in_chunks_of_any_size(
    chunk: int, reference: Callable[[str], Reference], build: Callable[..., BuiltWorker]
) -> None:
    checkpoint = reference("qwen2")
    driver = Driver(build(checkpoint.folder).runner, chunk_tokens=chunk)
    plain = [driver.add(PROMPT[i:], 9) for i in (3, 40)]
    for _ in range(3):
        driver.run_step()
    scored = driver.add(PROMPT, 9, SCORED)
    other = driver.add(PROMPT[:30], 9, SamplingParams(top_p=1, max_tokens=9, prompt_logprobs=True))
    parts: dict[int, list[PromptLogprobs]] = {scored.slot: [], other.slot: []}
    while driver.running:
        for item in driver.run_step().prompt_logprobs:
            parts[item.slot].append(item.logprobs)
        for sequence in [s for s in driver.running.values() if s.ended]:
            driver.free(sequence)
    right = expected(checkpoint, PROMPT)
    check(parts[scored.slot], right, PROMPT, 4)
    check(parts[other.slot], right[:29], PROMPT[:30], 0)
    assert scored.output == checkpoint.greedy(PROMPT, 9)
    assert [sequence.output for sequence in plain] == [checkpoint.greedy(PROMPT[i:], 9) for i in (3, 40)]


def test_earlier_output_is_not_scored(reference: Callable[[str], Reference], build: Callable[..., BuiltWorker]) -> None:
    checkpoint = reference("qwen2")
    driver = Driver(build(checkpoint.folder).runner, chunk_tokens=25)
    driver.add(PROMPT[:20], 9, SCORED, output=PROMPT[20:40])
    parts = [item.logprobs for _ in range(2) for item in driver.run_step().prompt_logprobs]
    check(parts, expected(checkpoint, PROMPT[:20]), PROMPT[:20], 4)


def test_a_nan_at_a_scored_position_fails_only_its_request(
    reference: Callable[[str], Reference], build: Callable[..., BuiltWorker]
) -> None:
    runner = build(reference("llama3-rope").folder).runner  # its embedding is not its head
    embedding = runner._decoder._weights.embedding
    assert isinstance(embedding, torch.Tensor)
    embedding[PROMPT[5]] = torch.nan
    driver = Driver(runner, chunk_tokens=8)
    sequence = driver.add(PROMPT, 9, SCORED)
    other = driver.add([1, 2, 3], 9)
    assert PROMPT[5] not in [1, 2, 3]
    result = driver.run_step()
    assert [(error.slot, error.message) for error in result.errors] == [(sequence.slot, NO_NUMBER)]
    assert other.output


@pytest.mark.parametrize("rows", [1, 7, 19, 20, 64])
def test_scores_in_slices_equal_scores_at_once(rows: int) -> None:
    """Several chunks at once. Their boundaries are not those of the slices, and no slice exceeds its limit."""
    hidden = torch.randn(60, 16, generator=torch.Generator().manual_seed(0))
    head = torch.randn(16, 300, generator=torch.Generator().manual_seed(1))
    chunks = [ScoredChunk(slot, 1, np.arange(20, dtype=np.int32) * 7, top) for slot, top in enumerate((3, 0, 5))]
    sizes: list[int] = []

    def logits(part: torch.Tensor) -> torch.Tensor:
        sizes.append(len(part))
        return (part.unsqueeze(-1) * head).sum(1)  # row by row the same sums, unlike a matmul

    whole = list(score_prompts(hidden, logits, 300, chunks).by_chunk())
    assert sizes == [60]
    sizes.clear()
    sliced = list(score_prompts(hidden, logits, 300, chunks, slice_bytes=rows * 300 * 4 + 3).by_chunk())
    assert max(sizes) == min(rows, 60)
    assert sliced == whole
    assert [len(scores.logprobs.top_logprobs) for scores, _ in whole] == [4 * 20 * top for top in (3, 0, 5)]


def test_prompts_in_slices_through_the_runner(
    reference: Callable[[str], Reference], build: Callable[..., BuiltWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_scores, "rows_at_once", lambda vocab_size, slice_bytes: 7)
    checkpoint = reference("qwen2")
    driver = Driver(build(checkpoint.folder).runner, chunk_tokens=33)
    driver.add(PROMPT, 9, SCORED)
    parts = [item.logprobs for _ in range(2) for item in driver.run_step().prompt_logprobs]
    check(parts, expected(checkpoint, PROMPT), PROMPT, 4)
