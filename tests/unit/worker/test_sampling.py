"""Sampling on the worker: filters, draws, stop tokens and log probabilities, against transformers and in the runner."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from gpu_worker.build import BuiltWorker
from gpu_worker.cpu.ops import largest_logits
from gpu_worker.sampling.filters import apply_temperature, mask_top_k, mask_top_p
from gpu_worker.sampling.grammars import GrammarMask
from gpu_worker.sampling.sampler import SamplingRows, sample
from gpu_worker.sampling.torch_sampling import likeliest
from gpu_worker.steps.slots import SlotBuffers, SlotLimits
from paceline.request_fields import FILTER_NAMES, SAMPLING
from paceline.v1.common_pb2 import SamplingParams
from paceline.v1.worker_pb2 import NewSequence, StepPlan
from tests.unit.worker.driver import Driver
from tests.unit.worker.families import VOCAB, Reference
from tests.unit.worker.ready_kernels import ready_kernels

EMPTY = np.zeros(0, np.int64)


def make_rows(count: int, **values: Any) -> SamplingRows:
    defaults: dict[str, Any] = {
        "temperature": np.ones(count, np.float32),
        **{
            name: np.full(count, SAMPLING[name].default, np.int64 if name == "top_k" else np.float32)
            for name in FILTER_NAMES
        },
        "seed": np.arange(count, dtype=np.uint64),
        "position": np.zeros(count, np.int64),
        "banned_rows": EMPTY,
        "banned_tokens": EMPTY,
        "scored": EMPTY,
        "num_top": EMPTY,
    }
    values = {**defaults, **values}
    columns = {name: values.pop(name) for name in SAMPLING if name in values}
    return SamplingRows(columns=columns, **values)


def test_log_probabilities_are_those_of_the_tokens_that_a_grammar_allows() -> None:
    """As in vLLM V1, the softmax runs over the tokens that the grammar allows. So a token that is the only allowed one
    (as in a `choice` of one text) has log probability 0. A ban and a temperature do not change log probabilities."""
    vocab, allowed = 40, [3, 8, 21]
    logits = 3 * torch.randn(3, vocab, generator=torch.Generator().manual_seed(4))
    bits = np.packbits(np.isin(np.arange(vocab), allowed), bitorder="little")
    mask = GrammarMask(torch.tensor([1]), torch.from_numpy(bits).unsqueeze(0), {})
    banned = int(logits[1][allowed].argmin())
    rows = make_rows(
        3,
        temperature=np.full(3, 2.0, np.float32),
        scored=np.array([0, 1]),
        num_top=np.array([2, 5]),
        banned_rows=np.array([1]),
        banned_tokens=np.array([allowed[banned]]),
    )
    drawn = sample(logits.clone(), rows, mask=mask)
    masked = torch.full((vocab,), -torch.inf)
    masked[allowed] = logits[1][allowed]
    expected = torch.stack([logits[0].log_softmax(-1), masked.log_softmax(-1)])
    assert drawn.scores is not None
    tokens = drawn.tokens[:2]
    assert int(tokens[1]) in allowed
    assert int(tokens[1]) != allowed[banned]
    torch.testing.assert_close(drawn.scores.sampled, expected.gather(1, tokens.unsqueeze(-1)).squeeze(-1))
    best = expected.topk(5)
    torch.testing.assert_close(drawn.scores.top, best.values)
    assert drawn.scores.top_tokens[1, :3].tolist() == best.indices[1, :3].tolist()
    assert drawn.scores.top[1, 3:].tolist() == [-torch.inf] * 2


@pytest.mark.parametrize("vocab", [50, 1000])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 5, 1.0), (0.7, 40, 0.9), (1.5, 1, 1.0), (1.0, 45, 0.3), (2.0, 45, 0.999), (0.3, 3, 0.0)],
)
def test_filters_are_those_of_transformers(temperature: float, top_k: int, top_p: float, vocab: int) -> None:
    logits = 3 * torch.randn(8, vocab, generator=torch.Generator().manual_seed(vocab))
    theirs = LogitsProcessorList([TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k)])
    if top_p < 1:
        theirs.append(TopPLogitsWarper(top_p))
    expected = theirs(torch.zeros(8, 1, dtype=torch.int64), logits.clone())
    ours = mask_top_k(apply_temperature(logits, torch.full((8,), temperature)), torch.full((8,), top_k), top_k)
    if top_p < 1:
        ours = mask_top_p(ours, torch.full((8,), top_p))
    assert torch.equal(ours.isinf(), expected.isinf())
    torch.testing.assert_close(ours.softmax(-1), expected.softmax(-1))


def test_top_p_alone_over_a_flat_row_needs_the_whole_row() -> None:
    """More tokens stay than the filter looks at in its first pass."""
    logits = 0.1 * torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    logits[1, 7] = 20.0
    expected = TopPLogitsWarper(0.9)(torch.zeros(4, 1, dtype=torch.int64), logits.clone())
    ours = mask_top_p(logits, torch.full((4,), 0.9))
    assert torch.equal(ours.isinf(), expected.isinf())
    assert (~ours.isinf()).sum(-1).tolist()[1] == 1


def test_min_tokens_bans_the_same_tokens_as_transformers() -> None:
    logits = torch.randn(2, 20, generator=torch.Generator().manual_seed(0))
    logits[:, 3] = 9.0
    processor = MinNewTokensLengthLogitsProcessor(4, 5, [3, 4], device="cpu")
    expected = processor(torch.zeros(2, 6, dtype=torch.int64), logits.clone()).argmax(-1)
    rows = make_rows(
        2, temperature=np.zeros(2, np.float32), banned_rows=np.array([0, 0, 1, 1]), banned_tokens=np.array([3, 4, 3, 4])
    )
    assert sample(logits, rows).tokens.tolist() == expected.tolist()


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.5, 0.2, 0.2, 0.1]).log().repeat(20_000, 1)
    tokens = sample(logits, make_rows(20_000, seed=np.full(20_000, 3, np.uint64), position=np.arange(20_000))).tokens
    shares = torch.bincount(tokens, minlength=4) / 20_000
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.2, 0.2, 0.1]), atol=0.01, rtol=0)


def test_a_small_temperature_does_not_decide_between_equals() -> None:
    """Large logits divided by such a temperature are so large that adding noise would not change them."""
    logits = torch.tensor([100.0, 99.0, 100.0, 100.0]).repeat(20_000, 1)
    rows = make_rows(20_000, temperature=np.full(20_000, 1e-5, np.float32), position=np.arange(20_000))
    shares = torch.bincount(sample(logits, rows).tokens, minlength=4) / 20_000
    torch.testing.assert_close(shares, torch.tensor([1 / 3, 0.0, 1 / 3, 1 / 3]), atol=0.015, rtol=0)


@pytest.mark.parametrize("name", ["top_p", "typical_p"])
def test_the_smallest_top_p_or_typical_p_keeps_one_token(
    name: str, reference: Callable[[str], Reference], build: Callable[..., BuiltWorker]
) -> None:
    """2^-149 is the smallest float32, the type in messages. For typical_p the token is not always the likeliest."""
    outputs = []
    for seed in (1, 2):
        driver = Driver(build(reference("qwen2").folder).runner)
        values: dict[str, Any] = {"top_p": 1.0, "temperature": 1.0, "seed": seed, name: 2.0**-149}
        smallest = SamplingParams(**values)
        sequence = driver.add([5, 6, 7], 12, smallest)
        driver.run()
        outputs.append(sequence.output)
    assert outputs[0] == outputs[1]
    if name == "top_p":
        assert outputs[0] == reference("qwen2").greedy([5, 6, 7], 12)


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.full((5000, 9), -torch.inf)
    logits[:, [2, 5]] = 0.0
    assert set(sample(logits, make_rows(5000)).tokens.tolist()) == {2, 5}


def test_a_row_does_not_see_its_neighbours_parameters() -> None:
    """Each row of a batch of all kinds equals the row alone."""
    generator = np.random.default_rng(0)
    logits = 2 * torch.randn(40, 300, generator=torch.Generator().manual_seed(1))
    temperature = generator.choice([0, 0.5, 1.0, 3.0], 40).astype(np.float32)
    top_p = generator.choice([1.0, 0.9, 0.2], 40).astype(np.float32)
    top_k = generator.choice([0, 1, 20, 299, 10_000], 40).astype(np.int64)
    position = generator.integers(0, 100, 40)
    together = sample(
        logits.clone(), make_rows(40, temperature=temperature, top_p=top_p, top_k=top_k, position=position)
    )
    for i in range(40):
        alone = make_rows(
            1,
            temperature=temperature[i : i + 1],
            top_p=top_p[i : i + 1],
            top_k=top_k[i : i + 1],
            position=position[i : i + 1],
            seed=np.array([i], np.uint64),
        )
        assert sample(logits[i : i + 1].clone(), alone).tokens.item() == together.tokens[i].item()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_nan_fails_alone(temperature: float) -> None:
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(0))
    whole = sample(logits.clone(), make_rows(3, temperature=np.full(3, temperature, np.float32)))
    logits[1, 4] = torch.nan
    result = sample(logits, make_rows(3, temperature=np.full(3, temperature, np.float32)))
    assert result.failed.tolist() == [False, True, False]
    assert result.tokens[[0, 2]].tolist() == whole.tokens[[0, 2]].tolist()


def test_seeded_tokens_are_the_same_alone_in_a_crowd_and_after_a_resume(
    reference: Callable[[str], Reference], build: Callable[..., BuiltWorker]
) -> None:
    folder = reference("llama-tied").folder
    prompt = list(range(10, 40))
    mine = SamplingParams(temperature=1.3, top_p=0.95, top_k=50, seed=2**63 + 5, max_tokens=20)

    alone = Driver(build(folder).runner)
    expected = alone.add(prompt, 20, mine)
    alone.run()
    assert len(set(expected.output)) > 8

    crowd = Driver(build(folder).runner, chunk_tokens=11)
    others = [
        crowd.add(
            list(range(i, i + 3 * i + 2)), 25, SamplingParams(temperature=i % 3, top_p=0.8, seed=i, max_tokens=25)
        )
        for i in range(31)
    ]
    crowd.run_step()
    together = crowd.add(prompt, 20, mine)
    crowd.run()
    assert together.output == expected.output
    assert all(len(s.output) == 25 for s in others)

    resumed = alone.add(prompt, 20, mine, output=expected.output[:9])
    alone.run()
    assert resumed.output == expected.output


@pytest.mark.parametrize(("ignore_eos", "extra"), [(False, []), (True, []), (False, [VOCAB - 1])])
def test_min_tokens_in_the_runner(
    ignore_eos: bool, extra: list[int], reference: Callable[[str], Reference], build: Callable[..., BuiltWorker]
) -> None:
    """The first greedy token of an undisturbed run is a stop token here: it must not come before min_tokens."""
    checkpoint = reference("qwen2")
    prompt = list(range(30))
    plain = checkpoint.greedy(prompt, 12)
    driver = Driver(build(checkpoint.folder).runner)
    sampling = SamplingParams(
        top_p=1, max_tokens=12, min_tokens=6, ignore_eos=ignore_eos, stop_token_ids=[plain[0], *extra]
    )
    sequence = driver.add(prompt, 12, sampling)
    driver.run()
    assert plain[0] not in sequence.output[:6]
    assert sequence.output[0] != plain[0]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_bans_eos_and_stop_tokens(ignore_eos: bool) -> None:
    """As in vLLM, EOS tokens are banned also with `ignore_eos`, where they end nothing."""
    table = SlotBuffers(SlotLimits(4, 64, 64, 16, 1, 1000, (7, 9)))
    sampling = SamplingParams(top_p=1, max_tokens=8, min_tokens=3, ignore_eos=ignore_eos, stop_token_ids=[30])
    sequence = NewSequence(slot=2, token_ids=np.array([1, 2], "<i4").tobytes(), num_prompt_tokens=2, sampling=sampling)
    sequence.block_table = np.array([1], "<i4").tobytes()
    plan = StepPlan(step=1, new_sequences=[sequence])
    plan.prefill_slots, plan.prefill_tokens = (np.array([n], "<i4").tobytes() for n in (2, 2))
    assert sorted(table.sampling_rows(table.apply(plan)).banned_tokens.tolist()) == [7, 9, 30]


def test_nan_logits_fail_the_row_and_not_the_step(
    reference: Callable[[str], Reference], build: Callable[..., BuiltWorker]
) -> None:
    checkpoint = reference("llama-tied")
    runner = build(checkpoint.folder).runner
    driver = Driver(runner)
    good, bad = driver.add([1, 2, 3], 8), driver.add([4, 5, 6], 8)
    driver.run_step()
    # What a broken kernel or a flipped bit would leave behind.
    attention = runner._attention
    attention._slots[0][1][bad.blocks[0] * 16] = torch.nan  # type: ignore[attr-defined]
    result = driver.run_step()
    assert [error.slot for error in result.errors] == [bad.slot]
    assert np.frombuffer(result.token_ids, "<i4").tolist()[1] == -1
    driver.free(bad)
    driver.free_blocks.extend(driver.free_blocks[:1])
    del driver.free_blocks[0]
    # Another sequence gets the block and fills only a part of it. The NaN of the old KV must not reach that sequence.
    heir = driver.add([7, 8], 8)
    assert heir.blocks == bad.blocks
    driver.run()
    assert good.output == checkpoint.greedy([1, 2, 3], 8)
    assert heir.output == checkpoint.greedy([7, 8], 8)


def test_log_probabilities_are_those_of_the_model_itself() -> None:
    """Before temperature, filters and bans, and only for the rows that ask. Equal values are ordered by id."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    logits[3] = 0.0
    rows = make_rows(
        4,
        temperature=np.array([0, 0.5, 2, 0], np.float32),
        top_k=np.array([0, 1, 3, 0]),
        banned_rows=np.array([0]),
        banned_tokens=logits[0].argmax().numpy()[None],
        scored=np.array([0, 2, 3]),
        num_top=np.array([2, 0, 5]),
    )
    result = sample(logits.clone(), rows)
    expected = logits.log_softmax(-1)[[0, 2, 3]]
    assert result.scores is not None
    torch.testing.assert_close(result.scores.sampled, expected.gather(1, result.tokens[[0, 2, 3], None]).squeeze(-1))
    torch.testing.assert_close(result.scores.top[:2], expected.topk(5).values[:2])
    assert result.scores.top_tokens[0].tolist() == expected[0].topk(5).indices.tolist()
    assert result.tokens[0] == expected[0].topk(2).indices[1], "the likeliest was banned"
    assert result.scores.top_tokens[2].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("vocab", [1, 7, 1000, 40_000])
def test_equally_likely_tokens_are_reported_by_lower_id_in_any_batch(vocab: int) -> None:
    """bf16 has few values, so many tokens are equal. +0 and -0 are equal too."""
    generator = torch.Generator().manual_seed(vocab)
    logprobs = torch.randn(64, vocab, generator=generator).mul(3).bfloat16().float()
    logprobs[:8] = -torch.inf
    logprobs[8:16] = torch.tensor([0.0, -0.0]).repeat(vocab)[:vocab]
    logprobs[15, vocab // 2] = 1e-45  # the smallest number above the zeros of this row
    order = logprobs.double().sort(dim=-1, descending=True, stable=True)
    for count in (1, 2, 5, 20):
        ids, values = likeliest(logprobs, count)
        assert torch.equal(ids, order.indices[:, :count])
        assert torch.equal(values, order.values[:, :count].float())


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16], ids=["torch", "float32", "bfloat16"])
@pytest.mark.parametrize("vocab", [1, 2, 511, 512, 1000, 40_000])
def test_greedy_takes_the_first_of_the_largest_logits(vocab: int, dtype: torch.dtype | None) -> None:
    """dtype: with the kernel for this type; None: with torch."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(40, vocab, generator=generator).mul(3).bfloat16().float()  # with many equal logits
    logits[0] = -torch.inf
    logits[1, [0, vocab - 1, vocab // 2]] = 99.0
    logits[2, [vocab - 1, vocab // 2]] = 99.0
    logits[3, vocab - 1] = 99.0
    logits[4, vocab // 3] = logits[5, vocab - 1] = torch.nan
    logits[6, vocab // 2] = torch.inf
    logits[7], logits[7, 0] = -torch.inf, -1e30
    logits[8] = -0.0
    logits[8, vocab // 2] = 0.0  # equal
    logits[9, vocab - 1] = -torch.nan
    logits[10] = -1 - logits[10].abs()
    largest = None if dtype is None else partial(largest_logits, ready_kernels(dtype, 2))
    if dtype is not None:
        logits = logits.to(dtype)
    sampled = sample(logits.clone(), make_rows(40, temperature=np.zeros(40, np.float32)), largest=largest)
    logits = logits.float()
    fails = [row in (0, 4, 5, 6, 9) for row in range(40)]
    assert sampled.failed.tolist() == fails
    expected = [0 if fails[row] else int(logits[row].numpy().argmax()) for row in range(40)]
    assert sampled.tokens.tolist() == expected


def test_a_result_carries_log_probabilities_for_the_sequences_that_want_them(
    reference: Callable[[str], Reference], build: Callable[..., BuiltWorker]
) -> None:
    driver = Driver(build(reference("qwen2").folder).runner)
    for i in range(3):
        sampling = SamplingParams(top_p=1.0, max_tokens=3, logprobs=i != 1, num_top_logprobs=2 * i)
        driver.add([5 + i, 6, 7], 3, sampling)
    results = [driver.run_step() for _ in range(2)]
    for result in results:
        assert [item.slot for item in result.logprobs] == [0, 2]
        assert [len(item.top_token_ids) // 4 for item in result.logprobs] == [0, 4]
        tokens = np.frombuffer(result.token_ids, "<i4")
        best = result.logprobs[1]
        assert np.frombuffer(best.top_token_ids, "<i4")[0] == tokens[2], "greedy"
        assert np.frombuffer(best.top_logprobs, "<f4")[0] == best.logprob < 0
