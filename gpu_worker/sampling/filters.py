"""Temperature and the filters (min-p, top-k, top-p, typical) on rows of logits, with transformers' rules for ties.
Nothing here makes the host wait for a device.

Sums of probabilities decide which tokens top-p keeps, and a sum of floats depends on its order. On a GPU the order
differs with the number of rows, and for a running sum it may differ each time. So these are sums of whole numbers
(`whole_weights`), which are equal in any order: on one kind of device, the same logits keep the same tokens in every
batch. (Another kind may round exp() differently.)

FlashInfer's top_p_renorm_probs is not used. It reads float32 probabilities, in which different logits may be equal. And
it is reproducible only with is_deterministic, which costs part of its advantage. `beyond_by_radix` finds the exact
threshold by a radix search, with torch's own kernels. (FlashInfer's top_k_mask_logits is not used either.) If a GPU has
Triton (fused.py), these functions serve only the rows with typical_p."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Column = npt.NDArray[Any]  # [rows], one value for each

# On a CPU: how many of the most likely tokens to examine before sorting a whole row.
FIRST_CANDIDATES = 64
# The mantissa of a float64: sums up to 2**53 are exact.
_EXACT_BITS = 53
_NO_WEIGHT = -60.0
_DIGITS = 2**16  # values of half a float32


@dataclass(frozen=True, slots=True)
class Filter:
    """A mask of unlikely tokens, with one parameter. `needs`: which rows need the mask, by the parameter's values for
    all rows and the size of the vocabulary. `mask` gets the logits of these rows, and the parameter's values for them,
    on the device and on the host."""

    mask: Callable[[Tensor, Tensor, Column], Tensor]
    needs: Callable[[Column, int], npt.NDArray[np.bool_]]


def apply_temperature(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Divide each row by its temperature, after moving its largest logit to 0. Otherwise a small temperature would make
    the logits so large that float32 is coarse or overflows. logits: float32 [rows, vocab]. temperatures: float32
    [rows], above 0."""
    return (logits - logits.amax(-1, keepdim=True)) / temperatures.unsqueeze(-1)


def mask_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Keep tokens that are at least min_p times as likely as the row's most likely token. min_p: float32 [rows],
    0..1."""
    return logits.masked_fill(logits - logits.amax(-1, keepdim=True) < min_p.log().unsqueeze(-1), -torch.inf)


def mask_top_k(logits: Tensor, top_k: Tensor, most: int) -> Tensor:
    """Keep each row's top_k largest logits, and all that are equal to the smallest of these. top_k: int64 [rows],
    1..vocab. most: the largest value in top_k, which the host must know."""
    largest = logits.topk(most, dim=-1).values
    threshold = largest.gather(1, (top_k - 1).unsqueeze(-1))
    return logits.masked_fill(logits < threshold, -torch.inf)


def mask_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Keep each row's most likely tokens until the sum of their probabilities reaches top_p, and all tokens that are as
    likely as the last of these (so that the result does not depend on how a sort orders ties). top_p: float32 [rows],
    0..1."""
    return logits.masked_fill(_beyond(logits, whole_weights(logits), top_p), -torch.inf)


def mask_typical_p(logits: Tensor, typical_p: Tensor) -> Tensor:
    """Locally typical sampling (Meister et al. 2022): keep the tokens with a surprise nearest to the row's entropy,
    until the sum of their probabilities reaches typical_p, and all tokens that are as near as the last of these.
    typical_p: float32 [rows], above 0 and below 1."""
    surprise = -logits.log_softmax(-1)
    likely = (-surprise).exp()
    # Tokens that an earlier filter removed give 0 times infinity, so nansum. (A float64 sum hardly depends on order.)
    entropy = (surprise * likely).nansum(-1, keepdim=True, dtype=torch.float64).float()
    distance = (surprise - entropy).abs()
    return logits.masked_fill(_beyond(-distance, whole_weights(logits), typical_p), -torch.inf)


def whole_weights(logits: Tensor) -> Tensor:
    """Probabilities as whole numbers, float32 [rows, vocab]: 2**n for the row's most likely token, with the largest n
    for which float64 sums of a row are exact: 36 at a vocabulary of 128k."""
    below_best = logits - logits.amax(-1, keepdim=True)
    # Smaller values would become 0 anyway. Without the limit their exp() takes 15 times as long.
    return below_best.clamp_(min=_NO_WEIGHT).exp_().mul_(scale_of_weights(logits.shape[-1])).add_(0.5).floor_()


def scale_of_weights(vocab: int) -> float:
    """The weight of a row's most likely token."""
    return float(2.0 ** (_EXACT_BITS - (vocab - 1).bit_length()))


def _beyond(values: Tensor, weights: Tensor, shares: Tensor) -> Tensor:
    """The tokens to mask, bool [rows, vocab]. In each row, tokens are taken by descending value until their weights
    reach the row's share of the sum of all weights. Tokens with the same value as the last taken token are taken, too.
    The other tokens are masked.

    values: float32 [rows, vocab], no NaN. weights: whole_weights(). shares: float32 [rows], 0..1."""
    wanted = shares.double().unsqueeze(-1) * weights.sum(-1, keepdim=True, dtype=torch.float64)
    # Both functions find the same tokens. A sort is slow on a CPU, so beyond_by_sorting first tests whether a sort is
    # necessary. On a GPU, such a test would make the host wait.
    find = beyond_by_sorting if values.device.type == "cpu" else beyond_by_radix
    return find(values, weights, wanted)


def beyond_by_sorting(values: Tensor, weights: Tensor, wanted: Tensor) -> Tensor:
    """`_beyond` by sorting: examines a few tokens first, and sorts only the rows that need more. wanted: float64
    [rows, 1]."""
    first, places = values.topk(min(FIRST_CANDIDATES, values.shape[-1]), dim=-1)
    least, enough = _least_taken(first, weights.gather(1, places), wanted)
    if not enough.all():
        rest = (~enough).nonzero().squeeze(-1)
        ordered, places = values[rest].sort(dim=-1, descending=True)
        least[rest], _ = _least_taken(ordered, weights[rest].gather(1, places), wanted[rest])
    return values < least


def _least_taken(values: Tensor, weights: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest taken value [rows, 1], of values in descending order, and whether the values suffice [rows]."""
    taken = weights.cumsum(-1, dtype=torch.float64)
    last = (taken[:, :-1] < wanted).sum(-1, keepdim=True)  # the first value is always taken
    return values.gather(1, last), taken[:, -1] >= wanted.squeeze(-1)


def beyond_by_radix(values: Tensor, weights: Tensor, wanted: Tensor) -> Tensor:
    """`_beyond` without a sort. Finds the smallest taken value in two halves. For its upper 16 bits, the weights of all
    tokens are summed by their upper bits. For its lower 16 bits, only tokens with the found upper bits are summed.
    wanted: float64 [rows, 1]."""
    keys = _ordered_bits(values)
    upper, lower = (keys >> 16).to(torch.int64) + _DIGITS // 2, (keys & (_DIGITS - 1)).to(torch.int64)
    weights, none = weights.double(), wanted.new_zeros(())
    wanted = wanted.clamp(min=1.0)  # so that the best is always taken
    digit, before = _reaching_digit(upper, weights, wanted, none)
    weights = torch.where(upper == digit, weights, none)
    least, _ = _reaching_digit(lower, weights, wanted, before)
    return keys < (((digit - _DIGITS // 2) << 16) + least).to(torch.int32)


def _reaching_digit(digits: Tensor, weights: Tensor, wanted: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest digit for which the sum of `before` and the weights of all larger digits is less than `wanted`; and
    this sum. Both [rows, 1]."""
    # Tokens without weight get spread digits. When most of a row is filtered out, these tokens all have the same digit,
    # and a GPU would add a hundred thousand zeros to one number, one after the other.
    anywhere = torch.arange(digits.shape[-1], device=digits.device) % _DIGITS
    spread = torch.where(weights > 0, digits, anywhere)
    by_digit = weights.new_zeros((len(digits), _DIGITS)).scatter_add_(1, spread, weights)
    upwards = by_digit.cumsum(-1)
    above = before + upwards[:, -1:] - upwards
    digit = (above >= wanted).sum(-1, keepdim=True)
    return digit, above.gather(1, digit)


def _ordered_bits(values: Tensor) -> Tensor:
    """int32 keys in the order of the float32 values. Equal values get equal keys (-0 gets the key of 0)."""
    bits = (values + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


# By the name of the parameter. The order is that of paceline.request_fields.
FILTERS = {
    "min_p": Filter(lambda logits, min_p, _: mask_min_p(logits, min_p), lambda min_p, _: min_p > 0),
    "top_k": Filter(
        lambda logits, top_k, on_host: mask_top_k(logits, top_k, int(on_host.max())),
        lambda top_k, vocab: (top_k > 0) & (top_k < vocab),
    ),
    "top_p": Filter(lambda logits, top_p, _: mask_top_p(logits, top_p), lambda top_p, _: top_p < 1),
    "typical_p": Filter(lambda logits, share, _: mask_typical_p(logits, share), lambda share, _: share < 1),
}
