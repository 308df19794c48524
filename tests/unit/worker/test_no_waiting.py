"""Sampling, prompt scoring and pooling never make the host wait for the device. The tests need no GPU (see
no_wait.py)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_worker.device import upload
from gpu_worker.models.embedding import EmbeddingConfig, PoolingKind
from gpu_worker.sampling import filters, sampler
from gpu_worker.sampling.grammars import Grammars
from gpu_worker.sampling.logits_processors import LogitsProcessors
from gpu_worker.sampling.prompt_scores import ScoredChunk, score_prompts
from gpu_worker.sampling.sampler import sample
from gpu_worker.steps.pooling import Pooler
from gpu_worker.steps.rows import StepRows
from paceline.v1.common_pb2 import SamplingParams
from paceline.v1.worker_pb2 import NewSequence, StepPlan
from tests.support.late_device.device import HostWaits
from tests.unit.worker.driver import pack
from tests.unit.worker.no_wait import DEVICE, MISTAKES, NoWaiting
from tests.unit.worker.test_logits_processors import start
from tests.unit.worker.test_sampling import make_rows

VOCAB = 700
ROWS = 6
PER_ROW = {
    "temperature": np.array([0, 1, 0.5, 1, 1, 2], np.float32),
    "top_p": np.array([1, 0.9, 0.1, 1, 0.999, 0.5], np.float32),
    "top_k": np.array([0, 0, 5, 300, VOCAB, 2]),
    "min_p": np.array([0, 0.1, 0, 0, 0.5, 0.2], np.float32),
    "typical_p": np.array([1, 0.9, 1, 0.3, 1, 0.5], np.float32),
}
BANS = {"banned_rows": np.array([0, 0, 4]), "banned_tokens": np.array([3, 4, 3])}
SCORES = {"scored": np.array([1, 5]), "num_top": np.array([0, 20])}
ASKED = {
    "penalties": SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2),
    "bias": SamplingParams(logit_bias={3: 2.0, 5: -1.0}),
    "bad_words": SamplingParams(bad_words=[pack([4]), pack([5, 6, 7])]),
    "allowed": SamplingParams(allowed_token_ids=pack(range(100))),
}


def rows_asking(names: tuple[str, ...], everyone: bool) -> dict[str, np.ndarray]:
    """`everyone`: every row uses each filter, so the sampler selects no rows. Otherwise only some rows use a filter."""
    values = {name: PER_ROW[name] for name in names}
    return {name: np.repeat(value[-1:], ROWS) for name, value in values.items()} if everyone else values


@pytest.mark.parametrize("everyone", [False, True])
@pytest.mark.parametrize("others", [{}, BANS, SCORES, BANS | SCORES])
def test_no_combination_of_filters_waits_for_the_device(everyone: bool, others: dict[str, np.ndarray]) -> None:
    for count in range(len(PER_ROW) + 1):
        for names in itertools.combinations(PER_ROW, count):
            rows = make_rows(ROWS, **rows_asking(names, everyone), **others)
            with NoWaiting():
                sampled = sample(torch.zeros(ROWS, VOCAB, dtype=torch.bfloat16, device=DEVICE), rows)
            assert sampled.tokens.device == DEVICE
            assert sampled.tokens.shape == (ROWS,)


@pytest.mark.parametrize("names", [n for count in (1, 2, 4) for n in itertools.combinations(ASKED, count)])
def test_no_combination_of_logits_processors_waits_for_the_device(names: tuple[str, ...]) -> None:
    """From the start of a slot until the sampled tokens are recorded. Some rows of the batch use no processor."""
    sampling = SamplingParams()
    for name in names:
        sampling.MergeFrom(ASKED[name])
    with NoWaiting():
        processors = LogitsProcessors(VOCAB, ROWS, DEVICE)
        start(processors, [2, 0], [[1, 2, 3, 4], [9]], [3, 1], [sampling, ASKED[names[0]]])
        for slots in ([0, 1, 2, 3, 4, 5], [2, 1, 0, 3, 4, 5]):
            batch = processors.of(np.array(slots, np.int32))
            assert batch is not None
            logits = torch.zeros(ROWS, VOCAB, device=DEVICE)
            sampled = sample(logits, make_rows(ROWS, **PER_ROW, **BANS, **SCORES), batch)
            batch.record(sampled.tokens)
            assert sampled.ruled_out is not None


def test_a_grammar_mask_does_not_wait_for_the_device() -> None:
    """Except for the previous token, which the host has to know."""
    grammars = Grammars(None, VOCAB, DEVICE)
    started = [NewSequence(slot=slot, sampling=SamplingParams(grammar="x")) for slot in (2, 5)]
    with NoWaiting():
        grammars.apply(StepPlan(new_sequences=started))
        asking = grammars.of(np.array([0, 5, 1, 2, 3, 4], np.int32))
        mask = grammars.mask(asking, lambda slot: np.array([7], np.int32))
        sampled = sample(torch.zeros(ROWS, VOCAB, device=DEVICE), make_rows(ROWS, **PER_ROW), None, mask)
    assert (asking, set(mask.refused)) == ([(1, 5), (3, 2)], {2, 5})
    assert sampled.ruled_out is not None


def test_scoring_a_prompt_does_not_wait_for_the_device() -> None:
    chunks = [ScoredChunk(0, 1, np.arange(5, dtype=np.int32), 3), ScoredChunk(4, 9, np.arange(4, dtype=np.int32), 0)]
    with NoWaiting():
        scores = score_prompts(torch.zeros(9, VOCAB, device=DEVICE), lambda hidden: hidden * 2, VOCAB, chunks, 9000)
    assert scores.top_tokens.shape == (9, 3)


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_pooling_does_not_wait_for_the_device(kind: PoolingKind) -> None:
    """Of three chunks, one begins its input, and two end theirs."""
    starts, counts = np.array([0, 4, 8], np.int32), np.array([4, 2, 3], np.int32)
    nothing = np.zeros(0, np.int32), np.zeros(0, np.int32)
    samples = np.array([False, True, True])
    slots = np.array([3, 0, 2], np.int64)
    rows = StepRows(slots, 0, starts, counts, samples, nothing[0], nothing, nothing, nothing)
    with NoWaiting():
        pooler = Pooler(EmbeddingConfig(kind, normalize=True), 8, 4, DEVICE)
        hidden = torch.zeros(9 if pooler.needs_all_rows else 2, 8, dtype=torch.bfloat16, device=DEVICE)
        pooled = pooler.pool(rows, np.full(4, 11, np.int32), hidden)
    assert pooled is not None
    assert (pooled.vectors.shape, pooled.slots.tolist()) == ((2, 8), [0, 2])


@pytest.mark.parametrize("name", MISTAKES)
def test_an_operation_that_waits_is_noticed(name: str) -> None:
    with NoWaiting(), pytest.raises(HostWaits):
        MISTAKES[name](torch.zeros(4, 5, device=DEVICE))


_mask_top_k = filters.mask_top_k


def _top_k_that_asks(logits: Tensor, top_k: Tensor, most: int) -> Tensor:
    return _mask_top_k(logits, top_k, int(top_k.max()))


def _upload_that_waits(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)


@pytest.mark.parametrize(
    ("module", "name", "mistake"),
    [
        (filters, "mask_top_k", _top_k_that_asks),
        (filters, "beyond_by_radix", filters.beyond_by_sorting),
        (sampler, "upload", _upload_that_waits),
    ],
)
def test_a_planted_mistake_is_noticed(
    module: object, name: str, mistake: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, mistake)
    with NoWaiting(), pytest.raises(HostWaits):
        sample(torch.zeros(ROWS, VOCAB, device=DEVICE), make_rows(ROWS, **PER_ROW))


def test_allowed_operations_are_not_refused() -> None:
    with NoWaiting():
        there = upload(np.arange(4), DEVICE)
        assert there.device == DEVICE
        torch.zeros(4, 5, device=DEVICE).masked_fill_(torch.zeros(4, 5, dtype=torch.bool, device=DEVICE), 0.0)
