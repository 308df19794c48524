"""Bounds of all logits from an int8 copy of the head, so that a greedy token needs only a small part of the head.

A greedy token needs only the largest logit. The head is a large part of what a step of a small model reads and
multiplies. Products with its int8 copy take half of the time of bfloat16, and tell for each logit how small and how
large it can be. So the head itself is read only for the blocks of 64 logits of which one can be as large as the largest
that is known: 1 in 200. The first token with the largest logit is the same as of all logits (likeliest.py).

Weber, Schek and Blott, "A quantitative analysis and performance study for similarity-search methods in high-dimensional
spaces" (VA-File, 1998), find nearest neighbours like this.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu_worker.cpu.vectors import OUTPUTS
from gpu_worker.models.int8 import quantize

# If the largest number of a row or of a token is between these, no square and no bound becomes infinite or 0.
LEAST_NUMBER, LARGEST_NUMBER = 1e-10, 1e15
ZERO = 128  # the code of 0
_BLOCKS_AT_ONCE = 64  # while the copy is made


@dataclass(frozen=True, slots=True)
class LogitBounds:
    """The head as int8, and how far from a logit the same product with the copy can be: at most the token's error
    times the length of the row. With a copy of the row, too: plus the length of the token's copy times the length of
    the difference of the two rows."""

    codes: np.ndarray  # uint8 [blocks, width / 4, 64, 4]: numbers / scale + 128
    scales: np.ndarray  # float32 [blocks * 64]; after the last token, its numbers again
    errors: np.ndarray  # float32 [blocks * 64]; infinite for a token that has no bounds
    # float32 [blocks, 2]: the largest error, and the largest length of a token's copy
    blocks: np.ndarray


def logit_bounds(head: np.ndarray, vocab: int, width: int) -> LogitBounds:
    """head: what PackedMatmul.memory() returns for the head [vocab, width]. width: a multiple of 4."""
    blocks = -(-vocab // OUTPUTS)
    codes = torch.empty((blocks, width // 4, OUTPUTS, 4), dtype=torch.uint8)
    scales, errors, lengths = torch.empty((3, blocks * OUTPUTS))
    for block in range(0, blocks, _BLOCKS_AT_ONCE):
        first, last = block * OUTPUTS, min(block + _BLOCKS_AT_ONCE, blocks) * OUTPUTS
        weights = _weights(head, first, min(last, vocab), width)
        weights = torch.cat((weights, weights[-1:].expand(last - first - len(weights), width)))
        values, scale = quantize(weights)
        errors[first:last] = _errors(weights, values * scale)
        scales[first:last] = scale[:, 0].masked_fill(errors[first:last].isinf(), 0)
        lengths[first:last] = values.float().norm(dim=1) * scales[first:last]
        order = values.view(-1, OUTPUTS, width // 4, 4).transpose(1, 2)
        codes[block : last // OUTPUTS] = (order.to(torch.int16) + ZERO).to(torch.uint8)
    largest = torch.stack((errors, 1.001 * lengths), dim=1).view(blocks, OUTPUTS, 2).amax(1)
    return LogitBounds(codes.numpy(), scales.numpy(), errors.numpy(), largest.numpy())


def _weights(head: np.ndarray, first: int, last: int, width: int) -> Tensor:
    """Rows of the head as float32, [last - first, width]."""
    if head.ndim == 2:
        rows = head[first:last]
    else:
        pair = 2 if head.dtype == np.int16 else 1
        part = head[first * width : last * width].reshape(-1, width // pair, OUTPUTS, pair)
        rows = np.ascontiguousarray(part.transpose(0, 2, 1, 3)).reshape(last - first, width)
    numbers = torch.from_numpy(rows)
    return (numbers.view(torch.bfloat16) if head.dtype == np.int16 else numbers).float()


def _errors(weights: Tensor, copy: Tensor) -> Tensor:
    """By Cauchy and Schwarz, the difference of two products with a row is at most the length of the difference times
    the length of the row. Then the copy's product has a row of parts_of(), with an error below 2 ** -15 of its largest
    number in each number; and all sums are rounded, here and in the products (Higham, "Accuracy and stability of
    numerical algorithms", 2002, section 3.1: by less than 2 ** -23 per number)."""
    width = weights.shape[1]
    rounding = width**0.5 * 2**-15 + width * 2**-21
    errors = (weights - copy).norm(dim=1) + rounding * weights.norm(dim=1)
    size = weights.abs().amax(1)
    is_usable = (size == 0) | ((size >= LEAST_NUMBER) & (size <= LARGEST_NUMBER))  # False for NaN
    padded: Tensor = 1.001 * errors
    return padded.masked_fill(~is_usable, torch.inf)
