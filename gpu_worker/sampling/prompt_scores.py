"""Log probabilities of prompt tokens: what the model gave the token that comes next, at every place of a prefill chunk.

The logits of such a chunk are needed in every row, not in the last alone, so a prompt that is to be scored costs as
many rows of the head as it has tokens. They are computed a slice of rows at a time, and what is reported is all that is
kept of a slice: all logits of 8,192 tokens would be 4 GiB at a vocabulary of 128k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.device import fetch, upload
from gpu_worker.sampling.sampler import LIKELIEST_BYTES, likeliest
from paceline.v1.common_pb2 import PromptLogprobs
from paceline.v1.worker_pb2 import SlotPromptLogprobs

Int64s = npt.NDArray[np.int64]

# Logits of a slice, in float32.
SLICE_BYTES = 128 << 20
# What scoring takes for each of them at the most: as the model has them, log probabilities, and to find the likeliest.
SCORER_BYTES_PER_LOGIT = 4 + 4 + LIKELIEST_BYTES


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """What a step computes of one prompt that is to be scored."""

    slot: int
    start: int  # position of the first token that is scored
    tokens: npt.NDArray[np.int32]  # those that are scored, in order
    num_top: int


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of a step whose logits score prompt tokens, chunk after chunk."""

    rows: Int64s  # in the step
    chunks: Sequence[ScoredChunk]


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Of the rows of all chunks of a step, on its way to host memory."""

    chunks: Sequence[ScoredChunk]
    logprobs: Tensor  # float32 [rows]
    ranks: Tensor  # int64 [rows]
    top_tokens: Tensor  # int64 [rows, most of num_top]
    top_logprobs: Tensor  # float32, as top_tokens

    def by_chunk(self) -> Iterator[tuple[SlotPromptLogprobs, bool]]:
        """Of each chunk what is reported, and whether it is numbers. To be asked when the step is done."""
        end = 0
        for chunk in self.chunks:
            rows = slice(end, end := end + len(chunk.tokens))
            logprobs = self.logprobs[rows].numpy()
            shown = PromptLogprobs(
                start=chunk.start,
                logprobs=logprobs.astype("<f4").tobytes(),
                ranks=self.ranks[rows].numpy().astype("<i4").tobytes(),
                top_token_ids=self.top_tokens[rows, : chunk.num_top].numpy().astype("<i4").tobytes(),
                top_logprobs=self.top_logprobs[rows, : chunk.num_top].numpy().astype("<f4").tobytes(),
            )
            yield SlotPromptLogprobs(slot=chunk.slot, logprobs=shown), not bool(np.isnan(logprobs).any())


def score_prompts(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    vocab_size: int,
    chunks: Sequence[ScoredChunk],
    slice_bytes: int = SLICE_BYTES,
) -> PromptScores:
    """hidden: [scored tokens, hidden size]; head: their logits, any float type. Nothing here waits for the device."""
    targets = upload(np.concatenate([chunk.tokens for chunk in chunks]), hidden.device)
    num_top = max(chunk.num_top for chunk in chunks)
    rows = rows_at_once(vocab_size, slice_bytes)
    scores = [
        _score(head(part), wanted, num_top)
        for part, wanted in zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True)
    ]
    return PromptScores(chunks, *(fetch(torch.cat(column)) for column in zip(*scores, strict=True)))


def rows_at_once(vocab_size: int, slice_bytes: int = SLICE_BYTES) -> int:
    """Rows of a slice."""
    return max(1, slice_bytes // (4 * vocab_size))


def _score(logits: Tensor, targets: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logprobs = logits.float().log_softmax(-1)
    values = logprobs.gather(1, targets.unsqueeze(-1))
    ranks = (logprobs > values).sum(-1) + 1
    return values.squeeze(-1), ranks, *likeliest(logprobs, num_top)
