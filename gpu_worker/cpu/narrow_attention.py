"""Decode attention for heads of any size."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from gpu_worker.cpu.numbers import FASTMATH, load, prefetch, softmax, store

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
    _score(scaled, keys, table, start, kv_len, first, last, scores)
    for h in range(heads):
        scores[h] /= softmax(scores[h], np.float32(1))
    total = np.zeros((heads, head_dim), np.float32)
    _weigh(scores, values, table, start, kv_len, first, last, total)
    for h in range(heads):
        for d in range(head_dim):
            store(out, (row, (begin + h) * head_dim + d), total[h, d])


@njit(inline="always", fastmath=FASTMATH)
def _score(
    query: Any, keys: Any, table: Any, start: int, kv_len: int, first_head: int, last_head: int, scores: Any
) -> None:
    head_dim, group = keys.shape[3], len(query) // (last_head - first_head)
    for t in range(start, kv_len):
        _fetch(keys, table, min(t + _AHEAD, kv_len - 1), first_head, last_head)
        key = keys[table[t // keys.shape[1]], t % keys.shape[1]]
        for k in range(last_head - first_head):
            for h in range(k * group, (k + 1) * group):
                score = np.float32(0)
                for d in range(head_dim):
                    score += query[h, d] * load(key[first_head + k, d])
                scores[h, t - start] = score


@njit(inline="always", fastmath=FASTMATH)
def _weigh(
    weights: Any, values: Any, table: Any, start: int, kv_len: int, first_head: int, last_head: int, total: Any
) -> None:
    head_dim, group = values.shape[3], len(weights) // (last_head - first_head)
    for t in range(start, kv_len):
        _fetch(values, table, min(t + _AHEAD, kv_len - 1), first_head, last_head)
        value = values[table[t // values.shape[1]], t % values.shape[1]]
        for k in range(last_head - first_head):
            for h in range(k * group, (k + 1) * group):
                weight = weights[h, t - start]
                for d in range(head_dim):
                    total[h, d] += weight * load(value[first_head + k, d])


@njit(inline="always")
def _fetch(pool: Any, table: Any, t: int, first_head: int, last_head: int) -> None:
    """Fetches these heads of token t of a table into the processor's caches."""
    block_size, kv_heads, head_dim = pool.shape[1], pool.shape[2], pool.shape[3]
    token = (table[t // block_size] * block_size + t % block_size) * kv_heads
    for offset in range((token + first_head) * head_dim, (token + last_head) * head_dim, 64 // pool.itemsize):
        prefetch(pool, offset)
