"""Matrix products with oneDNN, on matrices that are packed once for its kernels."""

from __future__ import annotations

import ctypes
import os
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_worker.cpu.numbers import as_array
from gpu_worker.cpu.products import MOST_ROWS, MOST_TABLE_ROWS, FewRows
from gpu_worker.cpu.vectors import OUTPUTS
from gpu_worker.device import multiplies_bfloat16
from gpu_worker.errors import ModelError
from gpu_worker.models.matmul import PlainMatmul
from gpu_worker.models.weights import Pack
from services.runtime.logs import get_logger

_log = get_logger(__name__)

# torch's inductor compiles linear layers to these operations. They have no public name.
_mkldnn: Any = torch.ops.mkldnn


# Float32 matrices up to this size stay plain if no kernel for few rows can read them: a call of oneDNN (20 us) takes
# longer than torch's product.
SMALL_ELEMENTS = 2**17


def packing(device: torch.device, dtype: torch.dtype, few_rows: bool) -> Pack | None:
    """How to pack the matrices of a model on this device; None: not at all. few_rows: PackedMatmul has its kernels."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    if not (hasattr(_mkldnn, "_linear_pointwise") and hasattr(_mkldnn, "_reorder_linear_weight")):
        return None
    is_possible = dtype == torch.float32 or (dtype == torch.bfloat16 and multiplies_bfloat16())
    return partial(packed, few_rows=few_rows) if is_possible else None


def packed(weight: Tensor, few_rows: bool) -> Tensor:
    """A matrix [out, in] in the order of memory that oneDNN's kernels read, or [in, out] if it is small."""
    is_small = weight.dtype == torch.float32 and weight.numel() <= SMALL_ELEMENTS
    if is_small and not (few_rows and _has_known_order(weight.shape, weight.dtype)):
        return weight.t().contiguous()
    reordered: Tensor = _mkldnn._reorder_linear_weight(weight.contiguous(), None)
    return reordered


def _has_known_order(shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether the kernels know how oneDNN packs a matrix [out, in]. It pads other inputs to whole cache lines."""
    outputs, inputs = shape
    return outputs % OUTPUTS == 0 and inputs * dtype.itemsize % 64 == 0


def check_threads() -> None:
    """Raises ModelError if OpenMP runs fewer threads than torch asks for. oneDNN divides a product among all of them,
    and what the missing ones should compute stays what was in memory before."""
    threads = torch.get_num_threads()
    dtype = torch.bfloat16 if multiplies_bfloat16() else torch.float32
    if threads == 1 or packing(torch.device("cpu"), dtype, few_rows=False) is None:
        return
    weight = torch.ones(64 * threads, 512, dtype=dtype)  # so that each thread has a part
    product = _product(weight[:32], _mkldnn._reorder_linear_weight(weight, None), None)
    # OMP_DYNAMIC: the number follows the load on the machine, so this product may be right by chance.
    if os.environ.get("OMP_DYNAMIC", "").strip().lower() == "true" or not bool((product == 512).all()):
        raise ModelError(
            f"OpenMP does not always run the {threads} threads of this worker, so products would be wrong: unset "
            "OMP_DYNAMIC, OMP_THREAD_LIMIT and OMP_MAX_ACTIVE_LEVELS, or set threads to 1"
        )


class PackedMatmul(PlainMatmul):
    """Matmul for packed matrices, and plain ones [in, out].

    torch's own products of float32 run in MKL, which uses less than half of an AMD core.
    """

    def __init__(self, few_rows: FewRows | None = None) -> None:
        """`few_rows`: kernels for products of a few rows; without them torch computes these, too."""
        self._few_rows = few_rows
        # By id, each matrix and the memory that the kernels read; None: they cannot read it.
        self._memory: dict[int, tuple[Tensor, np.ndarray | None]] = {}
        self._has_warned = False

    def of(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if (memory := self._memory_for(rows, weight)) is not None:
            out = rows.new_empty(len(rows), weight.shape[0 if weight.is_mkldnn else 1]) if out is None else out
            return self._multiply_few(rows, memory, bias, False, out)
        if not weight.is_mkldnn:
            return super().of(rows, weight, bias, out)
        product = _product(rows, weight, bias)
        return product if out is None else out.copy_(product)

    def added(self, total: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
        if not weight.is_mkldnn:
            return super().added(total, rows, weight)
        if (memory := self._memory_for(rows, weight)) is not None:
            return self._multiply_few(rows, memory, None, True, total)
        result: Tensor = _mkldnn._linear_pointwise.binary(rows, total, weight, None, "add")
        return result

    def _memory_for(self, rows: Tensor, weight: Tensor) -> np.ndarray | None:
        """The matrix's memory, if a kernel computes the product with these rows."""
        most_rows = MOST_ROWS if weight.is_mkldnn else MOST_TABLE_ROWS
        if self._few_rows is None or len(rows) > most_rows:
            return None
        return self.memory(weight, rows.dtype)

    def memory(self, weight: Tensor, dtype: torch.dtype) -> np.ndarray | None:
        """What a kernel reads of a matrix, for rows of this type: the packed matrix [out * in], or a head [out, in]
        that is also the embedding. None: it cannot read the matrix."""
        if id(weight) not in self._memory:
            memory = self._checked_memory(weight, dtype) if weight.is_mkldnn else table_memory(weight)
            self._memory[id(weight)] = weight, memory
        return self._memory[id(weight)][1]

    def _multiply_few(self, rows: Tensor, memory: np.ndarray, bias: Tensor | None, adds: bool, out: Tensor) -> Tensor:
        assert self._few_rows is not None
        if memory.ndim == 2:
            assert bias is None, "a head has no bias"
            assert not adds
            self._few_rows.multiply_table(as_array(rows), memory, as_array(out))
        else:
            bias_array = memory[:0] if bias is None else as_array(bias)
            self._few_rows.multiply(as_array(rows), memory, bias_array, adds, as_array(out))
        return out

    def _checked_memory(self, weight: Tensor, dtype: torch.dtype) -> np.ndarray | None:
        memory = packed_memory(weight, dtype)
        if memory is None:
            return None
        rows = torch.randn(2, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(dtype)
        expected = _product(rows, weight, None).float()
        found = self._multiply_few(rows, memory, None, False, rows.new_empty(2, weight.shape[0])).float()
        # The two round differently. In another order of memory, the numbers would have nothing in common.
        size = expected.nan_to_num(posinf=0.0, neginf=0.0).abs().max()
        if torch.allclose(found, expected, rtol=0.02, atol=0.01 * float(size), equal_nan=True):
            return memory
        if not self._has_warned:
            _log.warning("oneDNN packs matrices in an unknown order: steps of few rows are slower", dtype=str(dtype))
            self._has_warned = True
        return None


def packed_memory(weight: Tensor, dtype: torch.dtype) -> np.ndarray | None:
    """The memory of a packed matrix [out, in] of this type, if the kernel for few rows may know its order."""
    size = weight.numel() * dtype.itemsize
    if not _has_known_order(weight.shape, dtype) or not hasattr(_mkldnn, "data_ptr") or _mkldnn._nbytes(weight) != size:
        return None
    buffer = (ctypes.c_uint8 * size).from_address(_mkldnn.data_ptr(weight))
    return np.ctypeslib.as_array(buffer).view(np.int16 if dtype == torch.bfloat16 else np.float32)


def table_memory(weight: Tensor) -> np.ndarray | None:
    """The memory [out, in] of a head [in, out] that is also the embedding, if the kernel can read it."""
    table = weight.t()
    return as_array(table) if table.is_contiguous() and table.shape[1] % 64 == 0 else None


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = _mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return product
