"""Products of a few rows with a matrix that is packed for oneDNN, or that is an embedding.

For a few rows, a product takes as long as it takes to read the matrix. oneDNN reads it slower than memory delivers it,
and a call of oneDNN costs 14 us. These kernels read the same matrix, so there is no second copy of the weights.

A matrix [out, in] is packed as [out / 64, in / 2, 64, 2] in bfloat16 and as [out / 64, in, 64] in float32 on a CPU with
AVX-512. This order of memory is not documented. So for each matrix, the first product is compared with oneDNN's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit, prange, types

from gpu_worker.cpu.compiling import CompiledKernel
from gpu_worker.cpu.numbers import KERNEL_TYPES, load, prefetch, store
from gpu_worker.cpu.vectors import OUTPUTS, add_inputs, add_products, load_sums, store_sums, total_of, zero_sums

# With up to so many rows the kernels are faster than oneDNN and torch, on two Zen 4 cores: for packed matrices, and for
# embeddings.
MOST_ROWS = 32
MOST_TABLE_ROWS = 12
# With more than four rows, so many weights of a block of outputs are multiplied at a time. They stay in the first-level
# cache for all rows.
_PART_BYTES = 16 << 10


def _multiply(rows: Any, packed: Any, bias: Any, adds: bool, threads: int, out: Any) -> None:
    for thread in prange(threads):
        multiply_part(rows, packed, bias, adds, thread, threads, out)


@njit(fastmath=False)  # otherwise it takes over the option of its first caller
def multiply_part(rows: Any, packed: Any, bias: Any, adds: bool, thread: int, threads: int, out: Any) -> None:
    """A thread's part of the outputs."""
    blocks = out.shape[1] // OUTPUTS
    sums = np.empty((len(rows) + 3, OUTPUTS), np.float32)
    for block in range(blocks * thread // threads, blocks * (thread + 1) // threads):
        multiply_block(rows, packed, bias, adds, block, sums, out)


@njit(fastmath=False)
def multiply_block(rows: Any, packed: Any, bias: Any, adds: bool, block: int, sums: Any, out: Any) -> None:
    """The 64 outputs of a block. sums: scratch memory, float32 [rows + 3, 64]."""
    count, inputs = rows.shape
    begin = block * OUTPUTS * inputs
    groups = (count + 3) // 4
    step = 2 * OUTPUTS // groups
    part = _PART_BYTES // packed.itemsize // OUTPUTS if groups > 1 else inputs
    for first in range(0, inputs, part):
        last = min(first + part, inputs)
        for group in range(groups):
            row = 4 * group
            ahead = begin + last * OUTPUTS + part * OUTPUTS * group // groups
            if row == count - 1:
                _add_row(rows[row], packed, begin, first, last, sums[row:])
            elif groups > 1:
                _add_four_rows(rows[row:], packed, begin, first, last, sums[row:], True, ahead, step)
            else:
                _add_four_rows(rows[row:], packed, begin, first, last, sums[row:], False, ahead, step)
    for row in range(count):
        _write(sums[row], bias, adds, row, block * OUTPUTS, out)


@njit(inline="always")
def _add_row(row: Any, packed: Any, begin: int, first: int, last: int, sums: Any) -> None:
    """Adds the products of the inputs first..last - 1."""
    total = _begun(sums, 0, first)
    for i in range(first, last, 2):
        total = add_inputs(total, packed, begin + i * OUTPUTS, row, i)
    store_sums(sums, 0, total)


@njit(inline="always")
def _add_four_rows(
    rows: Any, packed: Any, begin: int, first: int, last: int, sums: Any, fetches: bool, ahead: int, step: int
) -> None:
    """As _add_row(), for the first four rows; if there are fewer, for the last one several times. With `fetches`, each
    of the groups fetches its share of the next part's weights, which begins at `ahead`: otherwise the cores would wait
    for memory first, and compute then."""
    end, line = len(rows) - 1, step // packed.itemsize
    a, b, c, d = rows[0], rows[min(1, end)], rows[min(2, end)], rows[min(3, end)]
    total_a, total_b = _begun(sums, 0, first), _begun(sums, 1, first)
    total_c, total_d = _begun(sums, 2, first), _begun(sums, 3, first)
    for i in range(first, last, 2):
        if fetches:  # for two groups in bfloat16 two lines of the cache, in float32 four
            prefetch(packed, ahead)
            prefetch(packed, ahead + line)
            if packed.itemsize == 4:
                prefetch(packed, ahead + 2 * line)
                prefetch(packed, ahead + 3 * line)
            ahead += step
        offset = begin + i * OUTPUTS
        total_a = add_inputs(total_a, packed, offset, a, i)
        total_b = add_inputs(total_b, packed, offset, b, i)
        total_c = add_inputs(total_c, packed, offset, c, i)
        total_d = add_inputs(total_d, packed, offset, d, i)
    store_sums(sums, 0, total_a)
    store_sums(sums, OUTPUTS, total_b)
    store_sums(sums, 2 * OUTPUTS, total_c)
    store_sums(sums, 3 * OUTPUTS, total_d)


@njit(inline="always")
def _begun(sums: Any, row: int, first: int) -> Any:
    """The sums of a row over the inputs before `first`."""
    return load_sums(sums, row * OUTPUTS) if first else zero_sums()


@njit(inline="always")
def _write(sums: Any, bias: Any, adds: bool, row: int, begin: int, out: Any) -> None:
    # A loop for each case: one loop for all is not compiled to vector instructions.
    if adds:
        for j in range(OUTPUTS):
            store(out, (row, begin + j), sums[j] + load(out[row, begin + j]))
    elif len(bias):
        for j in range(OUTPUTS):
            store(out, (row, begin + j), sums[j] + load(bias[begin + j]))
    else:
        for j in range(OUTPUTS):
            store(out, (row, begin + j), sums[j])


def _multiply_table(rows: Any, table: Any, threads: int, out: Any) -> None:
    for thread in prange(threads):
        multiply_table_part(rows, table, thread, threads, out)


@njit(fastmath=False)
def multiply_table_part(rows: Any, table: Any, thread: int, threads: int, out: Any) -> None:
    """A thread's part of the outputs."""
    for output in range(len(table) * thread // threads, len(table) * (thread + 1) // threads):
        weights = table[output]
        for row in range(0, len(rows), 4):
            _four_products(rows, row, weights, output, out)


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
