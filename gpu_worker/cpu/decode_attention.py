"""Decode attention: one kernel for heads of any size, and one in vector instructions for heads of a multiple of 64.

The second reads and converts a key or a value once for two query heads. While it computes a block, it fetches the next
one, because blocks of a table may lie apart, and the processor does not fetch them by itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from gpu_worker.cpu.numbers import FASTMATH, divide, load, prefetch, softmax, store
from gpu_worker.cpu.vectors import (
    add_keys,
    add_outputs,
    add_values,
    places_of,
    prefetch_64,
    store_outputs,
    store_totals,
    zero_sums,
)

WIDTH = 64
_AHEAD = 8  # tokens between a fetch of a key or value and its use, in the first kernel


def attend_narrow(
    query: Any,
    keys: Any,
    values: Any,
    block_ids: Any,
    first_blocks: Any,
    kv_lens: Any,
    rows: Any,
    window: int,
    scale: float,
    out: Any,
) -> None:
    kv_heads = keys.shape[2]
    for i in prange(len(rows)):
        table = block_ids[first_blocks[i] :]
        attend_heads_narrow(query, rows[i], keys, values, table, kv_lens[i], window, scale, 0, kv_heads, out)


@njit(fastmath=FASTMATH)
def attend_heads_narrow(
    query: Any,
    row: int,
    keys: Any,
    values: Any,
    table: Any,
    kv_len: int,
    window: int,
    scale: float,
    first: int,
    last: int,
    out: Any,
) -> None:
    """The query heads of one row that belong to the KV heads first..last - 1."""
    head_dim, group = query.shape[2], query.shape[1] // keys.shape[2]
    begin, heads = first * group, (last - first) * group
    start = max(0, kv_len - window) if window else 0
    scaled = np.empty((heads, head_dim), np.float32)
    for h in range(heads):
        for d in range(head_dim):
            scaled[h, d] = load(query[row, begin + h, d]) * scale
    scores = np.empty((heads, kv_len - start), np.float32)
    _score_narrow(scaled, keys, table, start, kv_len, first, last, scores)
    for h in range(heads):
        divide(scores[h], softmax(scores[h], np.float32(1)))
    total = np.zeros((heads, head_dim), np.float32)
    _weigh_narrow(scores, values, table, start, kv_len, first, last, total)
    for h in range(heads):
        for d in range(head_dim):
            store(out, (row, (begin + h) * head_dim + d), total[h, d])


@njit(inline="always", fastmath=FASTMATH)
def _score_narrow(
    query: Any, keys: Any, table: Any, start: int, kv_len: int, first_head: int, last_head: int, scores: Any
) -> None:
    head_dim, group = keys.shape[3], len(query) // (last_head - first_head)
    for t in range(start, kv_len):
        _fetch_narrow(keys, table, min(t + _AHEAD, kv_len - 1), first_head, last_head)
        key = keys[table[t // keys.shape[1]], t % keys.shape[1]]
        for k in range(last_head - first_head):
            for h in range(k * group, (k + 1) * group):
                score = np.float32(0)
                for d in range(head_dim):
                    score += query[h, d] * load(key[first_head + k, d])
                scores[h, t - start] = score


@njit(inline="always", fastmath=FASTMATH)
def _weigh_narrow(
    weights: Any, values: Any, table: Any, start: int, kv_len: int, first_head: int, last_head: int, total: Any
) -> None:
    head_dim, group = values.shape[3], len(weights) // (last_head - first_head)
    for t in range(start, kv_len):
        _fetch_narrow(values, table, min(t + _AHEAD, kv_len - 1), first_head, last_head)
        value = values[table[t // values.shape[1]], t % values.shape[1]]
        for k in range(last_head - first_head):
            for h in range(k * group, (k + 1) * group):
                weight = weights[h, t - start]
                for d in range(head_dim):
                    total[h, d] += weight * load(value[first_head + k, d])


@njit(inline="always")
def _fetch_narrow(pool: Any, table: Any, t: int, first_head: int, last_head: int) -> None:
    """Fetches these heads of token t of a table into the processor's caches."""
    block_size, kv_heads, head_dim = pool.shape[1], pool.shape[2], pool.shape[3]
    token = (table[t // block_size] * block_size + t % block_size) * kv_heads
    for offset in range((token + first_head) * head_dim, (token + last_head) * head_dim, 64 // pool.itemsize):
        prefetch(pool, offset)


def attend_wide(
    query: Any,
    keys: Any,
    values: Any,
    block_ids: Any,
    first_blocks: Any,
    kv_lens: Any,
    rows: Any,
    window: int,
    scale: float,
    out: Any,
) -> None:
    kv_heads = keys.shape[2]
    for i in prange(len(rows)):
        table = block_ids[first_blocks[i] :]
        attend_heads_wide(query, rows[i], keys, values, table, kv_lens[i], window, scale, 0, kv_heads, out)


@njit(fastmath=FASTMATH)
def attend_heads_wide(
    query: Any,
    row: int,
    keys: Any,
    values: Any,
    table: Any,
    kv_len: int,
    window: int,
    scale: float,
    first: int,
    last: int,
    out: Any,
) -> None:
    """The query heads of one row that belong to the KV heads first..last - 1."""
    head_dim, group = query.shape[2], query.shape[1] // keys.shape[2]
    begin, heads = first * group, (last - first) * group
    start = max(0, kv_len - window) if window else 0
    own = np.empty(heads * head_dim, query.dtype)
    for h in range(heads):
        for d in range(head_dim):
            own[h * head_dim + d] = query[row, begin + h, d]
    length, block_size = kv_len - start, keys.shape[1]
    width = length + 3  # of the scores of a head, because the last one is stored as four
    scores, total = np.empty(heads * width, np.float32), np.zeros(heads * head_dim, np.float32)
    first_block, last_block = start // block_size, (kv_len - 1) // block_size
    for number in range(first_block, last_block + 1):
        tokens = _tokens(number, block_size, start, kv_len)
        if number < last_block:
            later, ahead = keys, np.intp(table[number + 1]) * block_size
        else:
            later, ahead = values, np.intp(table[first_block]) * block_size
        _score_block(own, keys, table[number], tokens, group, first, last, scale, later, ahead, scores, width)
    for h in range(heads):
        weights = scores[h * width : h * width + length]
        divide(weights, softmax(weights, np.float32(1)))
    for number in range(first_block, last_block + 1):
        tokens = _tokens(number, block_size, start, kv_len)
        # Behind the last block, the table may go on with the blocks of the next row, which is often computed next.
        ahead = np.intp(table[min(number + 1, len(table) - 1)]) * block_size
        later = values if number < last_block else keys
        _weigh_block(scores, width, values, table[number], tokens, group, first, last, later, ahead, total)
    for h in range(heads):
        for d in range(head_dim):
            store(out, (row, (begin + h) * head_dim + d), total[h * head_dim + d])


@njit(inline="always")
def _tokens(number: int, block_size: int, start: int, kv_len: int) -> Any:
    """Of block `number`: the first token that is attended to and the one after the last, both counted in the block, and
    the column of its first token in the scores."""
    first = number * block_size
    return max(start - first, 0), min(kv_len - first, block_size), first - start


@njit(inline="always")
def _score_block(
    query: Any, keys: Any, block: int, tokens: Any, group: int, first_head: int, last_head: int, scale: float,
    later: Any, ahead: int, scores: Any, width: int,
) -> None:  # fmt: skip
    """The scores of a block. later, ahead: keys or values, and the first token of the block to fetch meanwhile."""
    (begin, stop, column), zero = tokens, zero_sums()
    for t in range(begin, stop, 4):
        for k in range(first_head, last_head):
            _fetch(later, ahead + t, k, first_head, last_head)
            head = (k - first_head) * group
            for h in range(head, head + group - 1, 2):
                _score((zero, zero), query, h, keys, block, t, stop, k, scale, scores, width, column)
            if group % 2:
                _score((zero,), query, head + group - 1, keys, block, t, stop, k, scale, scores, width, column)


@njit(inline="always")
def _score(
    zeros: Any, query: Any, h: int, keys: Any, block: int, t: int, stop: int, k: int, scale: float, scores: Any,
    width: int, column: int,
) -> None:  # fmt: skip
    """The scores of up to four keys, for as many heads as there are zeros. Fewer than four are filled up with the last
    one; these scores are replaced by those of the next block, or unused."""
    block_size, kv_heads, head_dim = keys.shape[1], keys.shape[2], keys.shape[3]
    size, sums = kv_heads * head_dim, zeros
    place = np.intp(block) * block_size * size + k * head_dim
    for d in range(0, head_dim, WIDTH):
        places = places_of((0, 0, 0, 0), t, stop - 1, size, place + d)
        sums = add_keys(sums, keys, places, query, places_of(zeros, h, h + 1, head_dim, d))
    for i in range(len(zeros)):
        store_totals(scores, (h + i) * width + column + t, scale, sums[i])


@njit(inline="always")
def _weigh_block(
    weights: Any, width: int, values: Any, block: int, tokens: Any, group: int, first_head: int, last_head: int,
    later: Any, ahead: int, total: Any,
) -> None:  # fmt: skip
    """Add a block's values. later, ahead: as for the scores."""
    (begin, stop, column), zero = tokens, zero_sums()
    for t in range(begin, stop, 4):
        for k in range(first_head, last_head):
            _fetch(later, ahead + t, k, first_head, last_head)
            head = (k - first_head) * group
            for h in range(head, head + group - 1, 2):
                _weigh((zero, zero), weights, width, column, h, values, block, t, stop, k, total)
            if group % 2:
                _weigh((zero,), weights, width, column, head + group - 1, values, block, t, stop, k, total)


@njit(inline="always")
def _weigh(
    zeros: Any, weights: Any, width: int, column: int, h: int, values: Any, block: int, t: int, stop: int, k: int,
    total: Any,
) -> None:  # fmt: skip
    """Add up to four values, for as many heads as there are zeros."""
    block_size, kv_heads, head_dim = values.shape[1], values.shape[2], values.shape[3]
    size, at = kv_heads * head_dim, column + t
    place = (np.intp(block) * block_size + t) * size + k * head_dim
    for d in range(0, head_dim, WIDTH):
        own = places_of(zeros, h, h + 1, head_dim, d)
        sums = add_outputs(zeros, total, own)
        if stop - t >= 4:  # a loop of constant length needs no loop
            for j in range(4):
                factors = places_of(zeros, h, h + 1, width, at + j)
                sums = add_values(sums, values, place + j * size + d, weights, factors)
        else:
            for j in range(stop - t):
                factors = places_of(zeros, h, h + 1, width, at + j)
                sums = add_values(sums, values, place + j * size + d, weights, factors)
        store_outputs(total, own, sums)


@njit(inline="always")
def _fetch(pool: Any, token: int, k: int, first_head: int, last_head: int) -> None:
    """Fetch part k of four tokens into the processor's caches: of all heads in the order of memory, which is fastest,
    or head k if only some heads are computed. Addresses behind the block, or behind the pool, do no harm."""
    kv_heads, head_dim = pool.shape[2], pool.shape[3]
    size = kv_heads * head_dim
    begin, stride = token * size + 4 * k * head_dim, head_dim
    if last_head - first_head < kv_heads:
        begin, stride = token * size + k * head_dim, size
    for j in range(4):
        for d in range(0, head_dim, WIDTH):
            prefetch_64(pool, begin + j * stride + d)
