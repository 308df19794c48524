"""Log probabilities of prompt tokens: what the model gave the token that comes next, at every place of a prefill chunk.

The logits of such a chunk are needed in every row, not in the last alone, so a prompt that is to be scored costs as
many rows of the head as it has tokens, a chunk at a time. They are turned into log probabilities some rows at a time: a
float32 row of a large vocabulary takes half a megabyte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.sampling.sampler import likeliest
from paceline.v1.common_pb2 import PromptLogprobs
from paceline.v1.worker_pb2 import SlotPromptLogprobs

Int64s = npt.NDArray[np.int64]

_ROWS_AT_ONCE = 256


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


def score_chunks(logits: Tensor, chunks: Sequence[ScoredChunk]) -> Iterator[tuple[SlotPromptLogprobs, bool]]:
    """Of each chunk the log probabilities, and whether they are numbers. logits: [scored tokens, vocab], any float."""
    parts = torch.split(logits, [len(chunk.tokens) for chunk in chunks])
    for chunk, part in zip(chunks, parts, strict=True):
        targets = torch.from_numpy(chunk.tokens.astype(np.int64)).to(logits.device)
        pieces = zip(torch.split(part, _ROWS_AT_ONCE), torch.split(targets, _ROWS_AT_ONCE), strict=True)
        scores = [_score(piece, target, chunk.num_top) for piece, target in pieces]
        values, ranks, top_ids, top_values = (torch.cat(column).cpu().numpy() for column in zip(*scores, strict=True))
        shown = PromptLogprobs(
            start=chunk.start,
            logprobs=values.astype("<f4").tobytes(),
            ranks=ranks.astype("<i4").tobytes(),
            top_token_ids=top_ids.astype("<i4").tobytes(),
            top_logprobs=top_values.astype("<f4").tobytes(),
        )
        yield SlotPromptLogprobs(slot=chunk.slot, logprobs=shown), not bool(np.isnan(values).any())


def _score(logits: Tensor, targets: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logprobs = logits.float().log_softmax(-1)
    values = logprobs.gather(1, targets.unsqueeze(-1))
    ranks = (logprobs > values).sum(-1) + 1
    return values.squeeze(-1), ranks, *likeliest(logprobs, num_top)
