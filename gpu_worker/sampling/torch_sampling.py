"""Random draws and log probabilities with torch's own kernels: on a CPU, and on a GPU for what the kernels of
fused_kernels.py lack. They are also the reference for these kernels."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.device import upload
from gpu_worker.sampling.filters import FILTERS, Column, Filter, apply_temperature
from gpu_worker.sampling.gumbel import draw
from paceline.request_fields import FILTER_NAMES

# Memory per logit for likeliest(): the bits, a copy of them, a key, and a copy of the keys in topk.
LIKELIEST_BYTES = 4 + 4 + 8 + 8


def draw_filtered(logits: Tensor, columns: Mapping[str, Column], keys: npt.NDArray[np.int32]) -> Tensor:
    """The drawn tokens, int64 [rows].

    logits: float32 [rows, vocab], finite or -inf. columns: the temperature, above 0, and the filters' parameters by
    name. A filter that no row needs may be missing. keys: draw_keys()."""
    logits = apply_temperature(logits, upload(columns["temperature"], logits.device))
    for name in FILTER_NAMES:
        if name in columns:
            logits = _filter(logits, FILTERS[name], columns[name])
    return draw(logits, upload(keys, logits.device))


def _filter(logits: Tensor, filter_: Filter, column: Column) -> Tensor:
    """Apply the filter to the rows that need it."""
    needs = filter_.needs(column, logits.shape[-1])
    if not needs.any():
        return logits
    rows = np.flatnonzero(needs)
    on_host = column[rows]
    values = upload(on_host, logits.device)
    if len(rows) == len(logits):
        return filter_.mask(logits, values, on_host)
    where = upload(rows, logits.device)
    return logits.index_copy(0, where, filter_.mask(logits.index_select(0, where), values, on_host))


def score(logprobs: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """The log probability of each row's token, float32 [rows], and the ids and log probabilities of its num_top most
    likely tokens, int64 and float32 [rows, num_top]. logprobs: float32 [rows, vocab]."""
    ids, values = likeliest(logprobs, num_top)
    return logprobs.gather(1, tokens.unsqueeze(-1)).squeeze(-1), ids, values


def likeliest(logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ids and log probabilities [rows, count] of the most likely tokens, best first; among equals the lower id.

    topk alone does not define its choice among equals, and this choice changes with `count`. So each token gets a
    unique 64-bit key: the float32's order in the upper half, minus the id. This takes LIKELIEST_BYTES per logit.
    """
    bits = (logprobs + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    bits ^= (bits >> 31) & 0x7FFFFFFF
    keys = bits.long()
    keys <<= 32
    keys -= torch.arange(logprobs.shape[-1], device=logprobs.device)
    best = keys.topk(min(count, logprobs.shape[-1]), dim=-1).values
    ids = -best & 0xFFFFFFFF
    return ids, logprobs.gather(1, ids)
