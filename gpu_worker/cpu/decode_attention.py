"""Decode attention: one kernel for heads of any size, and one in vector instructions for heads of a multiple of 64.

In the second, the scores of one key take all query heads of its KV head at once, because the key is read and converted
only once. So it gains most from many query heads per KV head.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from gpu_worker.cpu.numbers import FASTMATH, load, prefetch, softmax, store
from gpu_worker.cpu.vectors import add_products, add_scaled, load_sums, store_sums, store_totals, total_of, zero_sums

WIDTH = 64
# Tokens between a fetch of a key or value and its use. Blocks of a table are not adjacent, so the processor does not
# fetch the next ones by itself. 8 to 16 are equally fast.
_AHEAD = 8


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
        scores[h] /= softmax(scores[h], np.float32(1))
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
    own = np.empty((heads, head_dim), query.dtype)
    for h in range(heads):
        for d in range(head_dim):
            own[h, d] = query[row, begin + h, d]
    scores = np.empty((heads, kv_len - start), np.float32)
    total = np.zeros((heads, head_dim), np.float32)
    for number in range(start // keys.shape[1], (kv_len - 1) // keys.shape[1] + 1):
        _score_wide(own, keys, table, number, start, kv_len, scale, first, last, scores)
    for h in range(heads):
        scores[h] /= softmax(scores[h], np.float32(1))
    for number in range(start // keys.shape[1], (kv_len - 1) // keys.shape[1] + 1):
        _weigh_wide(scores, values, table, number, start, kv_len, first, last, total)
    for h in range(heads):
        for d in range(head_dim):
            store(out, (row, (begin + h) * head_dim + d), total[h, d])


@njit(inline="always")
def _score_wide(
    query: Any,
    keys: Any,
    table: Any,
    number: int,
    start: int,
    kv_len: int,
    scale: float,
    first_head: int,
    last_head: int,
    scores: Any,
) -> None:
    """The scores of the keys in block `number` of a table, up to four tokens at a time."""
    block_size, kv_heads, head_dim = keys.shape[1], keys.shape[2], keys.shape[3]
    group, first, size = len(query) // (last_head - first_head), number * block_size, kv_heads * head_dim
    stop = min(kv_len - first, block_size)
    for t in range(max(start - first, 0), stop, 4):
        num_tokens = min(4, stop - t)
        _fetch_wide(keys, table, number, t + _AHEAD, kv_len, first_head, last_head)
        token = (np.intp(table[number]) * block_size + t) * size + first_head * head_dim
        for k in range(last_head - first_head):
            for h in range(k * group, (k + 1) * group):
                place, own, score = token + k * head_dim, h * head_dim, first + t - start
                if num_tokens == 4:
                    a, b, c, d = zero_sums(), zero_sums(), zero_sums(), zero_sums()
                    for i in range(0, head_dim, WIDTH):
                        a = add_products(a, keys, place + i, query, own + i)
                        b = add_products(b, keys, place + size + i, query, own + i)
                        c = add_products(c, keys, place + 2 * size + i, query, own + i)
                        d = add_products(d, keys, place + 3 * size + i, query, own + i)
                    store_totals(scores, h * scores.shape[1] + score, scale, a, b, c, d)
                else:
                    for j in range(num_tokens):
                        sums = zero_sums()
                        for i in range(0, head_dim, WIDTH):
                            sums = add_products(sums, keys, place + j * size + i, query, own + i)
                        scores[h, score + j] = total_of(sums) * scale


@njit(inline="always")
def _weigh_wide(
    weights: Any,
    values: Any,
    table: Any,
    number: int,
    start: int,
    kv_len: int,
    first_head: int,
    last_head: int,
    total: Any,
) -> None:
    """Add the values in block `number` of a table, up to four tokens at a time."""
    block_size, kv_heads, head_dim = values.shape[1], values.shape[2], values.shape[3]
    group, first, size = len(weights) // (last_head - first_head), number * block_size, kv_heads * head_dim
    stop = min(kv_len - first, block_size)
    for t in range(max(start - first, 0), stop, 4):
        num_tokens = min(4, stop - t)
        _fetch_wide(values, table, number, t + _AHEAD, kv_len, first_head, last_head)
        token = (np.intp(table[number]) * block_size + t) * size + first_head * head_dim
        for k in range(last_head - first_head):
            for h in range(k * group, (k + 1) * group):
                for d in range(0, head_dim, WIDTH):
                    sums = load_sums(total, h * head_dim + d)
                    place, weight = token + k * head_dim + d, first + t - start
                    if num_tokens == 4:  # a loop of constant length needs no loop
                        for j in range(4):
                            sums = add_scaled(sums, values, place + j * size, weights[h, weight + j])
                    else:
                        for j in range(num_tokens):
                            sums = add_scaled(sums, values, place + j * size, weights[h, weight + j])
                    store_sums(total, h * head_dim + d, sums)


@njit(inline="always")
def _fetch_wide(pool: Any, table: Any, number: int, t: int, kv_len: int, first_head: int, last_head: int) -> None:
    """Fetch these heads of four tokens into the processor's caches: of token t, counted from the start of block
    `number`, and the next ones. They may be in later blocks."""
    block_size, kv_heads, head_dim = pool.shape[1], pool.shape[2], pool.shape[3]
    position, last = number * block_size + t, (kv_len - 1) // block_size
    number, t = min(position // block_size, last), position % block_size
    for j in range(4):
        if t + j >= block_size:
            number, t = min(number + 1, last), -j
        token = (np.intp(table[number]) * block_size + t + j) * kv_heads
        for offset in range((token + first_head) * head_dim, (token + last_head) * head_dim, 64 // pool.itemsize):
            prefetch(pool, offset)
