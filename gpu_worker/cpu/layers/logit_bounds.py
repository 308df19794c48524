"""Bounds of all logits from an int8 copy of the head, so that a greedy token needs only a small part of the head.

A greedy token needs only the largest logit. Where a few rows are computed, the head is a large part of what a step of a
small model reads. Its int8 copy is half as large as the head in bfloat16, and tells for each logit how small and how
large it can be. So the head itself is read only for the blocks of 64 logits of which one can be as large as the largest
lower bound: 1 in 100. These are computed as always, and the other logits are -infinity. The first token with the
largest logit is the same as of all logits.

Weber, Schek and Blott, "A quantitative analysis and performance study for similarity-search methods in high-dimensional
spaces" (VA-File, 1998), find nearest neighbours like this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from gpu_worker.cpu.numbers import load, parts_of, scale_of, store
from gpu_worker.cpu.products import multiply_block, multiply_table_block, part_of
from gpu_worker.cpu.threads import meet, next_unit
from gpu_worker.cpu.vectors import OUTPUTS, add_bytes, join_bytes, store_sums, zero_sums
from gpu_worker.models.int8 import quantize

# With up to so many rows, the bounds take less time than they save, on two Zen 4 cores.
MOST_ROWS = {torch.float32: 8, torch.bfloat16: 3}
# If the largest number of a row or of a token is between these, no square and no bound becomes infinite or 0.
_LEAST_NUMBER, _LARGEST_NUMBER = 1e-10, 1e15
_ZERO = 128  # the code of 0
_BLOCKS_AT_ONCE = 64  # while the copy is made


@dataclass(frozen=True, slots=True)
class LogitBounds:
    """The head as int8, and how far from a logit the same product with the copy can be: at most the token's error
    times the length of the row."""

    codes: np.ndarray  # uint8 [blocks, width / 4, 64, 4]: numbers / scale + 128
    scales: np.ndarray  # float32 [blocks * 64]
    errors: np.ndarray  # float32 [blocks * 64]; infinite for a token that has no bounds


def logit_bounds(head: np.ndarray, vocab: int, width: int) -> LogitBounds:
    """head: what PackedMatmul.memory() returns for the head [vocab, width]. width: a multiple of 4."""
    blocks = -(-vocab // OUTPUTS)
    codes = torch.full((blocks, width // 4, OUTPUTS, 4), _ZERO, dtype=torch.uint8)
    scales, errors = torch.zeros(blocks * OUTPUTS), torch.zeros(blocks * OUTPUTS)
    for block in range(0, blocks, _BLOCKS_AT_ONCE):
        first, last = block * OUTPUTS, min((block + _BLOCKS_AT_ONCE) * OUTPUTS, vocab)
        weights = _weights(head, first, last, width)
        values, scale = quantize(weights)
        errors[first:last] = _errors(weights, values * scale)
        scales[first:last] = scale[:, 0].masked_fill(errors[first:last].isinf(), 0)
        count = -(-(last - first) // OUTPUTS)
        numbers = torch.nn.functional.pad(values, (0, 0, 0, count * OUTPUTS - (last - first)))
        order = numbers.view(count, OUTPUTS, width // 4, 4).transpose(1, 2)
        codes[block : block + count] = (order.to(torch.int16) + _ZERO).to(torch.uint8)
    return LogitBounds(codes.numpy(), scales.numpy(), errors.numpy())


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
    is_usable = (size == 0) | ((size >= _LEAST_NUMBER) & (size <= _LARGEST_NUMBER))  # False for NaN
    padded: Tensor = 1.001 * errors
    return padded.masked_fill(~is_usable, torch.inf)


@njit(fastmath=False)
def likeliest_part(
    rows: Any, head: Any, is_table: bool, copy: Any, bounds: Any, work: Any, arrived: Any, meetings: int, logits: Any
) -> int:
    """A thread's part of the logits, of which those that cannot be the largest of their row are -infinity. Returns the
    number of meetings.

    rows [n, width]: after the final norm. head: a packed matrix, or [vocab * width] with is_table. copy: codes, scales
    and errors of LogitBounds. bounds: float32 [2, n, blocks], scratch memory."""
    upper, lower = bounds[0], bounds[1]
    _find_bounds(rows, copy, work, logits.shape[1], upper, lower)
    meetings = meet(arrived, work[3], meetings)
    thresholds = np.empty(len(rows), np.float32)
    for row in range(len(rows)):
        best = lower[row, 0]
        for block in range(1, lower.shape[1]):
            best = max(best, lower[row, block])
        # Different float32 may be the same bfloat16.
        thresholds[row] = best - abs(best) * np.float32(2**-7)
    table = head.reshape(logits.shape[1], rows.shape[1])
    sums = np.empty((len(rows), OUTPUTS), np.float32)
    unit = next_unit(work, upper.shape[1])
    while unit >= 0:
        is_needed = False
        for row in range(len(rows)):
            is_needed = is_needed or upper[row, unit] >= thresholds[row]
        if is_needed and is_table:
            multiply_table_block(rows, table, unit, logits)
        elif is_needed:
            multiply_block(rows, head, head[:0], False, unit, part_of(head), sums, logits)
        else:
            for row in range(len(rows)):
                own = logits[row, unit * OUTPUTS : (unit + 1) * OUTPUTS]
                for i in range(len(own)):
                    store(own, i, np.float32(-np.inf))
        unit = next_unit(work, upper.shape[1])
    return meetings


@njit(inline="always")
def _find_bounds(rows: Any, copy: Any, work: Any, vocab: int, upper: Any, lower: Any) -> None:
    """A thread's part of the blocks' largest upper and lower bounds, [n, blocks]."""
    codes, scales, errors = copy
    count, width = rows.shape
    parts = np.empty((count, 2, width), np.int8)
    zeros, sizes = np.empty((count, 2), np.int32), np.empty((count, 2), np.float32)
    for row in range(count):
        _split_row(rows[row], parts[row], zeros[row], sizes[row])
    products = np.empty(OUTPUTS, np.float32)
    unit = next_unit(work, upper.shape[1])
    while unit >= 0:
        first = unit * OUTPUTS
        last = min(first + OUTPUTS, vocab)
        for row in range(count):
            scale, length = sizes[row]
            upper[row, unit], lower[row, unit] = np.inf, -np.inf
            if length >= 0:
                _multiply_codes(codes, first * width, parts[row], zeros[row], products)
                bounds = _largest_bounds(products, scales[first:last], errors[first:last], scale, length)
                upper[row, unit], lower[row, unit] = bounds
        unit = next_unit(work, upper.shape[1])


@njit(inline="always")
def _split_row(row: Any, parts: Any, zeros: Any, sizes: Any) -> None:
    """parts int8 [2, width]: high and low of parts_of(). zeros int32 [2]: what the code of 0 adds to their products
    with codes. sizes float32 [2]: the scale, and the length; NaN if there are no bounds for this row."""
    scale, length = scale_of(row), np.float32(0)
    # False for NaN
    is_usable = scale >= np.float32(_LEAST_NUMBER / 127) and scale <= np.float32(_LARGEST_NUMBER / 127)
    inverse = np.float32(1) / scale if is_usable else np.float32(0)
    high_zero = low_zero = np.int32(0)
    for i in range(len(row)):
        number = load(row[i]) if is_usable else np.float32(0)
        length += number * number
        high, low = parts_of(number * inverse)
        parts[0, i], parts[1, i] = np.int8(np.int32(high)), np.int8(np.int32(low))
        high_zero += np.int32(_ZERO) * np.int32(high)
        low_zero += np.int32(_ZERO) * np.int32(low)
    zeros[0], zeros[1] = high_zero, low_zero
    sizes[0], sizes[1] = scale, np.sqrt(length) if is_usable else np.float32(np.nan)


@njit(fastmath=False)
def _multiply_codes(codes: Any, offset: int, parts: Any, zeros: Any, out: Any) -> None:
    """The products of 64 tokens' codes with the parts of a row."""
    high, low = zero_sums(), zero_sums()
    for i in range(0, parts.shape[1], 4):
        high = add_bytes(high, codes, offset + OUTPUTS * i, parts[0], i)
        low = add_bytes(low, codes, offset + OUTPUTS * i, parts[1], i)
    store_sums(out, 0, join_bytes(high, low, zeros[0], zeros[1], np.float32(1 / 254)))


@njit(fastmath={"nnan", "nsz"})
def _largest_bounds(products: Any, scales: Any, errors: Any, scale: float, length: float) -> Any:
    """The largest upper bound, and the largest lower bound."""
    upper = lower = np.float32(-np.inf)
    for i in range(len(scales)):
        number, error = products[i] * (scales[i] * scale), errors[i] * length
        upper, lower = max(upper, number + error), max(lower, number - error)
    return upper, lower
