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
from numba import config, prange, types

from gpu_worker.cpu.chunk_attention import attend_chunk
from gpu_worker.cpu.compiling import CompiledKernel, compile_in_child
from gpu_worker.cpu.decode_attention import attend_narrow, attend_wide
from gpu_worker.cpu.layer_kernels import norm, rotate, silu_and_mul, write
from gpu_worker.cpu.numbers import INFINITY, KERNEL_TYPES, fill, load, order_of, parts_of, scale_of, softmax, store
from services.runtime.logs import get_logger

_log = get_logger(__name__)

_MIN_ROWS = 128
_PART_TOKENS = 256


def _mask_softmax(scores: Any, head_rows: int, group: int, window: int, scale: float) -> None:
    keys = scores.shape[1]
    for row in prange(len(scores)):
        stop = keys - (head_rows - 1 - row % head_rows) // group
        start = max(0, stop - window) if window else 0
        seen = scores[row, start:stop]
        factor = np.float32(1) / softmax(seen, scale)
        for t in range(len(seen)):
            seen[t] *= factor
        fill(scores[row, :start], np.float32(0))
        fill(scores[row, stop:], np.float32(0))


def _split(x: Any, parts: Any, scales: Any) -> None:
    rows, width = x.shape
    for row in prange(rows):
        scale = scale_of(x[row])
        scales[row] = scale
        if scale != scale:  # NaN
            for d in range(width):
                parts[row, d] = parts[rows + row, d] = np.uint8(128)
            continue
        inverse = np.float32(1) / scale
        for d in range(width):
            high, low = parts_of(load(x[row, d]) * inverse)
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


def _largest(logits: Any, tokens: Any, failed: Any) -> None:
    vocab = logits.shape[1]
    for row in prange(len(logits)):
        best, token = np.int32(-(2**31)), 0
        # First find the part that has the largest logit: a loop that also notes the token uses no vector instructions.
        # Nor does one with indices that numba does not know to be positive.
        for begin in range(0, vocab, _PART_TOKENS):
            part, most = logits[row, begin : begin + _PART_TOKENS], np.int32(-(2**31))
            for t in range(len(part)):
                most = max(most, order_of(load(part[t])))
            if most > best:
                best, token = most, begin
        while order_of(load(logits[row, token])) != best:
            token += 1
        failed[row] = best >= INFINITY or best <= -INFINITY
        tokens[row] = 0 if failed[row] else token


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


def compile_kernels(dtype: torch.dtype, threads: int, *, by_size: bool, wide_heads: bool) -> None:
    """Compile the kernels that Kernels has with these options, if the cache lacks them: see compile_in_child()."""
    variant = f"{min(threads, config.NUMBA_NUM_THREADS, 2)}, by_size={by_size}, wide_heads={wide_heads}"
    made = f"Kernels({dtype}, {variant}, compiles_here=True)"
    first = attend_wide if wide_heads else attend_narrow
    compile_in_child(first, f"import torch; from {__name__} import Kernels; {made}")


class Kernels:
    """The kernels for arrays of one type, for one thread or for several. All are compiled here.

    attend(query [rows, heads, head_dim], each head contiguous, keys and values [blocks, block_size, kv_heads,
        head_dim], block_ids [n], first_blocks [decodes], kv_lens [decodes], rows [decodes], window, scale, out [rows,
        heads * head_dim]): decode attention of these rows. A decode's block table begins at its first_blocks in
        block_ids. block_ids, first_blocks, kv_lens and rows are int32. `window` 0: none.
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
    write(key and value [rows, kv_heads, head_dim], slots int64 [rows], keys and values [blocks, block_size, kv_heads,
        head_dim]): the key and value of each row go to its slot, block * block_size + place in the block.
    silu_and_mul(gate_up [rows, 2 * width], out [rows, width])
    largest(logits [rows, vocab], tokens int64 [rows], failed bool [rows]): the first token with the largest logit of
        each row. failed: the largest logit is infinite or NaN, and the token is 0.
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
        """`wide_heads`: attend() is attend_wide(), and there is attend_chunk(). `by_size`: a few rows
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
        turned = cube, types.intp, angles, types.boolean, matrix, types.intp, single
        attention = attend_wide if wide_heads else attend_narrow
        began_s = time.monotonic()
        if not compiles_here:
            compile_kernels(dtype, threads, by_size=by_size, wide_heads=wide_heads)
        self.attend_chunk = None
        if wide_heads:
            integer, packed, seen = types.intp, types.Array(number, 1, "C"), types.Array(single, 1, "C")
            sizes = integer, integer, integer, integer
            chunk = strided, blocks, blocks, ints, *sizes, single, packed, seen, integer, matrix
            self.attend_chunk = CompiledKernel(attend_chunk, chunk, threads, least=0)
        softmax = types.Array(single, 2, "C"), types.intp, types.intp, types.intp, single
        self.mask_softmax = CompiledKernel(_mask_softmax, softmax, threads, least)
        self.norm = CompiledKernel(norm, (matrix, vector, single, matrix), threads, least)
        self.rotate = CompiledKernel(rotate, turned, threads, least)
        written = strided, strided, types.Array(types.int64, 1, "C"), blocks, blocks
        self.write = CompiledKernel(write, written, threads, least)
        self.silu_and_mul = CompiledKernel(silu_and_mul, (matrix, matrix), threads, least)
        chosen = types.Array(types.int64, 1, "C"), types.Array(types.boolean, 1, "C")
        self.largest = CompiledKernel(_largest, (matrix, *chosen), threads, least=2)
        self.attend = CompiledKernel(attention, attend, threads, least_decodes, rows_at=6)
        _log.info("the kernels are ready", seconds=round(time.monotonic() - began_s, 1))
