"""Products with a matrix that is packed for oneDNN, or that is an embedding.

For a few rows, a product takes as long as it takes to read the matrix. oneDNN reads it slower than memory delivers it,
and a call of oneDNN costs 14 us. For many rows the two are about as fast, and these functions can run inside of the
function for all layers. They read the same matrix as oneDNN, so there is no second copy of the weights.

A matrix [out, in] is packed as [out / 64, in / 2, 64, 2] in bfloat16 and as [out / 64, in, 64] in float32 on a CPU with
AVX-512. This order of memory is not documented. So for each matrix, the first product is compared with oneDNN's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit, prange, types
from numba.extending import overload

from gpu_worker.cpu.compiling import CompiledKernel
from gpu_worker.cpu.numbers import KERNEL_TYPES, load, prefetch, store, takes_floats
from gpu_worker.cpu.threads import new_counters, next_unit, shared_work
from gpu_worker.cpu.vectors import (
    OUTPUTS,
    add_inputs,
    add_outputs,
    add_products,
    places_of,
    store_outputs,
    total_of,
    widen_weights,
    zero_sums,
)

# With up to so many rows the kernels, called by themselves, are faster than oneDNN and torch, on two Zen 4 cores: for
# packed matrices, and for embeddings.
MOST_ROWS = 32
MOST_TABLE_ROWS = 12
# So many weights of a block are multiplied with all rows. They stay in the second-level cache, next to the next ones
# (in float32, if they were converted).
_PART_BYTES = 64 << 10
# If rows in float32 are multiplied with weights in bfloat16, each product converts the weights again for each six rows.
# For so many rows, converting a block once and reading it again takes less time.
_LEAST_WIDE_ROWS = 48
# All threads together convert rows with up to so many numbers once for all blocks, each for itself; larger ones again
# for each block, which takes 4 to 8 % longer, but less memory.
_MOST_FACTORS = 1 << 22
# So many groups of rows fetch the next weights, for so many inputs at a time.
_FETCHING, _STEP = 8, 16
# One row fetches weights so far ahead: across the end of a page of 4 KiB, where the processor stops to fetch by itself.
# One line in so many is enough, because the processor fetches those beside it. Each line, or one in eight, is slower
# than none.
_AHEAD_BYTES, _LINES_APART = 6 << 10, 4
# Arguments of products in kernels. For each literal in their place, numba would compile a product again.
YES, NO, FIRST = np.bool_(True), np.bool_(False), np.intp(0)


def _multiply(rows: Any, packed: Any, bias: Any, adds: bool, threads: int, out: Any) -> None:
    counters = new_counters(threads)
    for thread in prange(threads):
        multiply_part(rows, packed, bias, adds, FIRST, shared_work(counters, thread, threads), out)


@njit(fastmath=False)  # otherwise it takes over the option of its first caller
def multiply_part(rows: Any, packed: Any, bias: Any, adds: bool, first: int, work: Any, out: Any) -> None:
    """A thread's part of the outputs from block `first` on, of 64 each."""
    blocks, scratch = out.shape[1] // OUTPUTS, new_scratch(rows, packed, work[3])
    unit = next_unit(work, blocks - first)
    while unit >= 0:
        block = first + unit
        multiply_block(rows, packed, block * OUTPUTS * rows.shape[1], bias, adds, block, scratch, out)
        unit = next_unit(work, blocks - first)


def new_scratch(rows: Any, packed: Any, threads: int) -> Any:
    """In a kernel: scratch memory of multiply_block() for these rows and weights: the sums of a block, float32 [rows,
    64]; if the rows are multiplied as float32, all of them so, or room for a part of six; and room for that part's
    weights in float32. What is not needed is empty. threads: how many have such memory."""
    raise NotImplementedError


@overload(new_scratch, inline="always")
def _new_scratch(rows: Any, packed: Any, threads: int) -> Any:
    def without_floats(rows: Any, packed: Any, threads: int) -> Any:
        return _new_sums(rows, packed), rows.reshape(-1)[:0], np.empty(0, np.float32)

    def with_floats(rows: Any, packed: Any, threads: int) -> Any:
        part = min(rows.shape[1], _part_of(packed))
        is_whole = rows.size <= max(_MOST_FACTORS // threads, 6 * part)
        factors = np.empty(rows.size if is_whole else 6 * part, np.float32)
        flat = rows.reshape(-1)
        for i in range(rows.size if is_whole else 0):
            factors[i] = load(flat[i])
        wide = np.empty(part * OUTPUTS if len(rows) >= _LEAST_WIDE_ROWS else 0, np.float32)
        return _new_sums(rows, packed), factors, wide

    return with_floats if takes_floats(rows) else without_floats


@njit(inline="always")
def _new_sums(rows: Any, packed: Any) -> Any:
    return np.empty((len(rows) if rows.shape[1] > _part_of(packed) else 0, OUTPUTS), np.float32)


@njit(inline="always")
def _part_of(packed: Any) -> Any:
    """How many inputs multiply_block() reads for all rows before the next inputs."""
    return _PART_BYTES // packed.itemsize // OUTPUTS


@njit(fastmath=False, _nrt=False)
def multiply_block(
    rows: Any, packed: Any, offset: int, bias: Any, adds: bool, block: int, scratch: Any, out: Any
) -> None:
    """The 64 outputs of a block. Its weights begin at packed[offset]. scratch: from new_scratch()."""
    (count, inputs), (sums, factors, wide), part = rows.shape, scratch, _part_of(packed)
    # Once for all groups: with a check of the shapes for each, it took 1.5 % of a worker's time (demo model).
    flat = rows.reshape(-1), factors, sums.reshape(-1), out.reshape(-1)
    sizes = count, inputs, out.shape[1]
    for first in range(0, inputs, part):
        task = first, min(first + part, inputs), bias, adds, block
        _multiply_inputs(flat, sizes, packed, offset + first * OUTPUTS, wide, task)


def _multiply_inputs(flat: Any, sizes: Any, packed: Any, offset: int, wide: Any, task: Any) -> None:
    """In a kernel: _multiply_groups(). wide: empty, or room for the weights in float32."""
    raise NotImplementedError


@overload(_multiply_inputs, inline="always")
def _multiply_inputs_of_type(flat: Any, sizes: Any, packed: Any, offset: int, wide: Any, task: Any) -> Any:
    def as_packed(flat: Any, sizes: Any, packed: Any, offset: int, wide: Any, task: Any) -> None:
        _multiply_groups(flat, sizes, packed, offset, task)

    def as_floats(flat: Any, sizes: Any, packed: Any, offset: int, wide: Any, task: Any) -> None:
        if not len(wide):
            _multiply_groups(flat, sizes, packed, offset, task)
            return
        for at in range(0, (task[1] - task[0]) * OUTPUTS, 2 * OUTPUTS):
            widen_weights(packed, offset + at, wide, at)
        _multiply_groups(flat, sizes, wide, FIRST, task)

    return as_packed if flat[1].dtype == packed.dtype else as_floats


@njit(fastmath=False, _nrt=False)
def _multiply_groups(flat: Any, sizes: Any, weights: Any, offset: int, task: Any) -> None:
    """The products of all rows, for six at a time, and at the end for four: six are faster. The weights begin at
    weights[offset]. flat: rows, factors, sums and out of multiply_block(), each with one dimension. sizes: how many
    rows, inputs and outputs there are. task: the first input, the one after the last, bias, adds and block."""
    count, zero = sizes[0], zero_sums()
    if count == 1:
        _multiply_rows((zero,), flat, sizes, 0, weights, offset, task, 0, 1)
        return
    fours = min((6 - count % 6) // 2 % 3, (count + 3) // 4)  # at most one row is computed twice, of two rows both
    sixes = (count - 4 * fours + 5) // 6
    groups = sixes + fours
    for group in range(sixes):
        six, row = (zero, zero, zero, zero, zero, zero), 6 * group
        _multiply_rows(six, flat, sizes, row, weights, offset, task, group, groups)
    for group in range(sixes, groups):
        four, row = (zero, zero, zero, zero), 4 * group + 2 * sixes
        _multiply_rows(four, flat, sizes, row, weights, offset, task, group, groups)


@njit(inline="always")
def _multiply_rows(
    total: Any, flat: Any, sizes: Any, row: int, weights: Any, offset: int, task: Any, group: int, groups: int
) -> None:
    """The products of as many rows as `total` has zeros.

    Each of the first groups fetches its share of the next weights: otherwise the cores would wait for memory first, and
    compute then. (Weights in scratch memory have no next ones. Fetching behind them does no harm.)"""
    (rows, factors, sums, products), (count, inputs, outputs) = flat, sizes
    first, last, bias, adds, block = task
    begin, end = block * OUTPUTS, count - 1
    own_sums = places_of(total, row, end, OUTPUTS, 0)
    if first:
        total = add_outputs(total, sums, own_sums)
    numbers, places, i = _factors_of(rows, places_of(total, row, end, inputs, 0), first, last, factors)
    fetching = min(groups, _FETCHING)
    line = 64 // weights.itemsize
    lines = (_STEP * OUTPUTS // line + fetching - 1) // fetching if groups > 1 and group < fetching else 0
    ahead = offset + (last - first) * OUTPUTS * (fetching + group) // fetching
    size = _STEP if lines else last - first
    for step in range(first, last, size):
        for _ in range(lines):
            prefetch(weights, ahead)
            ahead += line
        for _ in range(step, min(step + size, last), 4):
            if len(total) == 1:
                _fetch_ahead(weights, offset)
            total = add_inputs(total, weights, offset, numbers, places, i)
            total = add_inputs(total, weights, offset + 2 * OUTPUTS, numbers, places, i + 2)
            offset += 4 * OUTPUTS
            i += 4
    if last < inputs:
        store_outputs(sums, own_sums, total)
        return
    places = places_of(total, row, end, outputs, begin)
    if adds:
        total = add_outputs(total, products, places)
    elif len(bias):
        total = add_outputs(total, bias, places_of(total, 0, 0, 0, begin))
    store_outputs(products, places, total)


def _factors_of(rows: Any, places: Any, first: int, last: int, factors: Any) -> Any:
    """In a kernel: what add_inputs() multiplies with the weights of the inputs first..last - 1, for rows that begin at
    rows[places[k]]: an array, where its rows begin, and which of its inputs is the first: the rows themselves, or a
    copy in `factors`, if it has not all of them."""
    raise NotImplementedError


@overload(_factors_of, inline="always")
def _factors_of_type(rows: Any, places: Any, first: int, last: int, factors: Any) -> Any:
    def same(rows: Any, places: Any, first: int, last: int, factors: Any) -> Any:
        return rows, places, first

    def converted(rows: Any, places: Any, first: int, last: int, factors: Any) -> Any:
        if len(factors) == len(rows):
            return factors, places, first
        width = last - first
        for k in range(len(places)):
            own, row = factors[k * width : (k + 1) * width], rows[places[k] + first : places[k] + last]
            for i in range(width):
                own[i] = load(row[i])
        return factors, places_of(places, 0, len(places) - 1, width, 0), 0

    return same if factors.dtype == rows.dtype else converted


@njit(inline="always")
def _fetch_ahead(packed: Any, offset: int) -> None:
    """Fetch lines of the weights of four inputs, which one row reads later than those from `offset` on."""
    for byte in range(_AHEAD_BYTES, _AHEAD_BYTES + 4 * OUTPUTS * packed.itemsize, 64 * _LINES_APART):
        prefetch(packed, offset + byte // packed.itemsize)


def _multiply_table(rows: Any, table: Any, threads: int, out: Any) -> None:
    counters = new_counters(threads)
    for thread in prange(threads):
        multiply_table_part(rows, table, shared_work(counters, thread, threads), out)


@njit(fastmath=False)
def multiply_table_part(rows: Any, table: Any, work: Any, out: Any) -> None:
    """A thread's part of the outputs."""
    units = (len(table) + OUTPUTS - 1) // OUTPUTS
    unit = next_unit(work, units)
    while unit >= 0:
        multiply_table_block(rows, table, unit, out)
        unit = next_unit(work, units)


@njit(fastmath=False)
def multiply_table_block(rows: Any, table: Any, block: int, out: Any) -> None:
    """The 64 outputs of a block; of the last one, what is left."""
    for output in range(block * OUTPUTS, min((block + 1) * OUTPUTS, len(table))):
        multiply_table_token(rows, table, output, out)


@njit(inline="always")
def multiply_table_token(rows: Any, table: Any, token: int, out: Any) -> None:
    weights = table[token]
    for row in range(0, len(rows), 4):
        _four_products(rows, row, weights, token, out)


@njit(inline="always")
def _four_products(rows: Any, row: int, weights: Any, output: int, out: Any) -> None:
    """One row, or up to four."""
    last = len(rows) - 1
    a, b, c, d = rows[row], rows[min(row + 1, last)], rows[min(row + 2, last)], rows[min(row + 3, last)]
    total_a, total_b, total_c, total_d = zero_sums(), zero_sums(), zero_sums(), zero_sums()
    if row == last:
        for i in range(0, len(weights), 64):
            total_a = add_products(total_a, weights, i, a, i)
        store(out, (row, output), total_of(total_a))
        return
    for i in range(0, len(weights), 64):
        total_a = add_products(total_a, weights, i, a, i)
        total_b = add_products(total_b, weights, i, b, i)
        total_c = add_products(total_c, weights, i, c, i)
        total_d = add_products(total_d, weights, i, d, i)
    store(out, (row, output), total_of(total_a))
    store(out, (row + 1, output), total_of(total_b))
    if row + 2 <= last:
        store(out, (row + 2, output), total_of(total_c))
    if row + 3 <= last:
        store(out, (row + 3, output), total_of(total_d))


class FewRows:
    """The kernels for one type, and for one thread or several.

    A row's product does not depend on the other rows or on the number of threads, bit for bit."""

    def __init__(self, dtype: torch.dtype, threads: int) -> None:
        number = KERNEL_TYPES[dtype]
        vector, matrix = types.Array(number, 1, "C"), types.Array(number, 2, "C")
        packed = matrix, vector, vector, types.boolean, types.intp, matrix
        self._kernel = CompiledKernel(_multiply, packed, threads, least=0, fastmath=False)
        table = matrix, matrix, types.intp, matrix
        self._table_kernel = CompiledKernel(_multiply_table, table, threads, least=0, fastmath=False)

    def multiply(self, rows: np.ndarray, packed: np.ndarray, bias: np.ndarray, adds: bool, out: np.ndarray) -> None:
        """out [n, out] = rows [n, in] @ the matrix packed [out * in], plus bias [out or 0] if it is not empty; or, with
        `adds`, plus `out`."""
        self._kernel(rows, packed, bias, adds, self._kernel.threads, out)

    def multiply_table(self, rows: np.ndarray, table: np.ndarray, out: np.ndarray) -> None:
        """out [n, out] = rows [n, in] @ table [out, in] transposed. `in` is a multiple of 64."""
        self._table_kernel(rows, table, self._table_kernel.threads, out)
