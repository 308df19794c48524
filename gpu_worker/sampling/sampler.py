"""From logits to tokens. An operation that no row needs costs nothing: an all-greedy batch is one max. The host never
waits for the device: it decides by the requests' parameters (`SamplingRows`), never by a result on the device.

The order is that of vLLM V1 (its Sampler's documentation). The definitions are those of transformers' processors:

 1. the grammar; the reported log probabilities are taken after it, before all following steps;
 2. allowed_token_ids;
 3. bad_words, then min_tokens (bans commute: no later step makes a banned token possible again);
 4. logit_bias;
 5. repetition_penalty, frequency_penalty, presence_penalty;
 6. greedy rows take the largest logit; the other rows continue with
 7. temperature, then the filters in the order of paceline.request_fields: min_p, top_k, top_p as in vLLM; typical_p,
    which vLLM does not have, last as in transformers;
 8. the token, by Gumbel-max with random numbers that depend only on seed, position and token id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.device import upload
from gpu_worker.sampling.filters import FILTERS, Column, Filter, apply_temperature
from gpu_worker.sampling.grammars import GrammarMask
from gpu_worker.sampling.gumbel import draw, draw_keys
from gpu_worker.sampling.logits_processors import BatchLogitsProcessors
from gpu_worker.sampling.processors import allow_bits, ban
from paceline.request_fields import FILTER_NAMES

# Memory per logit for likeliest(): the bits, a copy of them, a key, and a copy of the keys in topk.
LIKELIEST_BYTES = 4 + 4 + 8 + 8


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters of the sampling rows; host arrays [rows]."""

    columns: Mapping[str, Column]  # temperature (0 is greedy) and the filters, by name
    seed: npt.NDArray[np.uint64]
    position: npt.NDArray[np.int64]  # position of the new token in its sequence
    # Banned entries of the logits (min_tokens): row and token.
    banned_rows: npt.NDArray[np.int64]
    banned_tokens: npt.NDArray[np.int64]
    scored: npt.NDArray[np.int64]  # rows with log probabilities
    num_top: npt.NDArray[np.int64]  # [scored] how many of the most likely tokens to report


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sampled tokens of a step, on the device."""

    tokens: Tensor  # int64 [rows] on the device; 0 for a failed row
    failed: Tensor  # bool [rows] on the device: the row has no token
    # bool [rows] on the device: the failed rows with parameters that exclude every token. In the other failed rows the
    # model's output is not finite. None: no row's parameters can exclude all tokens.
    ruled_out: Tensor | None
    scores: Scores | None  # of rows.scored; None if that is empty


@dataclass(frozen=True, slots=True)
class Scores:
    """The model's log probabilities, on the device: after the mask of a grammar, as in vLLM V1, and before everything
    else that changes logits."""

    sampled: Tensor  # float32 [scored]
    top_tokens: Tensor  # int64 [scored, largest num_top], best first; among equals the lower id first
    top: Tensor  # float32, in the shape of top_tokens


def sample(
    logits: Tensor, rows: SamplingRows, processors: BatchLogitsProcessors | None = None, mask: GrammarMask | None = None
) -> Sampled:
    """Sample one token per row. A row's token depends only on its own logits, parameters and past.

    logits: [rows, vocab], any float type; float32 logits are overwritten."""
    logits = logits.float()
    broken = None
    if processors is not None or mask is not None or len(rows.banned_rows):
        # Look for rows with NaN or infinity before a ban may hide them.
        broken = ~logits.amax(dim=-1).isfinite()
    if mask is not None:
        allow_bits(logits, mask.rows, mask.bits)
    logprobs = _logprobs(logits, rows)
    if broken is not None:
        _process_logits(logits, rows, processors)
    best, tokens = logits.max(dim=-1)  # a NaN in a row is its maximum
    failed = ~best.isfinite()
    ruled_out = None
    if broken is not None:
        ruled_out = failed & ~broken
        failed |= broken
    if (temperature := rows.columns["temperature"]).any():
        random = np.flatnonzero(temperature)
        where = upload(random, logits.device)
        # A failed row must be finite too. Its token is replaced below.
        logits.masked_fill_(failed.unsqueeze(-1), 0.0)
        chosen = logits if len(random) == len(logits) else logits.index_select(0, where)
        tokens.index_copy_(0, where, _sample_random(chosen, rows, random))
    tokens.masked_fill_(failed, 0)
    return Sampled(tokens, failed, ruled_out, _scores(logprobs, tokens, rows))


def _process_logits(logits: Tensor, rows: SamplingRows, processors: BatchLogitsProcessors | None) -> None:
    if len(rows.banned_rows):
        ban(logits, *(upload(index, logits.device) for index in (rows.banned_rows, rows.banned_tokens)))
    if processors is not None:
        processors.apply(logits)


def _logprobs(logits: Tensor, rows: SamplingRows) -> Tensor | None:
    """float32 [scored, vocab]. Computed before the steps that overwrite the logits."""
    if not len(rows.scored):
        return None
    return logits.index_select(0, upload(rows.scored, logits.device)).log_softmax(-1)


def _scores(logprobs: Tensor | None, tokens: Tensor, rows: SamplingRows) -> Scores | None:
    if logprobs is None:
        return None
    chosen = tokens.index_select(0, upload(rows.scored, tokens.device))
    ids, values = likeliest(logprobs, int(rows.num_top.max()))
    return Scores(logprobs.gather(1, chosen.unsqueeze(-1)).squeeze(-1), ids, values)


def likeliest(logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ids and log probabilities [rows, count] of the most likely tokens, best first; among equals the lower id.

    topk alone does not define its choice among equals, and this choice changes with `count`. So each token gets a
    unique key of 64 bits: the float32's order above, and the id below. This takes LIKELIEST_BYTES per logit.
    """
    bits = (logprobs + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    bits ^= (bits >> 31) & 0x7FFFFFFF
    keys = bits.long()
    keys <<= 32
    keys -= torch.arange(logprobs.shape[-1], device=logprobs.device)
    best = keys.topk(min(count, logprobs.shape[-1]), dim=-1).values
    ids = -best & 0xFFFFFFFF
    return ids, logprobs.gather(1, ids)


def _sample_random(logits: Tensor, rows: SamplingRows, which: npt.NDArray[np.int64]) -> Tensor:
    device = logits.device
    logits = apply_temperature(logits, upload(rows.columns["temperature"][which], device))
    for name in FILTER_NAMES:
        logits = _filter(logits, FILTERS[name], rows.columns[name][which])
    return draw(logits, upload(draw_keys(rows.seed[which], rows.position[which]), device))


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
