"""Penalties, bias, bans and allowed tokens, against transformers' processors: on logits, and in the runner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from gpu_worker.build import BuiltWorker
from gpu_worker.errors import ProtocolViolation
from gpu_worker.sampling.filters import mask_min_p, mask_typical_p
from gpu_worker.sampling.logits_processors import MAX_BAD_WORD_TOKENS, LogitsProcessors, RowPool
from gpu_worker.steps.results import INVALID_ARGUMENT, NO_NUMBER, NO_TOKEN
from paceline.v1.common_pb2 import SamplingParams
from paceline.v1.worker_pb2 import NewSequence, StepPlan
from tests.unit.worker.driver import Driver, pack
from tests.unit.worker.families import VOCAB, Reference

SMALL = 12  # so few tokens that they repeat


class OpenAiPenalties(LogitsProcessor):
    """transformers has no such processor. This is the formula of OpenAI's documentation."""

    def __init__(self, num_prompt: int, frequency: float, presence: float) -> None:
        self.num_prompt, self.frequency, self.presence = num_prompt, frequency, presence

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for row, ids in enumerate(input_ids[:, self.num_prompt :].tolist()):
            for token in set(ids):
                scores[row, token] -= ids.count(token) * self.frequency + self.presence
        return scores


def processors(sampling: SamplingParams, num_prompt: int) -> LogitsProcessorList:
    """The matching processors of transformers, in the order that Paceline documents."""
    made = LogitsProcessorList()
    if sampling.allowed_token_ids:
        allowed = np.frombuffer(sampling.allowed_token_ids, "<i4").tolist()
        made.append(PrefixConstrainedLogitsProcessor(lambda *_: allowed, 1))
    if sampling.bad_words:
        made.append(NoBadWordsLogitsProcessor([np.frombuffer(word, "<i4").tolist() for word in sampling.bad_words]))
    if sampling.logit_bias:
        made.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in sampling.logit_bias.items()}))
    if sampling.repetition_penalty:
        made.append(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
    made.append(OpenAiPenalties(num_prompt, sampling.frequency_penalty, sampling.presence_penalty))
    return made


def any_sampling(vocab: int) -> st.SearchStrategy[SamplingParams]:
    token = st.integers(0, vocab - 1)
    return st.builds(
        SamplingParams,
        allowed_token_ids=st.one_of(st.just(b""), st.lists(token, min_size=vocab // 2).map(pack)),
        bad_words=st.lists(st.lists(token, min_size=1, max_size=3).map(pack), max_size=3, unique=True),
        logit_bias=st.dictionaries(token, st.floats(-5, 5, width=32), max_size=3),
        repetition_penalty=st.sampled_from([0, 1, 0.5, 1.3, 4]),
        frequency_penalty=st.sampled_from([0, -1.5, 0.25, 2]),
        presence_penalty=st.sampled_from([0, -2, 0.5, 1.5]),
    )


def start(
    logits_processors: LogitsProcessors,
    slots: Sequence[int],
    tokens: Sequence[Sequence[int]],
    num_prompt: Sequence[int],
    sampling: Sequence[SamplingParams],
) -> None:
    each = zip(slots, tokens, num_prompt, sampling, strict=True)
    logits_processors.apply(
        StepPlan(
            new_sequences=[
                NewSequence(slot=slot, token_ids=pack(ids), num_prompt_tokens=prompt, sampling=asked)
                for slot, ids, prompt, asked in each
            ]
        )
    )


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_logits_processors_match_transformers_step_after_step(data: st.DataObject) -> None:
    """A batch of rows with different parameters and prompts of any length, while tokens are sampled.

    Some sequences are resumed with earlier output, and one sequence leaves its slot to another.
    """
    token = st.integers(0, SMALL - 1)
    sampling = data.draw(st.lists(any_sampling(SMALL), min_size=1, max_size=4))
    count = len(sampling)
    slots = data.draw(st.permutations(range(6)))[:count]
    tokens = [data.draw(st.lists(token, min_size=1, max_size=6)) for _ in range(count)]
    num_prompt = [data.draw(st.integers(1, len(ids))) for ids in tokens]
    logits_processors = LogitsProcessors(SMALL, 6, torch.device("cpu"))
    start(logits_processors, slots, tokens, num_prompt, sampling)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    for step in range(4):
        order = data.draw(st.permutations(range(count)))
        logits = 3 * torch.randn(count, SMALL, generator=generator)
        batch = logits_processors.of(np.array([slots[i] for i in order], np.int32))
        ours = logits.clone()
        if batch is not None:
            batch.apply(ours)
        for row, i in enumerate(order):
            theirs = processors(sampling[i], num_prompt[i])(torch.tensor([tokens[i]]), logits[row : row + 1].clone())
            torch.testing.assert_close(ours[row : row + 1], theirs)
        sampled = [data.draw(token) for _ in order]
        if batch is not None:
            batch.record(torch.tensor(sampled))
        for i, new in zip(order, sampled, strict=True):
            tokens[i] = [*tokens[i], new]
        if step == 1:
            logits_processors.apply(StepPlan(free_slots=pack(slots[:1])))
            tokens[0], num_prompt[0], sampling[0] = [3, 4, 3], 2, data.draw(any_sampling(SMALL))
            start(logits_processors, slots[:1], tokens[:1], num_prompt[:1], sampling[:1])


@given(
    seed=st.integers(0, 10_000),
    vocab=st.sampled_from([5, 50, 1000]),
    spread=st.sampled_from([0.1, 1.0, 5.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]),
    typical_p=st.sampled_from([0.01, 0.2, 0.5, 0.9, 0.99]),
    top_k=st.sampled_from([0, 3, 5]),
)
@settings(max_examples=100, deadline=None)
def test_min_p_and_typical_p_are_those_of_transformers(
    seed: int, vocab: int, spread: float, min_p: float, typical_p: float, top_k: int
) -> None:
    logits = spread * torch.randn(3, vocab, generator=torch.Generator().manual_seed(seed))
    logits[0, :2] = logits[0, 2]
    if top_k:
        logits = TopKLogitsWarper(top_k)(torch.zeros(3, 1, dtype=torch.int64), logits)
    ids = torch.zeros(3, 1, dtype=torch.int64)
    assert torch.equal(mask_min_p(logits, torch.full((3,), min_p)), MinPLogitsWarper(min_p)(ids, logits.clone()))
    ours = mask_typical_p(logits, torch.full((3,), typical_p))
    assert torch.equal(ours, TypicalLogitsWarper(typical_p)(ids, logits.clone()))


def test_all_processors_together_sample_from_the_tokens_of_transformers(
    reference: Callable[[str], Reference], build: Callable[..., BuiltWorker]
) -> None:
    """On the logits of a model: each sampled token must be one that transformers keeps, with the processors in our
    order."""
    checkpoint = reference("qwen2")
    prompt = list(range(20, 50))
    sampling = SamplingParams(
        temperature=0.8, top_p=0.9, top_k=20, min_p=0.05, typical_p=0.8, seed=11, max_tokens=24,
        repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3, logit_bias={7: 2.0, 8: -3.0},
        bad_words=[pack([9]), pack([10, 11])],
    )  # fmt: skip
    driver = Driver(build(checkpoint.folder).runner)
    sequence = driver.add(prompt, 24, sampling)
    driver.run()
    theirs = processors(sampling, len(prompt))
    for warper in (
        TemperatureLogitsWarper(0.8),
        MinPLogitsWarper(0.05),
        TopKLogitsWarper(20),
        TopPLogitsWarper(0.9),
        TypicalLogitsWarper(0.8),
    ):
        theirs.append(warper)
    ids = torch.tensor([sequence.tokens])
    with torch.no_grad():
        logits = checkpoint.model(ids).logits[0]
    kept = 0
    for i in range(len(prompt), len(sequence.tokens)):
        scores = theirs(ids[:, :i], logits[i - 1 : i].clone())
        assert scores[0, sequence.tokens[i]] > -torch.inf, f"token {i}"
        kept += int((scores > -torch.inf).sum())
    assert kept > 2 * 24, "there was a choice"


ASKED = {
    "repetition": SamplingParams(top_p=1, max_tokens=30, repetition_penalty=1.5),
    "openai": SamplingParams(top_p=1, max_tokens=30, frequency_penalty=0.7, presence_penalty=1.1),
    "negative": SamplingParams(top_p=1, max_tokens=30, frequency_penalty=-0.7, repetition_penalty=0.8),
    "bias": SamplingParams(top_p=1, max_tokens=30, logit_bias={3: 8.0, 50: -100.0, 71: 6.5}, repetition_penalty=1.1),
    "allowed": SamplingParams(top_p=1, max_tokens=30, allowed_token_ids=pack(range(40, 90, 3)), presence_penalty=2),
}


def generate(checkpoint: Reference, prompt: list[int], sampling: SamplingParams) -> list[int]:
    ids = torch.tensor([prompt])
    out = checkpoint.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=sampling.max_tokens,
        do_sample=False,
        logits_processor=processors(sampling, len(prompt)),
    )
    return out[0, len(prompt) :].tolist()


def test_greedy_with_each_processor_equals_transformers(
    reference: Callable[[str], Reference], build: Callable[..., BuiltWorker]
) -> None:
    """All parameters in one batch, beside requests without parameters; prefilled in chunks, resumed in the middle."""
    checkpoint = reference("llama-tied")
    prompt = [5, 6, 7, 8] * 6 + [5, 6]
    plain = checkpoint.greedy(prompt, 30)
    asked = dict(ASKED)
    # Parts of the output without a ban: a token, a pair and a triple; and a triple that begins in the prompt.
    words = [[plain[2]], plain[4:6], plain[7:10], [*prompt[-2:], plain[0]]]
    asked["bad words"] = SamplingParams(top_p=1, max_tokens=30, bad_words=[pack(word) for word in words])
    expected = {name: generate(checkpoint, prompt, sampling) for name, sampling in asked.items()}
    assert all(tokens != plain for tokens in expected.values())

    driver = Driver(build(checkpoint.folder).runner, chunk_tokens=7)
    free = [driver.add(prompt, 30) for _ in range(2)]
    running = {name: driver.add(prompt, 30, sampling) for name, sampling in asked.items()}
    driver.run()
    assert {name: sequence.output for name, sequence in running.items()} == expected
    assert [sequence.output for sequence in free] == [plain] * 2

    resumed = {name: driver.add(prompt, 30, asked[name], output=expected[name][:13]) for name in asked}
    driver.run()
    assert {name: sequence.output for name, sequence in resumed.items()} == expected


def test_seeded_and_penalised_tokens_are_the_same_in_every_batch(
    reference: Callable[[str], Reference], build: Callable[..., BuiltWorker]
) -> None:
    folder = reference("qwen2").folder
    prompt = list(range(10, 40))
    mine = SamplingParams(
        temperature=1.2, top_p=0.95, min_p=0.02, typical_p=0.9, seed=77, max_tokens=25, repetition_penalty=1.3,
        frequency_penalty=0.5, bad_words=[pack([12, 13]), pack([14])], logit_bias={20: 3.0},
    )  # fmt: skip
    alone = Driver(build(folder).runner)
    expected = alone.add(prompt, 25, mine)
    alone.run()
    crowd = Driver(build(folder).runner, chunk_tokens=9)
    for i in range(20):
        other = SamplingParams(temperature=i % 2, top_p=1, seed=i, max_tokens=40, repetition_penalty=1 + i % 3)
        crowd.add(list(range(i + 1)), 5 + 2 * i, other)
    crowd.run_step()
    together = crowd.add(prompt, 25, mine)
    crowd.run()
    assert together.output == expected.output
    resumed = crowd.add(prompt, 25, mine, output=expected.output[:11])
    crowd.run()
    assert resumed.output == expected.output


def test_a_row_without_any_token_left_fails_alone_and_says_why(
    reference: Callable[[str], Reference], build: Callable[..., BuiltWorker]
) -> None:
    checkpoint = reference("qwen2")
    for temperature in (0.0, 1.0):
        driver = Driver(build(checkpoint.folder).runner)
        good = driver.add([1, 2, 3], 4)
        both: dict[str, Any] = {"allowed_token_ids": pack([4, 5]), "bad_words": [pack([4]), pack([5])]}
        nothing = SamplingParams(temperature=temperature, top_p=1, max_tokens=4, **both)
        bad = driver.add([1, 2, 3], 4, nothing)
        result = driver.run_step()
        assert [(e.slot, e.message, e.code) for e in result.errors] == [(bad.slot, NO_TOKEN, INVALID_ARGUMENT)]
        assert np.frombuffer(result.token_ids, "<i4").tolist() == [checkpoint.greedy([1, 2, 3], 4)[0], -1]
        assert good.output


def test_nan_that_a_ban_would_hide_fails_the_row(
    reference: Callable[[str], Reference], build: Callable[..., BuiltWorker]
) -> None:
    runner = build(reference("qwen2").folder).runner
    head = runner._decoder._weights.head
    assert isinstance(head, torch.Tensor)
    driver = Driver(runner)
    asked = SamplingParams(top_p=1, max_tokens=4, allowed_token_ids=pack([4, 5]))
    driver.add([1, 2, 3], 4, asked)
    head[:, 9] = torch.nan
    result = driver.run_step()
    assert [error.message for error in result.errors] == [NO_NUMBER]


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"allowed_token_ids": pack([VOCAB])}, "allowed_token_ids"),
        ({"allowed_token_ids": pack([-1])}, "allowed_token_ids"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"bad_words": [pack([1, -1, 2])]}, "bad_words"),
        ({"bad_words": [pack([VOCAB, 1])]}, "bad_words"),
        ({"bad_words": [b""]}, "bad_words"),
        ({"bad_words": [pack([1] * (MAX_BAD_WORD_TOKENS + 1))]}, "bad_words"),
    ],
)
def test_tokens_outside_the_vocabulary_reach_no_kernel(wrong: dict, name: str) -> None:
    logits_processors = LogitsProcessors(VOCAB, 3, torch.device("cpu"))
    with pytest.raises(ProtocolViolation, match=name):
        start(logits_processors, [0], [[1, 2]], [2], [SamplingParams(**wrong)])


def test_a_row_that_asks_for_nothing_costs_nothing() -> None:
    logits_processors = LogitsProcessors(VOCAB, 3, torch.device("cpu"))
    start(logits_processors, [0, 1], [[1], [2]], [1, 1], [SamplingParams(temperature=1, min_p=0.5), SamplingParams()])
    assert logits_processors.of(np.array([0, 1], np.int32)) is None
    start(logits_processors, [2], [[1]], [1], [SamplingParams(repetition_penalty=1.2)])
    assert logits_processors.of(np.array([0, 1], np.int32)) is None
    assert logits_processors.of(np.array([2, 1], np.int32)) is not None
    logits_processors.apply(StepPlan(free_slots=pack([2, 0])))
    assert logits_processors.of(np.array([2, 1], np.int32)) is None


def test_a_pool_never_has_more_rows_than_slots() -> None:
    """The worker reserves memory for one row per slot, and for the old tensor while the pool grows."""
    pool = RowPool(6, 2, torch.device("cpu"))
    for slot in range(6):
        pool.take(slot).fill_(slot)
        assert len(pool.tensor) <= 6
    assert pool.tensor[pool.rows(range(6))].tolist() == [[slot, slot] for slot in range(6)]
