"""Attention of a chunk's rows for heads of a multiple of 64, in vector instructions.

Four rows at a time are multiplied with 64 keys at a time, and then their weights with the values. The scores of a tile
of rows stay in a core's cache. Keys that no row of four sees are skipped."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from gpu_worker.cpu.numbers import FASTMATH, fill, new_factors, softmax
from gpu_worker.cpu.threads import new_counters, next_unit, shared_work
from gpu_worker.cpu.vectors import (
    OUTPUTS,
    add_inputs,
    add_outputs,
    add_scaled,
    load_sums,
    places_of,
    store_outputs,
    store_sums,
    zero_sums,
)

# The most scores of a tile, and the most rows.
_TILE_SCORES = 2**17
_TILE_ROWS = 64


def chunk_scratch(num_keys: int, kv_heads: int, head_dim: int) -> int:
    """How many elements of scratch memory a chunk needs that sees so many keys."""
    return -(-num_keys // OUTPUTS) * OUTPUTS * kv_heads * head_dim


def attend_chunk(
    query: Any,
    keys: Any,
    values: Any,
    block_ids: Any,
    first_row: int,
    count: int,
    kv_len: int,
    window: int,
    scale: float,
    packed: Any,
    seen: Any,
    threads: int,
    out: Any,
) -> None:
    packing, attending = new_counters(threads), new_counters(threads)
    for thread in prange(threads):
        work = shared_work(packing, thread, threads)
        pack_part(keys, values, block_ids, count, kv_len, window, work, packed, seen)
    for thread in prange(threads):
        work = shared_work(attending, thread, threads)
        attend_part(query, keys, first_row, count, kv_len, window, scale, packed, seen, work, out)


@njit(fastmath=FASTMATH)
def pack_part(
    keys: Any, values: Any, block_ids: Any, count: int, kv_len: int, window: int, work: Any, packed: Any, seen: Any
) -> None:
    """A thread's part of the keys and values that the chunk sees."""
    first_key, panels, each = _sizes(keys, count, kv_len, window)
    parts = keys.shape[2] * panels
    part = next_unit(work, parts)
    while part >= 0:
        head, panel = part // panels, part % panels
        begin = head * each
        _pack(keys, values, block_ids, head, panel, first_key, kv_len, packed[begin:], seen[begin:])
        part = next_unit(work, parts)


@njit(fastmath=FASTMATH)
def attend_part(
    query: Any,
    keys: Any,
    first_row: int,
    count: int,
    kv_len: int,
    window: int,
    scale: float,
    packed: Any,
    seen: Any,
    work: Any,
    out: Any,
) -> None:
    """A thread's part of the chunk's rows and heads."""
    first_key, panels, each = _sizes(keys, count, kv_len, window)
    heads, head_dim, kv_heads = query.shape[1], query.shape[2], keys.shape[2]
    prefix = kv_len - count
    size = max(4, min(_TILE_ROWS, _TILE_SCORES // (panels * OUTPUTS) // 4 * 4))
    tiles = (count + size - 1) // size
    pairs = (tiles + 1) // 2
    own = new_factors((size, head_dim), query)
    scores = np.empty((size, panels * OUTPUTS), np.float32)
    sums = np.empty((size, head_dim), np.float32)
    item = next_unit(work, heads * pairs)
    while item >= 0:
        head, pair = item // pairs, item % pairs
        begin = head // (heads // kv_heads) * each
        for end in range(2):
            # A tile from each end: all pairs have about as many keys.
            tile = tiles - 1 - pair if end else pair
            if end == 0 or tile > pair:
                top = tile * size
                _attend_tile(
                    query, head, first_row + top, min(count - top, size), packed[begin:], seen[begin:],
                    prefix + top - first_key, window, scale, own, scores, sums, out,
                )  # fmt: skip
        item = next_unit(work, heads * pairs)


@njit(inline="always")
def _sizes(keys: Any, count: int, kv_len: int, window: int) -> Any:
    """The first key that a chunk sees, its panels of 64 keys, and the packed elements of a KV head."""
    first_key = max(0, kv_len - count - window + 1) if window else 0
    panels = (kv_len - first_key + OUTPUTS - 1) // OUTPUTS
    return first_key, panels, panels * OUTPUTS * keys.shape[3]


@njit(inline="always")
def _pack(
    keys: Any, values: Any, block_ids: Any, head: int, panel: int, first_key: int, kv_len: int, packed: Any, seen: Any
) -> None:
    """64 keys as the outputs of a matrix in products.py, and their values in float32, [head_dim / 64, 64, 64]."""
    block_size, kv_heads, head_dim = keys.shape[1], keys.shape[2], keys.shape[3]
    # Inputs of a matrix that are side by side, two in bfloat16, are moved together.
    num_words = head_dim * keys.itemsize // 4
    words, pairs = keys.reshape(-1).view(np.int32), packed.view(np.int32)
    begin, first = panel * OUTPUTS, first_key + panel * OUTPUTS
    for j in range(min(OUTPUTS, kv_len - first)):
        token = np.intp(block_ids[(first + j) // block_size]) * block_size + (first + j) % block_size
        place = token * kv_heads + head
        for i in range(num_words):
            pairs[begin * num_words + i * OUTPUTS + j] = words[place * num_words + i]
        for d in range(0, head_dim, OUTPUTS):
            value = add_scaled(zero_sums(), values, place * head_dim + d, np.float32(1))
            store_sums(seen, (panel * head_dim + d + j) * OUTPUTS, value)


@njit(fastmath=FASTMATH)
def _attend_tile(
    query: Any, head: int, first_row: int, num_rows: int, keys: Any, values: Any, prefix: int, window: int,
    scale: float, own: Any, scores: Any, sums: Any, out: Any,
) -> None:  # fmt: skip
    """Row i sees the keys up to `prefix` + i, the last `window` of them, counted from the first packed key."""
    head_dim = query.shape[2]
    factors = np.empty(num_rows, np.float32)
    flat = own.reshape(-1), scores.reshape(-1), sums.reshape(-1)  # a division each
    fill(flat[2], np.float32(0))
    for i in range(len(own)):
        one = query[first_row + min(i, num_rows - 1), head]
        for d in range(0, head_dim, OUTPUTS):
            store_outputs(flat[0], (i * head_dim + d,), add_outputs((zero_sums(),), one, (d,)))
    first = max(0, prefix - window + 1) // OUTPUTS if window else 0
    last = (prefix + num_rows - 1) // OUTPUTS
    for panel in range(first, last + 1):
        for row in range(_first_row(panel, prefix), num_rows, 4):
            _score(flat, row, keys, panel, head_dim, scores.shape[1])
    for row in range(num_rows):
        start, stop = max(0, prefix + row + 1 - window) if window else 0, prefix + row + 1
        factors[row] = np.float32(1) / softmax(scores[row, start:stop], scale)
    for panel in range(first, last + 1):
        for row in range(_first_row(panel, prefix), num_rows, 4):
            _weigh(scores, flat, row, min(4, num_rows - row), values, panel, prefix, window, sums)
    results, begin = out.reshape(-1), first_row * out.shape[1] + head * head_dim
    for i in range(num_rows):
        for d in range(0, head_dim, OUTPUTS):
            result = add_scaled(zero_sums(), flat[2], i * head_dim + d, factors[i])
            store_outputs(results, (begin + i * out.shape[1] + d,), (result,))


@njit(inline="always")
def _first_row(panel: int, prefix: int) -> int:
    """The first of four rows that see a key of a panel."""
    return max(0, panel * OUTPUTS - prefix) // 4 * 4


@njit(inline="always")
def _score(flat: Any, row: int, keys: Any, panel: int, head_dim: int, width: int) -> None:
    """The scores of four rows and 64 keys. flat: the tile's rows, scores and sums."""
    begin, zero = panel * OUTPUTS * head_dim, zero_sums()
    total = zero, zero, zero, zero
    places = places_of(total, row, row + 3, head_dim, 0)
    for i in range(0, head_dim, 2):
        total = add_inputs(total, keys, begin + i * OUTPUTS, flat[0], places, i)
    store_outputs(flat[1], places_of(total, row, row + 3, width, panel * OUTPUTS), total)


@njit(inline="always")
def _weigh(
    weights: Any, flat: Any, row: int, num_rows: int, values: Any, panel: int, prefix: int, window: int, sums: Any
) -> None:
    """Add the values of 64 keys to the sums of up to four rows, in the order of the keys. A key that a row does not see
    is left out, because a weight of 0 times NaN would be NaN."""
    head_dim, width = sums.shape[1], weights.shape[1]
    low, high = panel * OUTPUTS, (panel + 1) * OUTPUTS
    # What all four rows see, an even number of keys.
    start = max(low, prefix + row + num_rows - window) if window else low
    stop = min(high, prefix + row + 1)
    stop = start + (stop - start) // 2 * 2 if num_rows == 4 and start < stop else start
    for d in range(0, head_dim, OUTPUTS):
        begin = (panel * (head_dim - OUTPUTS) + d) * OUTPUTS  # plus t * OUTPUTS: where the values of key t begin
        at = row * head_dim + d
        for i in range(num_rows):
            first, last = max(low, prefix + row + i + 1 - window) if window else low, min(high, prefix + row + i + 1)
            _add(weights, row + i, first, min(start, last), values, begin, sums, at + i * head_dim)
        if start < stop:
            zero = zero_sums()
            total = zero, zero, zero, zero
            own, added = places_of(total, row, row + 3, head_dim, d), places_of(total, row, row + 3, width, 0)
            total = add_outputs(total, flat[2], own)
            for t in range(start, stop, 2):
                total = add_inputs(total, values, begin + t * OUTPUTS, flat[1], added, t)
            store_outputs(flat[2], own, total)
        for i in range(num_rows):
            first, last = max(low, prefix + row + i + 1 - window) if window else low, min(high, prefix + row + i + 1)
            _add(weights, row + i, max(first, stop), last, values, begin, sums, at + i * head_dim)


@njit(inline="always")
def _add(weights: Any, row: int, first: int, last: int, values: Any, begin: int, sums: Any, place: int) -> None:
    """Add the values of the keys first..last - 1 to the sums of one row."""
    if first < last:
        total = load_sums(sums, place)
        for t in range(first, last):
            total = add_scaled(total, values, begin + t * OUTPUTS, weights[row, t])
        store_sums(sums, place, total)
