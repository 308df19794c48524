"""The likeliest tokens of rows from bounds of their logits: which part of the head is read, in a compiled function.

First the bounds of each block of 64 logits, from the larger half of a row's digits; then bounds of the logits in the
blocks that are left, from all digits; then the logits that are left.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from gpu_worker.cpu.layers.byte_products import add_bytes, join_bytes, largest_of_bytes
from gpu_worker.cpu.layers.logit_bounds import LARGEST_NUMBER, LEAST_NUMBER, ZERO
from gpu_worker.cpu.numbers import INFINITY, fill, load, number_of, order_of, parts_of, prefetch, scale_of
from gpu_worker.cpu.products import FIRST, NO, multiply_block, multiply_table_token, new_scratch
from gpu_worker.cpu.threads import meet, next_unit
from gpu_worker.cpu.vectors import OUTPUTS, places_of, store_sums, zero_sums

_AT_ONCE = 4  # rows
# So many groups of rows fetch codes of the next block, for so many inputs at a time.
_FETCHING, _STEP = 8, 16
_NOTHING = np.int32(-(2**31))  # less than any order_of()


@njit(fastmath=False)
def likeliest_part(
    rows: Any,
    head: Any,
    is_table: bool,
    copy: Any,
    scratch: Any,
    work: Any,
    arrived: Any,
    meetings: int,
    tokens: Any,
    failed: Any,
) -> None:
    """A thread's part of finding, for each row, the first token with the largest logit, and whether this is infinite or
    NaN; then the token is 0.

    rows [n, width]: after the final norm. head: a packed matrix, or [vocab * width] with is_table. copy: codes, scales,
    errors and blocks of LogitBounds. scratch: upper float32 [n, blocks], the largest upper bound of each block;
    found int32 [2, threads, n, 2], first the order_of() the largest lower bound, and its block, then those of the
    largest logit, and its token; thresholds float32 [n]; tried int64 [threads], how many blocks the thread has tried,
    of all rows together. tokens int64 [n]. failed bool [n]."""
    (count, width), (_, _, thread, threads) = rows.shape, work
    upper, found, thresholds, tried = scratch
    parts = np.empty((count, 2, width), np.int8)
    zeros, sizes = np.empty((2, count), np.int32), np.empty((count, 3), np.float32)
    for row in range(count):
        _split_row(rows[row], parts[row], zeros[:, row], sizes[row])
    best = np.empty((count, 2), np.int32)
    fill(best.reshape(-1), _NOTHING)
    _bound_blocks(parts.reshape(-1), zeros[0], sizes, copy, work, upper, best)
    _copy(best, found[0, thread])
    meetings = meet(arrived, threads, meetings)

    likeliest = np.empty(count, np.int64)
    fill(best.reshape(-1), _NOTHING)
    for row in range(count):
        order, likeliest[row] = _best_of(found[0], row)
        if row % threads == thread:
            digits = parts[row], zeros[:, row], sizes[row]
            threshold = _just_below(number_of(order))
            one = rows[row : row + 1]
            thresholds[row] = _try_block(one, digits, head, is_table, copy, likeliest[row], threshold, best[row])
    meetings = meet(arrived, threads, meetings)

    own_thresholds, num_tried = thresholds.copy(), 0
    unit = next_unit(work, upper.shape[1])
    while unit >= 0:
        for row in range(count):
            if upper[row, unit] >= own_thresholds[row] and unit != likeliest[row]:
                digits = parts[row], zeros[:, row], sizes[row]
                threshold, one = own_thresholds[row], rows[row : row + 1]
                own_thresholds[row] = _try_block(one, digits, head, is_table, copy, unit, threshold, best[row])
                num_tried += 1
        unit = next_unit(work, upper.shape[1])
    _copy(best, found[1, thread])
    tried[thread] = num_tried
    meetings = meet(arrived, threads, meetings)
    for row in range(thread, count, threads):
        order, token = _best_of(found[1], row)
        failed[row] = order >= INFINITY or order <= -INFINITY
        tokens[row] = 0 if failed[row] else token


@njit(inline="always")
def _copy(best: Any, out: Any) -> None:
    for row in range(len(best)):
        out[row, 0], out[row, 1] = best[row, 0], best[row, 1]


@njit(inline="always")
def _best_of(found: Any, row: int) -> Any:
    """The largest of all threads, and its place; of equal ones the first place."""
    order, place = found[0, row]
    for thread in range(1, len(found)):
        other, other_place = found[thread, row]
        if other > order or (other == order and other_place < place):
            order, place = other, other_place
    return order, place


@njit(inline="always")
def _just_below(number: Any) -> Any:
    """Different float32 may be the same bfloat16."""
    return number - abs(number) * np.float32(2**-7)


@njit(fastmath={"reassoc", "contract"})
def _split_row(row: Any, parts: Any, zeros: Any, sizes: Any) -> None:
    """parts int8 [2, width]: high and low of parts_of(). zeros int32 [2]: what the code of 0 adds to their products
    with codes. sizes float32 [3]: the scale, the row's length, and that of its difference to scale * high; the length
    is NaN if there are no bounds for this row."""
    scale, length, rest = scale_of(row), np.float32(0), np.float32(0)
    # False for NaN
    is_usable = scale >= np.float32(LEAST_NUMBER / 127) and scale <= np.float32(LARGEST_NUMBER / 127)
    inverse = np.float32(1) / scale if is_usable else np.float32(0)
    high_zero = low_zero = np.int32(0)
    for i in range(len(row)):
        number = load(row[i]) if is_usable else np.float32(0)
        high, low = parts_of(number * inverse)
        difference = number - high * scale
        length += number * number
        rest += difference * difference
        parts[0, i], parts[1, i] = np.int8(np.int32(high)), np.int8(np.int32(low))
        high_zero += np.int32(ZERO) * np.int32(high)
        low_zero += np.int32(ZERO) * np.int32(low)
    zeros[0], zeros[1] = high_zero, low_zero
    sizes[0], sizes[1], sizes[2] = scale, np.sqrt(length) if is_usable else np.float32(np.nan), np.sqrt(rest)


@njit(fastmath=False)
def _bound_blocks(parts: Any, zeros: Any, sizes: Any, copy: Any, work: Any, upper: Any, best: Any) -> None:
    """A thread's part of the blocks' bounds, from the high parts of the rows. best: the largest lower bounds."""
    (count, blocks), zero = upper.shape, zero_sums()
    groups = (count + _AT_ONCE - 1) // _AT_ONCE
    unit = next_unit(work, blocks)
    while unit >= 0:
        if count == 1:
            _bound_rows((zero,), 0, 1, parts, zeros, sizes, copy, unit, upper, best)
        else:
            for group in range(groups):
                four = (zero, zero, zero, zero)
                _bound_rows(four, group, groups, parts, zeros, sizes, copy, unit, upper, best)
        unit = next_unit(work, blocks)


@njit(inline="always")
def _bound_rows(
    sums: Any, group: int, groups: int, parts: Any, zeros: Any, sizes: Any, copy: Any, block: int, upper: Any, best: Any
) -> None:
    """The bounds of a block for as many rows as `sums` has zeros."""
    (codes, scales, _, blocks), first, end = copy, group * len(sums), len(sizes) - 1
    width = len(parts) // (2 * len(sizes))
    places = places_of(sums, first, end, 2 * width, 0)
    size = OUTPUTS * width
    offset, fetching = block * size, min(groups, _FETCHING)
    lines = (_STEP + fetching - 1) // fetching if groups > 1 and group < fetching else 0
    ahead = offset + size * (fetching + group) // fetching
    for step in range(0, width, _STEP):
        for _ in range(lines):
            prefetch(codes, ahead)
            ahead += 64
        for i in range(step, min(step + _STEP, width), 4):
            sums = add_bytes(sums, codes, offset, parts, places, i)
            offset += 4 * OUTPUTS
    most = largest_of_bytes(sums, zeros, places_of(sums, first, end, 1, 0), scales, block * OUTPUTS)
    for k in range(len(sums)):
        row = min(first + k, end)
        scale, length, rest = sizes[row]
        number, error = most[k] * scale, blocks[block, 0] * length + blocks[block, 1] * rest
        upper[row, block] = number + error if length >= 0 else np.float32(np.inf)
        order = order_of(number - error if length >= 0 else np.float32(-np.inf))
        if order > best[row, 0]:
            best[row, 0], best[row, 1] = order, block


@njit(fastmath=False)
def _try_block(
    row: Any, digits: Any, head: Any, is_table: bool, copy: Any, block: int, threshold: float, best: Any
) -> float:
    """Compute the logits of a block that can be as large as the threshold, and note the largest. Returns a new
    threshold: no smaller logit is needed. row [1, width]."""
    width, first, upper = row.shape[1], block * OUTPUTS, np.empty(OUTPUTS, np.float32)
    _bound_tokens(digits, copy, first, width, upper)
    count, floor = min(OUTPUTS, len(head) // width - first), threshold
    is_needed = False
    for i in range(count):
        is_needed = is_needed or upper[i] >= floor
    if not is_needed:
        return threshold
    logits, own = np.empty((1, OUTPUTS), row.dtype), head[first * width : (first + count) * width]
    if not is_table:
        multiply_block(row, own, FIRST, own[:0], NO, FIRST, new_scratch(row, own, 1), logits)
    for i in range(count):
        if upper[i] >= floor:
            if is_table:
                multiply_table_token(row, own.reshape(count, width), i, logits)
            logit, token = load(logits[0, i]), first + i
            order = order_of(logit)
            if order > best[0] or (order == best[0] and token < best[1]):
                best[0], best[1] = order, token
            if threshold < logit < np.float32(1e38):
                threshold = max(threshold, _just_below(logit))
    return threshold


@njit(inline="always")
def _bound_tokens(digits: Any, copy: Any, first: int, width: int, upper: Any) -> None:
    """The upper bounds of a row's logits in a block, from all digits."""
    (codes, scales, errors, _), (parts, zeros, (scale, length, _)) = copy, digits
    if not length >= 0:
        fill(upper, np.float32(np.inf))
        return
    sums, places = (zero_sums(), zero_sums()), places_of((0, 0), 0, 1, width, 0)
    flat, offset = parts.reshape(-1), first * width
    for i in range(0, width, 4):
        sums = add_bytes(sums, codes, offset + OUTPUTS * i, flat, places, i)
    store_sums(upper, 0, join_bytes(sums[0], sums[1], zeros[0], zeros[1], np.float32(1 / 254)))
    for i in range(OUTPUTS):
        upper[i] = upper[i] * (scales[first + i] * scale) + errors[first + i] * length
