"""Draft rows give a sequence the tokens that decode rows give it, whatever the drafts are."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_worker.build import BuiltWorker
from gpu_worker.errors import ProtocolViolation
from gpu_worker.steps.drafts import num_accepted
from gpu_worker.steps.results import NO_NUMBER
from gpu_worker.steps.runner import ModelRunner
from paceline.v1.common_pb2 import SamplingParams
from paceline.v1.worker_pb2 import StepPlan, StepResult
from tests.unit.worker.driver import GREEDY, Driver, Sequence, pack
from tests.unit.worker.families import VOCAB, Reference

References = Callable[[str], Reference]
Build = Callable[..., BuiltWorker]

NEW_TOKENS = 40
_rng = np.random.default_rng(11)
PROMPTS = [_rng.integers(0, VOCAB, size=n).tolist() for n in (1, 7, 16, 33, 70)]
SEEDED = SamplingParams(temperature=1.1, top_p=0.95, min_p=0.01, typical_p=0.95, seed=5, max_tokens=NEW_TOKENS)
PROCESSED = SamplingParams(
    temperature=0.9, top_k=50, top_p=1.0, seed=6, max_tokens=NEW_TOKENS, min_tokens=9, logit_bias={20: 2.5, 21: -3.0},
    allowed_token_ids=pack(range(1, VOCAB)), bad_words=[pack([14]), pack([60])], stop_token_ids=[*range(100, 130)],
)  # fmt: skip
SAMPLINGS = (GREEDY, SEEDED, PROCESSED)


def plain_outputs(runner: ModelRunner, samplings: list[SamplingParams]) -> list[list[int]]:
    """The output of decode rows for each prompt."""
    driver = Driver(runner)
    sequences = [driver.add(prompt, NEW_TOKENS + 10, one) for prompt, one in zip(PROMPTS, samplings, strict=True)]
    driver.run()
    runner.reset()
    return [sequence.output for sequence in sequences]


def drafts_of(expected: list[int], sequence: Sequence, count: int, num_right: int) -> list[int]:
    """Draft tokens, of which the first `num_right` are right and the next one is wrong."""
    done = len(sequence.output)
    drafts = expected[done : done + count]
    assert len(drafts) == count
    if num_right < count:
        drafts[num_right] = (drafts[num_right] + 1) % VOCAB
    return drafts


def counts_of(result: StepResult) -> list[int]:
    return np.frombuffer(result.draft_num_tokens, "<i4").tolist()


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("family", ["llama-tied", "mistral", "qwen3"])
def test_tokens_do_not_depend_on_drafts(
    family: str, block_size: int, backend: str, reference: References, build: Build
) -> None:
    """Random draft rows beside decode rows and chunks. Sequences begin and stop to speculate."""
    settings = {"block_size": block_size, "attention_backend": backend, "dtype": "float32"}
    runner = build(reference(family).folder, **settings).runner
    tried: set[tuple[int, int]] = set()
    for seed in range(3):
        dice = random.Random(seed)
        samplings = [SAMPLINGS[(i + seed) % len(SAMPLINGS)] for i in range(len(PROMPTS))]
        outputs = {len(prompt): known for prompt, known in zip(PROMPTS, plain_outputs(runner, samplings), strict=True)}
        driver = Driver(runner, chunk_tokens=dice.choice([5, 64]))
        waiting = list(zip(PROMPTS, samplings, strict=True))
        while waiting or driver.running:
            if waiting and dice.random() < 0.4:
                prompt, sampling = waiting.pop(0)
                driver.add(prompt, NEW_TOKENS, sampling)
            wanted: list[int] = []
            for sequence in driver.running.values():
                if not sequence.fresh and dice.random() < 0.7:
                    count = dice.randrange(7)
                    num_right = dice.randint(0, count)
                    driver.draft(sequence, drafts_of(outputs[sequence.num_prompt], sequence, count, num_right))
                    wanted.append(num_right + 1)
                    tried.add((count, num_right))
                elif sequence.held and dice.random() < 0.5:
                    driver.resume(sequence)
            assert counts_of(driver.run_step()) == wanted
            for sequence in list(driver.running.values()):
                assert sequence.output == outputs[sequence.num_prompt][: len(sequence.output)]
                if sequence.ended:
                    driver.free(sequence)
        driver.run_step()
        runner.reset()
    assert tried >= {(0, 0), (1, 0), (1, 1), (6, 6)}


def test_a_sequence_of_draft_rows_alone_equals_transformers(reference: References, build: Build) -> None:
    """Eight drafts are right each time: 9 tokens in a step."""
    checkpoint = reference("llama3-rope")
    runner = build(checkpoint.folder, block_size=8).runner
    expected = checkpoint.greedy(PROMPTS[3], 1 + 4 * 9)
    driver = Driver(runner)
    sequence = driver.add(PROMPTS[3], len(expected))
    driver.run_step()
    for _ in range(4):
        driver.draft(sequence, expected[len(sequence.output) :][:8])
        assert counts_of(driver.run_step()) == [9]
    assert sequence.output == expected
    assert driver.step == 5


def test_many_draft_rows_are_sampled_in_pieces(
    reference: References, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = build(reference("qwen2").folder, block_size=4).runner
    samplings = [SEEDED, PROCESSED, GREEDY, PROCESSED, SEEDED]
    expected = plain_outputs(runner, samplings)
    rows: list[int] = []
    logits = runner._decoder.logits

    def count_rows(hidden: Tensor, **options: Any) -> Tensor:
        rows.append(len(hidden))
        return logits(hidden, **options)

    monkeypatch.setattr(runner._decoder, "logits", count_rows)
    for most in (2, 3, 7):
        monkeypatch.setattr(runner, "_rows_at_once", most)
        runner.reset()
        driver = Driver(runner)
        added = [driver.add(prompt, NEW_TOKENS, one) for prompt, one in zip(PROMPTS, samplings, strict=True)]
        monkeypatch.setattr(runner, "_rows_at_once", 40)  # all prefills sample, and such rows are never split
        driver.run_step()
        driver.run_step()
        monkeypatch.setattr(runner, "_rows_at_once", most)
        for i, right in ((4, 5), (1, 2), (0, 0)):
            driver.draft(added[i], drafts_of(expected[i], added[i], 5, right))
        rows.clear()
        assert counts_of(driver.run_step()) == [6, 3, 1]
        assert max(rows) == most
        assert sum(rows) == 2 + 3 * 6
        assert [sequence.output for sequence in added] == [
            known[: len(sequence.output)] for known, sequence in zip(expected, added, strict=True)
        ]


def test_draft_rows_do_not_change_the_scores_of_a_prompt(reference: References, build: Build) -> None:
    """The logits of draft rows come between those of the other rows and those of the scored prompt."""
    driver = Driver(build(reference("qwen2").folder, deterministic=True).runner)
    scored = SamplingParams(top_p=1, max_tokens=2, prompt_logprobs=True, num_top_prompt_logprobs=3)
    alone = driver.add(PROMPTS[3], 2, scored)
    expected = driver.run_step()
    driver.free(alone)
    sequence, _ = driver.add(PROMPTS[1], 30), driver.add(PROMPTS[2], 30)
    driver.run_step()
    again = driver.add(PROMPTS[3], 2, scored)
    driver.draft(sequence, [1, 2, 3])
    result = driver.run_step()
    [known], [scores] = expected.prompt_logprobs, result.prompt_logprobs
    assert scores.slot == again.slot
    assert scores.logprobs == known.logprobs
    assert again.output == alone.output


def test_a_resumed_sequence_continues_after_its_accepted_tokens(reference: References, build: Build) -> None:
    checkpoint = reference("llama-tied")
    runner = build(checkpoint.folder, block_size=4).runner
    expected = checkpoint.greedy(PROMPTS[2], 20)
    for right in range(5):
        driver = Driver(runner)
        sequence = driver.add(PROMPTS[2], 20)
        driver.run_step()
        driver.draft(sequence, drafts_of(expected, sequence, 4, right))
        driver.run_step()
        assert len(sequence.output) == right + 2
        driver.run_step()
        assert len(sequence.output) == right + 2, "it is held"
        driver.resume(sequence)
        driver.run()
        assert sequence.output == expected
        runner.reset()


def test_kept_tokens_are_the_accepted_ones(reference: References, build: Build) -> None:
    """Another link reuses the KV of a sequence after rejected drafts."""
    checkpoint = reference("llama-tied")
    runner = build(checkpoint.folder, block_size=4).runner
    expected = checkpoint.greedy(PROMPTS[2], 30)
    before = Driver(runner)
    sequence = before.add(PROMPTS[2], 30)
    before.run_step()
    for right in (6, 2, 0):
        before.draft(sequence, drafts_of(expected, sequence, 6, right))
        before.run_step()
    (kept,) = runner.kept(2**20)
    tokens = np.frombuffer(kept.token_ids, "<i4").tolist()
    assert tokens == [*PROMPTS[2], *expected[: 1 + 7 + 3 + 1]]
    assert kept.num_computed_tokens == len(tokens) - 1
    blocks = np.frombuffer(kept.block_table, "<i4").tolist()
    assert blocks == sequence.blocks
    runner.reset()
    after = Driver(runner)
    after.free_blocks = [block for block in after.free_blocks if block not in blocks]
    num_cached = kept.num_computed_tokens // 4 * 4
    again = Sequence(0, tokens, len(PROMPTS[2]), num_cached, len(PROMPTS[2]) + 30, blocks, GREEDY)
    after.running[0] = again
    after.arrivals.append(again)
    after.run()
    assert again.output == expected


def test_a_slot_that_is_freed_after_draft_rows_can_be_used_again(reference: References, build: Build) -> None:
    checkpoint = reference("qwen2")
    runner = build(checkpoint.folder, block_size=4, num_blocks=12).runner
    driver = Driver(runner)
    for prompt in (PROMPTS[2], PROMPTS[1], PROMPTS[2]):
        sequence = driver.add(prompt, 12)
        expected = checkpoint.greedy(prompt, 12)
        driver.run_step()
        driver.draft(sequence, drafts_of(expected, sequence, 5, 3))
        driver.run_step()
        assert sequence.output == expected[:5]
        driver.free(sequence)
    last = driver.add(PROMPTS[1], 12)
    driver.run()
    assert last.output == checkpoint.greedy(PROMPTS[1], 12)


def spoil(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, row: int) -> None:
    """The logits of this row of the next steps are NaN."""
    logits = runner._decoder.logits

    def spoiled(hidden: Tensor, **options: Any) -> Tensor:
        result = logits(hidden, **options)
        result[row] = torch.nan
        return result

    monkeypatch.setattr(runner._decoder, "logits", spoiled)


@pytest.mark.parametrize(("row", "count"), [(0, 0), (1, 1), (3, 3), (4, 4), (5, 4)])
def test_nan_ends_the_accepted_tokens(
    row: int, count: int, reference: References, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of five drafts are right. The token of a row with NaN is not reported, and neither are those after it."""
    checkpoint = reference("qwen2")
    runner = build(checkpoint.folder).runner
    expected = checkpoint.greedy(PROMPTS[2], 10)
    driver = Driver(runner)
    sequence = driver.add(PROMPTS[2], 10)
    driver.run_step()
    with monkeypatch.context() as patch:
        spoil(runner, patch, row)
        driver.draft(sequence, drafts_of(expected, sequence, 5, 3))
        result = driver.run_step()
    assert counts_of(result) == [count]
    if count:
        assert not result.errors
        driver.resume(sequence)
        driver.run()
        assert sequence.output == expected
    else:
        assert [(error.slot, error.message) for error in result.errors] == [(sequence.slot, NO_NUMBER)]
        assert runner.kept(2**20) == []
        driver.draft(sequence, [])
        with pytest.raises(ProtocolViolation, match="known last token"):
            driver.run_step()


def test_nan_in_a_draft_row_leaves_other_sequences_alone(
    reference: References, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = reference("qwen2")
    runner = build(checkpoint.folder).runner
    driver = Driver(runner)
    plain, bad, good = (driver.add(prompt, 10) for prompt in PROMPTS[1:4])
    driver.run_step()
    with monkeypatch.context() as patch:
        spoil(runner, patch, 1)
        for sequence in (bad, good):
            expected = checkpoint.greedy(sequence.tokens[: sequence.num_prompt], 10)
            driver.draft(sequence, drafts_of(expected, sequence, 4, 4))
        result = driver.run_step()
    assert counts_of(result) == [0, 5]
    assert [error.slot for error in result.errors] == [bad.slot]
    driver.free(bad)
    driver.resume(good)
    driver.run()
    for sequence in (plain, good):
        assert sequence.output == checkpoint.greedy(sequence.tokens[: sequence.num_prompt], 10)


def test_a_rejected_draft_with_broken_kv_changes_nothing(reference: References, build: Build) -> None:
    """The compiled kernel reads no KV behind a row's own token."""
    checkpoint = reference("llama3-rope")
    runner = build(checkpoint.folder, block_size=16).runner
    expected = checkpoint.greedy(PROMPTS[2], 12)
    bad = next(token for token in range(VOCAB) if token not in [*PROMPTS[2], *expected])
    driver = Driver(runner)
    sequence = driver.add(PROMPTS[2], 12)
    driver.run_step()
    embedding = runner._decoder._weights.embedding
    assert isinstance(embedding, torch.Tensor)
    embedding[bad] = torch.nan
    driver.draft(sequence, [expected[1], bad, expected[3]])
    assert counts_of(driver.run_step()) == [2]
    driver.resume(sequence)
    driver.run()
    assert sequence.output == expected


@pytest.mark.parametrize(
    "sampling",
    [
        {"logprobs": True},
        {"repetition_penalty": 1.2},
        {"frequency_penalty": 0.5},
        {"bad_words": [pack([1]), pack([2, 3])]},
    ],
)
def test_draft_rows_of_a_request_that_needs_its_output_are_refused(
    sampling: dict[str, Any], reference: References, build: Build
) -> None:
    driver = Driver(build(reference("qwen2").folder).runner)
    good = driver.add([1, 2], 9)
    sequence = driver.add([1, 2, 3], 9, SamplingParams(top_p=1, max_tokens=9, **sampling))
    driver.run_step()
    driver.draft(good, [5])
    driver.run_step()
    driver.draft(sequence, [4])
    with pytest.raises(ProtocolViolation, match=r"penalties or bad words of several tokens: \[1\]"):
        driver.run_step()


def test_draft_rows_of_a_request_with_a_grammar_are_refused(reference: References, build: Build) -> None:
    driver = Driver(build(reference("qwen2").folder).runner)
    sequence = driver.add([1, 2], 9)
    driver.run_step()
    driver.runner._grammars._of[sequence.slot] = object()  # type: ignore[assignment]
    driver.draft(sequence, [5])
    with pytest.raises(ProtocolViolation, match="a grammar"):
        driver.run_step()


@pytest.mark.parametrize(("field", "value"), [("_device", torch.device("cuda")), ("_pooler", object())])
def test_only_a_synchronous_device_that_samples_computes_draft_rows(
    field: str, value: object, reference: References, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = build(reference("qwen2").folder).runner
    assert runner.verifies_drafts
    monkeypatch.setattr(runner, field, value)
    assert not runner.verifies_drafts
    with pytest.raises(ProtocolViolation, match="this worker computes none"):
        runner.launch(StepPlan(step=1, draft_slots=pack([0]), draft_counts=pack([0])))


def test_a_step_counts_its_draft_rows(reference: References, build: Build) -> None:
    runner = build(reference("qwen2").folder).runner
    driver = Driver(runner, chunk_tokens=6)
    sequences = [driver.add(prompt, 30) for prompt in ([1], [2], [3])]
    driver.run_step()
    driver.add(PROMPTS[3], 3)
    stats = []
    launch = runner.launch

    def launch_and_note(plan: StepPlan) -> Any:
        launched = launch(plan)
        stats.append(launched.stats)
        return launched

    runner.launch = launch_and_note  # type: ignore[method-assign]
    for sequence, count in zip(sequences[:2], (0, 4), strict=True):
        driver.draft(sequence, [0] * count)
    driver.run_step()
    [one] = stats
    assert (one.decode_tokens, one.prefill_tokens, one.draft_tokens, one.sequences) == (1, 6, 1 + 5, 4)
    assert runner.request_ids() == ["r2", "r3", "r0", "r1"]


def test_a_draft_row_may_reach_the_longest_sequence(reference: References, build: Build) -> None:
    checkpoint = reference("qwen2")
    runner = build(checkpoint.folder, block_size=4, max_model_len=24).runner
    expected = checkpoint.greedy(PROMPTS[2], 9)  # after a prompt of 16 tokens
    driver = Driver(runner)
    sequence = driver.add(PROMPTS[2], 9)
    driver.run_step()
    driver.draft(sequence, expected[1:8])
    assert counts_of(driver.run_step()) == [8]
    assert sequence.output == expected


@pytest.mark.parametrize(
    ("tokens", "failed", "drafts", "expected"),
    [
        ([7], [False], [], 1),
        ([7], [True], [], 0),
        ([7, 8, 9], [False] * 3, [7, 8], 3),
        ([7, 8, 9], [False] * 3, [6, 8], 1),
        ([7, 8, 9], [False] * 3, [7, 6], 2),
        ([7, 0, 9], [False, True, False], [7, 0], 1),
        ([7, 8, 0], [False, False, True], [7, 8], 2),
        ([7, 8, 0], [False, False, True], [6, 8], 1),
        ([0, 8, 9], [True, False, False], [0, 8], 0),
    ],
)
def test_tokens_are_accepted_up_to_the_first_difference(
    tokens: list[int], failed: list[bool], drafts: list[int], expected: int
) -> None:
    assert num_accepted(np.array(tokens, np.int32), np.array(failed), np.array(drafts, np.int32)) == expected
