"""Matrix products with int8 weights, in oneDNN's int8 kernels.

These kernels multiply int8 with int8 and sum exactly. So that only the weights are rounded to int8, a row of
activations is split into two rows of int8: row = scale * (high + low / 254). The error is at most scale / 508, or
1/64,000 of the row's largest number. The weights are read once for both. (Ozaki et al., "Error-free transformations of
matrix multiplication by using fast routines of matrix multiplication", 2012, split float64 like this.)
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_worker.cpu.kernels import Int8Kernels
from gpu_worker.cpu.numbers import as_array
from gpu_worker.models.int8 import Int8Matrix, quantize

# torch's inductor compiles quantized linear layers to these operations. They have no public name.
_onednn: Any = torch.ops.onednn

# Of the activations. The kernels are fast for uint8, and very slow for int8.
_ZERO_POINT = 128
# The most elements of a product that are computed at once. Meanwhile they take twice as many float32 numbers (a high
# and a low part).
_TILE_NUMBERS = 2**21
_MIN_TILE_ROWS = 16


def can_multiply_int8() -> bool:
    """Whether oneDNN multiplies int8 exactly on this CPU. Without VNNI instructions, sums of two products may overflow
    16 bits (oneDNN's developer guide, "Nuances of int8 computations")."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    has_operations = hasattr(_onednn, "qlinear_prepack") and hasattr(_onednn, "qlinear_pointwise")
    if not has_operations or not torch.cpu._is_vnni_supported():
        return False
    # ONEDNN_MAX_CPU_ISA can forbid the instructions that the CPU has. These sums would overflow without them.
    largest = torch.full((64, 512), 127, dtype=torch.int8)
    weight = _onednn.qlinear_prepack(largest, None), torch.ones(64), torch.zeros(1, dtype=torch.int32)
    product = _product(torch.full((16, 512), 255, dtype=torch.uint8), *weight)
    return bool((product == 127 * 127 * 512).all())


def _product(parts: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Activations, uint8 with _ZERO_POINT, times a packed matrix: float32 [rows, out]."""
    # The scale and the zero point of activations; weights; no bias; scale, zero point and type of the result; no
    # function of the result.
    product: Tensor = _onednn.qlinear_pointwise(
        *(parts, 1.0, _ZERO_POINT), *(packed, scales, zeros), *(None, 1.0, 0, torch.float32, "none", [], "")
    )
    return product


def packed_int8(weight: Tensor) -> Int8Matrix:
    """The matrix [out, in], quantized and in the order of memory that oneDNN's kernels read."""
    values, scales = quantize(weight)
    zeros = torch.zeros(1, dtype=torch.int32)
    matrix = Int8Matrix(_onednn.qlinear_prepack(values, None), scales.flatten(), zeros)
    _return_memory()
    return matrix


def _return_memory() -> None:
    """glibc does not return freed pieces of up to 32 MiB to the system. They would stay as holes between the packed
    matrices, and take three times the memory of the matrices."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


class Int8Matmul:
    """Matmul for Int8Matrix, and rows of float32 or bfloat16. A row's product does not depend on other rows, bit for
    bit: its sums are exact."""

    def __init__(self, kernels: Int8Kernels) -> None:
        self._kernels = kernels

    def of(self, rows: Tensor, weight: Int8Matrix, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = rows.new_empty(len(rows), len(weight.scales))
        self._multiply(rows, weight, bias, False, out)
        return out

    def added(self, total: Tensor, rows: Tensor, weight: Int8Matrix) -> Tensor:
        self._multiply(rows, weight, None, True, total)
        return total

    def _multiply(self, rows: Tensor, weight: Int8Matrix, bias: Tensor | None, adds: bool, out: Tensor) -> None:
        """out [rows, out] = rows [rows, in] @ weight (+ bias [out]) (+ out, with `adds`)."""
        tile_rows = max(_MIN_TILE_ROWS, _TILE_NUMBERS // len(weight.scales))
        if len(rows) <= tile_rows:  # without the slices below, which take 10 us
            self._multiply_tile(rows, weight, bias, adds, out)
            return
        for tile, part in zip(torch.split(rows, tile_rows), torch.split(out, tile_rows), strict=True):
            self._multiply_tile(tile, weight, bias, adds, part)

    def _multiply_tile(self, rows: Tensor, weight: Int8Matrix, bias: Tensor | None, adds: bool, out: Tensor) -> None:
        parts = torch.empty(2 * len(rows), rows.shape[1], dtype=torch.uint8)
        scales = np.empty(len(rows), np.float32)
        self._kernels.split(as_array(rows), parts.numpy(), scales)
        product = _product(parts, weight.packed, weight.scales, weight.zeros)
        result = as_array(out)
        self._kernels.join(product.numpy(), scales, result[0, :0] if bias is None else as_array(bias), adds, result)
