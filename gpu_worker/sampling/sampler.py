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

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.device import upload, upload_words
from gpu_worker.sampling.filters import Column
from gpu_worker.sampling.fused import NUM_PARAMETERS, need_other_filters, parameters_of, sample_rows, score_rows
from gpu_worker.sampling.grammars import GrammarMask
from gpu_worker.sampling.gumbel import draw_keys
from gpu_worker.sampling.logits_processors import BatchLogitsProcessors
from gpu_worker.sampling.processors import allow_bits, ban
from gpu_worker.sampling.torch_sampling import draw_filtered, score


@dataclass(frozen=True, slots=True)
class ColumnsOf(Mapping[str, Column]):
    """The columns of some slots. Each is gathered when it is read: a greedy step reads only the temperature."""

    columns: Mapping[str, Column]  # of all slots
    slots: npt.NDArray[np.int64]

    def __getitem__(self, name: str) -> Column:
        return self.columns[name][self.slots]

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)


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

    @property
    def need_only_largest(self) -> bool:
        """Whether all these rows need of their logits is the largest one: they are greedy, and no filter matters."""
        return not (len(self.banned_rows) or len(self.scored) or self.columns["temperature"].any())

    def draws(self) -> npt.NDArray[np.int32] | None:
        """The parameters for sample_rows() in fused.py, if it alone can sample the tokens; else None."""
        columns = self.columns
        if len(self.banned_rows) or len(self.scored):
            return None
        if self.need_only_largest:
            return np.zeros((len(self.seed), NUM_PARAMETERS), np.int32)
        if need_other_filters(columns).any():
            return None
        return parameters_of(columns, draw_keys(self.seed, self.position))


# Returns, for each row of logits [rows, vocab], the first token with the largest logit, int64 [rows], and whether that
# logit is NaN or infinite, bool [rows]; then the token is 0.
Largest = Callable[[Tensor], tuple[Tensor, Tensor]]

# Tokens that largest_logits() compares at a time.
_BLOCK_TOKENS = 256


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
    logits: Tensor,
    rows: SamplingRows,
    processors: BatchLogitsProcessors | None = None,
    mask: GrammarMask | None = None,
    fused: bool = False,
    largest: Largest | None = None,
) -> Sampled:
    """Sample one token per row. A row's token depends only on its own logits, parameters and past.

    logits: [rows, vocab], any float type; float32 logits may be overwritten. fused: use the operations of fused.py.
    largest: replaces largest_logits() if no logits change."""
    changed = processors is not None or mask is not None or len(rows.banned_rows) > 0
    if changed:
        logits = logits.float()
    # Look for rows with NaN or infinity before a ban may hide them.
    broken = ~logits.amax(dim=-1).isfinite() if changed else None
    if mask is not None:
        allow_bits(logits, mask.rows, mask.bits)
    scorer = _scorer(logits, rows, fused, changed) if len(rows.scored) else None
    if changed:
        _process_logits(logits, rows, processors)
    if fused:
        tokens, failed = _choose_fused(logits, rows)
    else:
        tokens, failed = _choose(logits, rows, largest_logits if largest is None or changed else largest)
    ruled_out = None
    if broken is not None:
        ruled_out = failed & ~broken
        failed |= broken
        tokens.masked_fill_(failed, 0)
    return Sampled(tokens, failed, ruled_out, None if scorer is None else Scores(*scorer(tokens)))


def _process_logits(logits: Tensor, rows: SamplingRows, processors: BatchLogitsProcessors | None) -> None:
    if len(rows.banned_rows):
        ban(logits, *(upload(index, logits.device) for index in (rows.banned_rows, rows.banned_tokens)))
    if processors is not None:
        processors.apply(logits)


def _scorer(logits: Tensor, rows: SamplingRows, fused: bool, changes: bool) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Returns a function that scores the tokens of all rows by the logits as they are now. changes: the logits are
    going to change."""
    where, num_top = upload(rows.scored, logits.device), int(rows.num_top.max())
    if not fused:
        logprobs = logits.index_select(0, where).float().log_softmax(-1)
        return lambda tokens: score(logprobs, tokens.index_select(0, where), num_top)
    if not changes:
        return lambda tokens: score_rows(logits, where, tokens.index_select(0, where), num_top)
    kept, all_kept = logits.index_select(0, where), torch.arange(len(where), device=logits.device)
    return lambda tokens: score_rows(kept, all_kept, tokens.index_select(0, where), num_top)


def _choose(logits: Tensor, rows: SamplingRows, largest: Largest) -> tuple[Tensor, Tensor]:
    """The tokens, int64 [rows], 0 for a failed row; and which rows failed."""
    tokens, failed = largest(logits)
    random = np.flatnonzero(rows.columns["temperature"])
    if len(random):
        _draw_rows(logits, rows, random, tokens, failed)
        tokens.masked_fill_(failed, 0)
    return tokens, failed


def largest_logits(logits: Tensor) -> tuple[Tensor, Tensor]:
    """As `Largest`."""
    best, tokens = _largest(logits)
    failed = ~best.isfinite()
    return tokens.masked_fill_(failed, 0), failed


def _largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row, and the first token that has it. A NaN counts as larger than any number.

    torch's max() is slow on a CPU, and its amax() is not. So first find the block of tokens that has the maximum."""
    num_blocks = logits.shape[1] // _BLOCK_TOKENS
    if logits.device.type != "cpu" or num_blocks < 2:
        return logits.max(dim=-1)
    blocks = logits[:, : num_blocks * _BLOCK_TOKENS].view(len(logits), num_blocks, _BLOCK_TOKENS)
    best, block = blocks.amax(dim=-1).max(dim=-1)
    block_of_row = block.view(-1, 1, 1).expand(-1, 1, _BLOCK_TOKENS)
    tokens = block * _BLOCK_TOKENS + blocks.gather(1, block_of_row).squeeze(1).max(dim=-1).indices
    rest = logits[:, num_blocks * _BLOCK_TOKENS :]
    if not rest.shape[1]:
        return best, tokens
    last, place = rest.max(dim=-1)
    is_last = (last > best) | (last.isnan() & ~best.isnan())
    return torch.where(is_last, last, best), torch.where(is_last, num_blocks * _BLOCK_TOKENS + place, tokens)


def _choose_fused(logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """As _choose(), with the operations of fused.py."""
    columns = dict(rows.columns)
    others = np.flatnonzero(need_other_filters(columns))
    if len(others):
        columns["temperature"] = columns["temperature"].copy()
        columns["temperature"][others] = 0
    parameters = upload_words(parameters_of(columns, draw_keys(rows.seed, rows.position)), logits.device)
    tokens, failed = sample_rows(logits, parameters)
    if len(others):
        _draw_rows(logits, rows, others, tokens, failed)
        tokens.masked_fill_(failed, 0)
    return tokens, failed


def _draw_rows(
    logits: Tensor, rows: SamplingRows, which: npt.NDArray[np.int64], tokens: Tensor, failed: Tensor
) -> None:
    """Draw the tokens of these rows with torch's own kernels. The token of a failed row is meaningless."""
    where = upload(which, logits.device)
    if len(which) < len(logits):
        logits, failed = logits.index_select(0, where), failed.index_select(0, where)
    # The draw needs finite rows.
    logits = logits.float().masked_fill(failed.unsqueeze(-1), 0.0)
    columns = {name: column[which] for name, column in rows.columns.items()}
    keys = draw_keys(rows.seed[which], rows.position[which])
    tokens.index_copy_(0, where, draw_filtered(logits, columns, keys))
