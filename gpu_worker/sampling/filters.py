"""Temperature, top-k and top-p on rows of logits, in transformers' order and with its rules at ties."""

from __future__ import annotations

import torch
from torch import Tensor

# How many of the largest logits are looked at before a whole row is sorted for top-p.
TOP_P_CANDIDATES = 64


def apply_temperature(logits: Tensor, temperatures: Tensor) -> Tensor:
    """logits float32 [rows, vocab]; temperatures float32 [rows], above 0."""
    return logits / temperatures.unsqueeze(-1)


def mask_top_k(logits: Tensor, top_k: Tensor) -> Tensor:
    """Keep each row's top_k largest, and all that equal the last of them. top_k: int64 [rows], 1..vocab."""
    largest = logits.topk(int(top_k.max()), dim=-1).values
    threshold = largest.gather(1, (top_k - 1).unsqueeze(-1))
    return logits.masked_fill(logits < threshold, -torch.inf)


def mask_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Keep each row's most likely tokens up to the one that reaches top_p, and all that equal that one (so that a row's
    result does not hang on how a sort breaks ties). top_p: float32 [rows], 0..1."""
    total = logits.logsumexp(-1, keepdim=True)
    values = logits.topk(min(TOP_P_CANDIDATES, logits.shape[-1]), dim=-1).values
    threshold, reached = _top_p_threshold(values, total, top_p)
    if not bool(reached.all()):
        rest = (~reached).nonzero().squeeze(-1)
        values = logits[rest].sort(dim=-1, descending=True).values
        threshold[rest] = _top_p_threshold(values, total[rest], top_p[rest])[0]
    return logits.masked_fill(logits < threshold, -torch.inf)


def _top_p_threshold(values: Tensor, total: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The least kept value of each row [rows, 1], and whether top_p is reached within `values` (descending) [rows]."""
    cumulative = (values - total).exp().cumsum(-1)
    # A token belongs if the mass before it is less than top_p; the first one always does.
    last = (cumulative[:, :-1] < top_p.unsqueeze(-1)).sum(-1, keepdim=True)
    return values.gather(1, last), cumulative[:, -1] >= top_p


def draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse CDF over the vocabulary in id order: int64 [rows]. uniforms: float64 [rows] in (0, 1).

    The cumulative sum is float64: in float32 a row of 128k tokens would lose the small ones.
    """
    cumulative = (logits - logits.amax(-1, keepdim=True)).exp().cumsum(-1, dtype=torch.float64)
    target = uniforms.unsqueeze(-1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)
