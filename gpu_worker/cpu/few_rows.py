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
from gpu_worker.cpu.numbers import KERNEL_TYPES, load, store
from gpu_worker.cpu.vectors import OUTPUTS, add_inputs, add_products, store_sums, total_of, zero_sums

# With up to so many rows the kernel is faster than oneDNN, on two Zen 4 cores.
MOST_ROWS = 12


def _multiply(rows: Any, packed: Any, bias: Any, adds: bool, threads: int, out: Any) -> None:
    for thread in prange(threads):
        multiply_part(rows, packed, bias, adds, thread, threads, out)


@njit(fastmath=False)  # otherwise it takes over the option of its first caller
def multiply_part(rows: Any, packed: Any, bias: Any, adds: bool, thread: int, threads: int, out: Any) -> None:
    """A thread's part of the outputs."""
    blocks = out.shape[1] // OUTPUTS
    sums = np.empty((4, OUTPUTS), np.float32)
    for block in range(blocks * thread // threads, blocks * (thread + 1) // threads):
        multiply_block(rows, packed, bias, adds, block, sums, out)


@njit(fastmath=False)
def multiply_block(rows: Any, packed: Any, bias: Any, adds: bool, block: int, sums: Any, out: Any) -> None:
    """The 64 outputs of a block. sums: scratch memory, float32 [4, 64]."""
    count, inputs = rows.shape
    begin, row = block * OUTPUTS * inputs, 0
    while row < count:
        # One row, or four: if fewer are left, the last one several times.
        num_rows = 1 if row == count - 1 else min(4, count - row)
        if num_rows == 1:
            _one_row(rows[row], packed, begin, sums)
        else:
            _four_rows(rows[row:], packed, begin, sums)
        for i in range(num_rows):
            _write(sums[i], bias, adds, row + i, block * OUTPUTS, out)
        row += num_rows


@njit(inline="always")
def _one_row(row: Any, packed: Any, begin: int, sums: Any) -> None:
    total = zero_sums()
    for i in range(0, len(row), 2):
        total = add_inputs(total, packed, begin + i * OUTPUTS, row, i)
    store_sums(sums, 0, total)


@njit(inline="always")
def _four_rows(rows: Any, packed: Any, begin: int, sums: Any) -> None:
    last = len(rows) - 1
    a, b, c, d = rows[0], rows[min(1, last)], rows[min(2, last)], rows[min(3, last)]
    total_a, total_b, total_c, total_d = zero_sums(), zero_sums(), zero_sums(), zero_sums()
    for i in range(0, rows.shape[1], 2):
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
    count = len(rows)
    for thread in prange(threads):
        for output in range(len(table) * thread // threads, len(table) * (thread + 1) // threads):
            weights = table[output]
            for row in range(0, count, 4):
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
