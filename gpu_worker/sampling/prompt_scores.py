"""Log probabilities of prompt tokens: the probability of the next token at every position of a prefill chunk.

A scored chunk needs logits in every row, not only in the last one. So a scored prompt costs one row of the head per
token. The logits are computed for a slice of rows at a time, and only the reported part of a slice is kept: all logits
of 8,192 tokens would be 4 GiB at a vocabulary of 128k."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.device import fetch, upload
from gpu_worker.sampling.torch_sampling import LIKELIEST_BYTES, likeliest
from paceline.v1.common_pb2 import PromptLogprobs
from paceline.v1.worker_pb2 import SlotPromptLogprobs

Int64s = npt.NDArray[np.int64]

# The float32 logits of a slice.
SLICE_BYTES = 128 << 20
# The largest memory of scoring per logit: the model's logits, log probabilities, and the search for the likeliest.
SCORER_BYTES_PER_LOGIT = 4 + 4 + LIKELIEST_BYTES


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """The scored part of one prompt in a step."""

    slot: int
    start: int  # position of the first scored token
    tokens: npt.NDArray[np.int32]  # the scored tokens, in order
    num_top: int


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The rows of a step with logits that score prompt tokens, chunk after chunk."""

    rows: Int64s  # in the step
    chunks: Sequence[ScoredChunk]


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The scores of all chunks of a step, on their way to host memory."""

    chunks: Sequence[ScoredChunk]
    logprobs: Tensor  # float32 [rows]
    ranks: Tensor  # int64 [rows]
    top_tokens: Tensor  # int64 [rows, most of num_top]
    top_logprobs: Tensor  # float32, as top_tokens

    def by_chunk(self) -> Iterator[tuple[SlotPromptLogprobs, bool]]:
        """For each chunk its report, and whether none of its scores is NaN. Call this when the step is done."""
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
    """Compute the log probabilities of prompt tokens. Does not wait for the device.

    hidden: [scored tokens, hidden size]. head: computes their logits, of any float type."""
    targets = upload(np.concatenate([chunk.tokens for chunk in chunks]), hidden.device)
    num_top = max(chunk.num_top for chunk in chunks)
    rows = rows_at_once(vocab_size, slice_bytes)
    scores = [
        _score(head(part), wanted, num_top)
        for part, wanted in zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True)
    ]
    return PromptScores(chunks, *(fetch(torch.cat(column)) for column in zip(*scores, strict=True)))


def rows_at_once(vocab_size: int, slice_bytes: int = SLICE_BYTES) -> int:
    """The number of rows of a slice."""
    return max(1, slice_bytes // (4 * vocab_size))


def _score(logits: Tensor, targets: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logprobs = logits.float().log_softmax(-1)
    values = logprobs.gather(1, targets.unsqueeze(-1))
    ranks = (logprobs > values).sum(-1) + 1
    return values.squeeze(-1), ranks, *likeliest(logprobs, num_top)
