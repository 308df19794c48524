"""Kernels of a decoder layer for CPUs, which numba compiles at a worker's first start and keeps in its cache folder.

Arrays are float32, or bfloat16 as int16 (numbers.py); sums are float32. A row's result depends only on the row's own
inputs and on whether the call runs in one thread or in several, bit for bit, also after a restart. The kernels release
Python's lock.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from numba import config, njit, prange, types

from gpu_worker.cpu.chunk_attention import attend_chunk
from gpu_worker.cpu.compiling import CompiledKernel, compile_in_child
from gpu_worker.cpu.numbers import (
    FASTMATH,
    KERNEL_TYPES,
    bits_of_float,
    exp,
    float_of_bits,
    load,
    prefetch,
    softmax,
    store,
)
from gpu_worker.cpu.wide_attention import attend_wide
from services.runtime.logs import get_logger

_log = get_logger(__name__)

_MIN_ROWS = 128

# Tokens between a fetch of a key or value and its use. Blocks of a table are not adjacent, so the processor does not
# fetch the next ones by itself. 2 to 16 are equally fast.
_AHEAD = 4


def _attend(
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
    heads, head_dim = query.shape[1], query.shape[2]
    for i in prange(len(rows)):
        row, kv_len, table = rows[i], kv_lens[i], block_ids[first_blocks[i] :]
        start = max(0, kv_len - window) if window else 0
        scaled = np.empty((heads, head_dim), np.float32)
        for h in range(heads):
            for d in range(head_dim):
                scaled[h, d] = load(query[row, h, d]) * scale
        scores = np.empty((heads, kv_len - start), np.float32)
        _score(scaled, keys, table, start, kv_len, scores)
        for h in range(heads):
            scores[h] /= softmax(scores[h], np.float32(1))
        total = np.zeros((heads, head_dim), np.float32)
        _weigh(scores, values, table, start, kv_len, total)
        for h in range(heads):
            for d in range(head_dim):
                store(out, (row, h * head_dim + d), total[h, d])


@njit(inline="always", fastmath=FASTMATH)
def _score(query: Any, keys: Any, table: Any, start: int, kv_len: int, scores: Any) -> None:
    kv_heads, head_dim = keys.shape[2], keys.shape[3]
    group = len(query) // kv_heads
    for t in range(start, kv_len):
        _fetch(keys, table, min(t + _AHEAD, kv_len - 1))
        key = keys[table[t // keys.shape[1]], t % keys.shape[1]]
        for k in range(kv_heads):
            for h in range(k * group, (k + 1) * group):
                score = np.float32(0)
                for d in range(head_dim):
                    score += query[h, d] * load(key[k, d])
                scores[h, t - start] = score


def _mask_softmax(scores: Any, head_rows: int, group: int, window: int, scale: float) -> None:
    keys = scores.shape[1]
    for row in prange(len(scores)):
        stop = keys - (head_rows - 1 - row % head_rows) // group
        start = max(0, stop - window) if window else 0
        seen = scores[row, start:stop]
        factor = np.float32(1) / softmax(seen, scale)
        for t in range(len(seen)):
            seen[t] *= factor
        scores[row, :start], scores[row, stop:] = 0, 0


@njit(inline="always", fastmath=FASTMATH)
def _weigh(weights: Any, values: Any, table: Any, start: int, kv_len: int, total: Any) -> None:
    kv_heads, head_dim = values.shape[2], values.shape[3]
    group = len(weights) // kv_heads
    for t in range(start, kv_len):
        _fetch(values, table, min(t + _AHEAD, kv_len - 1))
        value = values[table[t // values.shape[1]], t % values.shape[1]]
        for k in range(kv_heads):
            for h in range(k * group, (k + 1) * group):
                weight = weights[h, t - start]
                for d in range(head_dim):
                    total[h, d] += weight * load(value[k, d])


@njit(inline="always")
def _fetch(pool: Any, table: Any, t: int) -> None:
    """Fetches token t of a table into the processor's caches."""
    block_size, token_size = pool.shape[1], pool.shape[2] * pool.shape[3]
    begin = (table[t // block_size] * block_size + t % block_size) * token_size
    for offset in range(begin, begin + token_size, 64 // pool.itemsize):
        prefetch(pool, offset)


def _norm(x: Any, weight: Any, eps: float, out: Any) -> None:
    width = x.shape[1]
    for row in prange(len(x)):
        squares = np.float32(0)
        for d in range(width):
            squares += load(x[row, d]) * load(x[row, d])
        factor = np.float32(1) / np.sqrt(squares / np.float32(width) + eps)
        for d in range(width):
            store(out, (row, d), load(x[row, d]) * factor * load(weight[d]))


def _rotate(heads: Any, num_heads: int, angles: Any, has_norms: bool, norms: Any, num_queries: int, eps: float) -> None:
    head_dim = heads.shape[2]
    for row in prange(len(heads)):
        for h in range(num_heads):
            head = heads[row, h]
            factor = np.float32(1)
            if has_norms:
                squares = np.float32(0)
                for d in range(head_dim):
                    squares += load(head[d]) * load(head[d])
                factor = np.float32(1) / np.sqrt(squares / np.float32(head_dim) + eps)
            turns = angles[row]
            # Two loops, because the compiler does not vectorize a loop that contains the condition.
            if has_norms:
                norm = norms[0 if h < num_queries else 1]
                for pair in range(head_dim // 2):
                    real, imaginary = load(head[2 * pair]), load(head[2 * pair + 1])
                    real *= factor * load(norm[2 * pair])
                    imaginary *= factor * load(norm[2 * pair + 1])
                    _turn(head, pair, real, imaginary, turns)
            else:
                for pair in range(head_dim // 2):
                    real, imaginary = load(head[2 * pair]), load(head[2 * pair + 1])
                    _turn(head, pair, real, imaginary, turns)


@njit(inline="always", fastmath=FASTMATH)
def _turn(head: Any, pair: Any, real: Any, imaginary: Any, turns: Any) -> None:
    cos, sin = turns[2 * pair], turns[2 * pair + 1]
    store(head, 2 * pair, real * cos - imaginary * sin)
    store(head, 2 * pair + 1, real * sin + imaginary * cos)


def _silu_and_mul(gate_up: Any, out: Any) -> None:
    width = out.shape[1]
    for row in prange(len(out)):
        for d in range(width):
            gate = load(gate_up[row, d])
            store(out, (row, d), gate / (np.float32(1) + exp(-gate)) * load(gate_up[row, width + d]))


def _split(x: Any, parts: Any, scales: Any) -> None:
    rows, width = x.shape
    for row in prange(rows):
        # The largest absolute value, by its bits: comparing them as integers is vectorized, even if some are NaN.
        most = np.int32(0)
        for d in range(width):
            most = max(most, np.int32(bits_of_float(load(x[row, d])) & np.uint32(0x7FFFFFFF)))
        if most >= np.int32(0x7F800000):  # NaN or infinity
            scales[row] = np.float32(np.nan)
            for d in range(width):
                parts[row, d] = parts[rows + row, d] = np.uint8(128)
            continue
        scale = max(float_of_bits(np.uint32(most)), np.float32(1e-30)) / np.float32(127)
        scales[row] = scale
        inverse = np.float32(1) / scale
        for d in range(width):
            scaled = load(x[row, d]) * inverse
            high = np.floor(scaled + np.float32(0.5))
            low = np.floor((scaled - high) * np.float32(254) + np.float32(0.5))
            parts[row, d] = np.uint8(np.int32(high) + np.int32(128))
            parts[rows + row, d] = np.uint8(np.int32(low) + np.int32(128))


def _join(product: Any, scales: Any, bias: Any, adds: bool, out: Any) -> None:
    rows, width = out.shape
    low = np.float32(1 / 254)
    for row in prange(rows):
        scale = scales[row]
        # A loop for each case: one loop for all is not compiled to vector instructions.
        if adds:
            for d in range(width):
                number = (product[row, d] + product[rows + row, d] * low) * scale
                store(out, (row, d), number + load(out[row, d]))
        elif len(bias):
            for d in range(width):
                number = (product[row, d] + product[rows + row, d] * low) * scale
                store(out, (row, d), number + load(bias[d]))
        else:
            for d in range(width):
                store(out, (row, d), (product[row, d] + product[rows + row, d] * low) * scale)


class Int8Kernels:
    """The kernels around the int8 products of rows of one type (cpu/int8.py), for one thread or for several.

    split(x [rows, width], parts uint8 [2 * rows, width], scales float32 [rows]): x = scales * (high + low / 254), with
        high and low in -127..127. Parts are first all rows of high + 128, then all rows of low + 128. The scale of a
        row with NaN or infinity is NaN.
    join(product float32 [2 * rows, width], scales float32 [rows], bias [width or 0], adds, out [rows, width]): the rows
        of the product joined again, plus the bias if it is not empty; with `adds` (and no bias) added to `out`.
    """

    def __init__(self, dtype: torch.dtype, threads: int, *, by_size: bool = True) -> None:
        """`by_size`: as of Kernels."""
        number = KERNEL_TYPES[dtype]
        matrix, parts, product = (types.Array(of, 2, "C") for of in (number, types.uint8, types.float32))
        vector, scales = types.Array(number, 1, "C"), types.Array(types.float32, 1, "C")
        least = _MIN_ROWS if by_size else 0
        # Not rounded as the compiler likes: a row must be split the same way in both variants.
        self.split = CompiledKernel(_split, (matrix, parts, scales), threads, least, fastmath=False)
        joined = product, scales, vector, types.boolean, matrix
        self.join = CompiledKernel(_join, joined, threads, least, rows_at=1, fastmath=False)


class Kernels:
    """The kernels for arrays of one type, for one thread or for several. All are compiled here.

    attend(query [rows, heads, head_dim], keys and values [blocks, block_size, kv_heads, head_dim], block_ids [n],
        first_blocks [decodes], kv_lens [decodes], rows [decodes], window, scale, out [rows, heads * head_dim]):
        decode attention of these rows. A decode's block table begins at its first_blocks in block_ids. block_ids,
        first_blocks, kv_lens and rows are int32. `window` 0: none.
    attend_chunk(query, keys, values, block_ids, first_row, count, kv_len, window, scale, packed, seen, threads, out):
        attention of `count` rows from first_row on, the last tokens of a sequence of kv_len tokens. None without
        `wide_heads`. packed and seen: scratch memory of chunk_scratch() elements, of the pool's type and float32.
    mask_softmax(scores float32 [kv_heads * head_rows, keys], head_rows, group, window, scale): the causal softmax of
        scores * scale, in place. For each KV head there are `group` rows of scores (its query heads) per row of a
        chunk. The chunk's last row sees all keys, the row before it all but the last, and so on.
    norm(x [rows, width], weight [width], eps, out [rows, width]): RMS norm.
    rotate(heads [rows, n, head_dim], num_heads, angles float32 [rows, head_dim], has_norms, norms [2, head_dim],
        num_queries, eps): rotates the first num_heads heads, in place. With has_norms, an RMS norm comes first, with
        the weight norms[0] for the first num_queries heads, and norms[1] for the other heads.
    silu_and_mul(gate_up [rows, 2 * width], out [rows, width])
    """

    def __init__(
        self,
        dtype: torch.dtype,
        threads: int,
        *,
        by_size: bool = True,
        wide_heads: bool = False,
        compiles_here: bool = False,
    ) -> None:
        """`wide_heads`: attend() is the kernel of wide_attention.py, and there is attend_chunk(). `by_size`: a few rows
        run in one thread, where that is faster. Without it every call runs in the same number of threads, so that a
        row's result depends only on the row's own inputs, bit for bit. `compiles_here`: what the cache lacks is
        compiled by this process; see compile_in_child()."""
        number, ints, single = KERNEL_TYPES[dtype], types.Array(types.int32, 1, "C"), types.float32
        vector, matrix, cube = (types.Array(number, dimensions, "C") for dimensions in (1, 2, 3))
        blocks, strided = types.Array(number, 4, "C"), types.Array(number, 3, "A")
        angles = types.Array(single, 2, "C")
        # With fewer rows than this, one thread is faster, because waking the other threads takes time.
        least, least_decodes = (_MIN_ROWS, 2) if by_size else (0, 0)

        attend = strided, blocks, blocks, ints, ints, ints, ints, types.intp, single, matrix
        rotate = cube, types.intp, angles, types.boolean, matrix, types.intp, single
        attention = attend_wide if wide_heads else _attend
        began_s = time.monotonic()
        if min(threads, config.NUMBA_NUM_THREADS) > 1 and not compiles_here:
            made = f"Kernels({dtype}, 2, wide_heads={wide_heads}, compiles_here=True)"
            compile_in_child(attention, attend, f"import torch; from {__name__} import Kernels; {made}")
        self.attend_chunk = None
        if wide_heads:
            integer, packed, seen = types.intp, types.Array(number, 1, "C"), types.Array(single, 1, "C")
            sizes = integer, integer, integer, integer
            chunk = strided, blocks, blocks, ints, *sizes, single, packed, seen, integer, matrix
            self.attend_chunk = CompiledKernel(attend_chunk, chunk, threads, least=0)
        softmax = types.Array(single, 2, "C"), types.intp, types.intp, types.intp, single
        self.mask_softmax = CompiledKernel(_mask_softmax, softmax, threads, least)
        self.norm = CompiledKernel(_norm, (matrix, vector, single, matrix), threads, least)
        self.rotate = CompiledKernel(_rotate, rotate, threads, least)
        self.silu_and_mul = CompiledKernel(_silu_and_mul, (matrix, matrix), threads, least)
        self.attend = CompiledKernel(attention, attend, threads, least_decodes, rows_at=6)
        _log.info("the kernels are ready", seconds=round(time.monotonic() - began_s, 1))
