"""Temperature and the filters (min-p, top-k, top-p, typical) on rows of logits, with transformers' rules at ties.
Nothing here makes the host wait for a device.

Sums of probabilities decide which tokens top-p keeps, and a sum of floats hangs on the order in which it is done: on a
GPU that is another one for another number of rows, and for a running sum it may be another one each time. So they are
sums of whole numbers (`whole_weights`), which come out alike in any order: of the same logits the same tokens are kept
on either device and in any company.

FlashInfer's top_p_renorm_probs and top_k_mask_logits are not used: they round to float32 probabilities first, in which
different logits may be equal, and top_p_renorm_probs is reproducible with is_deterministic alone, which costs part of
what it wins. `beyond_by_radix` finds the same threshold as its radix search does, exactly, in torch's own kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

# On a CPU: how many of the first tokens are looked at before a whole row is sorted.
FIRST_CANDIDATES = 64
# Of the mantissa of a float64: sums up to 2**53 are exact.
_EXACT_BITS = 53
_NO_WEIGHT = -60.0
_DIGITS = 2**16  # of half a float32


def apply_temperature(logits: Tensor, temperatures: Tensor) -> Tensor:
    """logits float32 [rows, vocab]; temperatures float32 [rows], above 0. Each row's best comes to 0: else a small
    temperature would make numbers of which a float32 has few, or none."""
    return (logits - logits.amax(-1, keepdim=True)) / temperatures.unsqueeze(-1)


def mask_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Keep what is at least min_p times as likely as the row's most likely token. min_p: float32 [rows], 0..1."""
    likely = logits.softmax(-1)
    threshold = min_p.unsqueeze(-1) * likely.amax(-1, keepdim=True)
    return logits.masked_fill(likely < threshold, -torch.inf)


def mask_top_k(logits: Tensor, top_k: Tensor, most: int) -> Tensor:
    """Keep each row's top_k largest, and all that equal the last of them. top_k: int64 [rows], 1..vocab; most: the
    largest of them, which the host knows."""
    largest = logits.topk(most, dim=-1).values
    threshold = largest.gather(1, (top_k - 1).unsqueeze(-1))
    return logits.masked_fill(logits < threshold, -torch.inf)


def mask_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Keep each row's most likely tokens up to the one that reaches top_p, and all that equal that one (so that a row's
    result does not hang on how a sort breaks ties). top_p: float32 [rows], 0..1."""
    return logits.masked_fill(_beyond(logits, whole_weights(logits), top_p), -torch.inf)


def mask_typical_p(logits: Tensor, typical_p: Tensor) -> Tensor:
    """Locally typical sampling (Meister et al. 2022): keep the tokens whose surprise is nearest to the row's entropy,
    up to the one that reaches typical_p, and all that are as near. typical_p: float32 [rows], above 0 and below 1."""
    surprise = -logits.log_softmax(-1)
    likely = (-surprise).exp()
    # What a filter before has taken out has no surprise to speak of: 0 times infinity. (Summed in float64: see above.)
    entropy = (surprise * likely).nansum(-1, keepdim=True, dtype=torch.float64).float()
    distance = (surprise - entropy).abs()
    return logits.masked_fill(_beyond(-distance, whole_weights(logits), typical_p), -torch.inf)


def whole_weights(logits: Tensor) -> Tensor:
    """Probabilities as whole numbers, float32 [rows, vocab]: 2**n for the row's most likely token, where n is the most
    for which float64 sums of a row are exact: 36 at a vocabulary of 128k."""
    scale = 2.0 ** (_EXACT_BITS - (logits.shape[-1] - 1).bit_length())
    below_best = logits - logits.amax(-1, keepdim=True)
    # What is that far below comes to 0; without the limit exp() of it takes 15 times as long.
    return below_best.clamp_(min=_NO_WEIGHT).exp_().mul_(scale).round_()


def _beyond(values: Tensor, weights: Tensor, shares: Tensor) -> Tensor:
    """Which tokens are left if they are taken by descending value until they have their row's share of its weight, and
    then all that equal the last: bool [rows, vocab]. In other words: those before which the share has been taken.

    values: float32 [rows, vocab], no NaN; weights: whole_weights(); shares: float32 [rows], 0..1."""
    wanted = shares.double().unsqueeze(-1) * weights.sum(-1, keepdim=True, dtype=torch.float64)
    # The two find the same. A CPU sorts slowly and can be asked whether it has to; a GPU must not be asked.
    find = beyond_by_sorting if values.device.type == "cpu" else beyond_by_radix
    return find(values, weights, wanted)


def beyond_by_sorting(values: Tensor, weights: Tensor, wanted: Tensor) -> Tensor:
    """wanted: float64 [rows, 1]. Looks at a few tokens first, and sorts the rows for which they are not enough."""
    first, places = values.topk(min(FIRST_CANDIDATES, values.shape[-1]), dim=-1)
    least, enough = _least_taken(first, weights.gather(1, places), wanted)
    if not enough.all():
        rest = (~enough).nonzero().squeeze(-1)
        ordered, places = values[rest].sort(dim=-1, descending=True)
        least[rest], _ = _least_taken(ordered, weights[rest].gather(1, places), wanted[rest])
    return values < least


def _least_taken(values: Tensor, weights: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The least value that belongs [rows, 1], of values in descending order; and whether they are enough [rows]."""
    taken = weights.cumsum(-1, dtype=torch.float64)
    last = (taken[:, :-1] < wanted).sum(-1, keepdim=True)  # the first one always belongs
    return values.gather(1, last), taken[:, -1] >= wanted.squeeze(-1)


def beyond_by_radix(values: Tensor, weights: Tensor, wanted: Tensor) -> Tensor:
    """wanted: float64 [rows, 1]. The value that reaches it is found half by half: of its bits the upper 16 from the
    weights of all tokens by their upper bits, the lower 16 from those that have its upper ones."""
    keys = _ordered_bits(values)
    upper, lower = (keys >> 16).to(torch.int64) + _DIGITS // 2, (keys & (_DIGITS - 1)).to(torch.int64)
    weights, none = weights.double(), wanted.new_zeros(())
    wanted = wanted.clamp(min=1.0)  # so that the best always belongs
    digit, before = _reaching_digit(upper, weights, wanted, none)
    weights = torch.where(upper == digit, weights, none)
    least, _ = _reaching_digit(lower, weights, wanted, before)
    return keys < (((digit - _DIGITS // 2) << 16) + least).to(torch.int32)


def _reaching_digit(digits: Tensor, weights: Tensor, wanted: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """The least digit above which, with what was taken before, there is less than wanted; and that much [rows, 1]."""
    # What weighs nothing goes anywhere: where most of a row is filtered out already, all of it has one digit, and a GPU
    # would add a hundred thousand zeros to one number, one after the other.
    anywhere = torch.arange(digits.shape[-1], device=digits.device) % _DIGITS
    spread = torch.where(weights > 0, digits, anywhere)
    by_digit = weights.new_zeros((len(digits), _DIGITS)).scatter_add_(1, spread, weights)
    upwards = by_digit.cumsum(-1)
    above = before + upwards[:, -1:] - upwards
    digit = (above >= wanted).sum(-1, keepdim=True)
    return digit, above.gather(1, digit)


def _ordered_bits(values: Tensor) -> Tensor:
    """int32, in the order of the float32 values; equals are equal (so -0 becomes 0)."""
    bits = (values + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
