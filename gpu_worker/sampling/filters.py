"""Temperature and the filters (min-p, top-k, top-p, typical) on rows of logits, with transformers' rules at ties."""

from __future__ import annotations

import torch
from torch import Tensor

# How many of the largest logits are looked at before a whole row is sorted for top-p.
TOP_P_CANDIDATES = 64


def apply_temperature(logits: Tensor, temperatures: Tensor) -> Tensor:
    """logits float32 [rows, vocab]; temperatures float32 [rows], above 0."""
    return logits / temperatures.unsqueeze(-1)


def mask_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Keep what is at least min_p times as likely as the row's most likely token. min_p: float32 [rows], 0..1."""
    likely = logits.softmax(-1)
    threshold = min_p.unsqueeze(-1) * likely.amax(-1, keepdim=True)
    return logits.masked_fill(likely < threshold, -torch.inf)


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


def mask_typical_p(logits: Tensor, typical_p: Tensor) -> Tensor:
    """Locally typical sampling (Meister et al. 2022): keep the tokens whose surprise is nearest to the row's entropy,
    up to the one that reaches typical_p, and all that are as near. typical_p: float32 [rows], above 0 and below 1."""
    surprise = -logits.log_softmax(-1)
    likely = (-surprise).exp()
    # What a filter before has taken out has no surprise to speak of: 0 times infinity.
    entropy = (surprise * likely).nansum(-1, keepdim=True)
    distance = (surprise - entropy).abs()
    ordered, order = distance.sort(dim=-1)
    cumulative = logits.gather(-1, order).softmax(-1).cumsum(-1)
    last = (cumulative < typical_p.unsqueeze(-1)).sum(-1, keepdim=True).clamp_(max=logits.shape[-1] - 1)
    return logits.masked_fill(distance > ordered.gather(-1, last), -torch.inf)


def draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse CDF over the vocabulary in id order: int64 [rows]. uniforms: float64 [rows] in (0, 1).

    The cumulative sum is float64: in float32 a row of 128k tokens would lose the small ones.
    """
    cumulative = (logits - logits.amax(-1, keepdim=True)).exp().cumsum(-1, dtype=torch.float64)
    target = uniforms.unsqueeze(-1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)
