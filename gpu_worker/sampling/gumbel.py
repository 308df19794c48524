"""The random draw: Gumbel-max with counter-based random numbers that depend only on seed, position and token id.

Each token gets an exponential clock with a rate that equals its probability, and the first clock to ring wins. This is
the same as adding Gumbel noise to the logits and taking the largest. So rounding in a logit's last bits changes the
result only if two clocks ring almost together. (Greedy sampling is alike: there rounding matters only if two logits are
almost equal. The usual draw compares one random number with running sums of probabilities. There, rounding in one
likely token moves the interval borders of all later tokens, and some intervals are no wider than this error.)
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Odd numbers. The last two are from lowbias32 (C. Wellons, "Prospecting for hash functions", 2018).
_SPREAD, _FIRST, _SECOND = np.array([0x9E3779B1, 0x7FEB352D, 0x846CA68B], np.uint32).view(np.int32).tolist()
# The last float32 before 1, because log1p(-1) is infinite.
_BELOW_ONE = 1 - 2.0**-24


def draw_keys(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Two words per row, [rows, 2]: splitmix64 of the seed's stream at the position."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64
        streams = _mix(seeds + _GOLDEN)
        bits = _mix(streams + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return bits.view(np.int32).reshape(-1, 2)


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def draw(logits: Tensor, keys: Tensor) -> Tensor:
    """The drawn tokens, int64 [rows]. logits: float32 [rows, vocab], -inf for banned tokens. keys: draw_keys(), of any
    integer type."""
    return (logits - clocks(keys, logits.shape[-1]).log_()).argmax(-1)


def clocks(keys: Tensor, vocab: int) -> Tensor:
    """When each token's clock rings at rate 1: float32 [rows, vocab], exponentially distributed, above 0. The finest
    step is 2**-31: a token less likely than that is almost never drawn."""
    bits = noise_bits(keys, vocab).bitwise_and_(2**31 - 1)
    uniform = bits.float().add_(0.5).mul_(2.0**-31).clamp_(max=_BELOW_ONE)
    return uniform.neg_().log1p_().neg_()


def noise_bits(keys: Tensor, vocab: int) -> Tensor:
    """32 random bits per row and token: int32 [rows, vocab]."""
    keys = keys.to(torch.int32)
    bits = (torch.arange(vocab, dtype=torch.int32, device=keys.device) * _SPREAD) ^ keys[:, :1]
    bits = _shifted(bits, 16).mul_(_FIRST)
    bits = _shifted(bits, 15).add_(keys[:, 1:]).mul_(_SECOND)
    return _shifted(bits, 16)


def _shifted(bits: Tensor, count: int) -> Tensor:
    """bits ^ (bits >> count), in place, for unsigned numbers (torch shifts the sign in)."""
    return bits.bitwise_xor_((bits >> count).bitwise_and_(2 ** (32 - count) - 1))
