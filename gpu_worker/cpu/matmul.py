"""Matrix products with oneDNN, on matrices that are packed once for its kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpu_worker.device import multiplies_bfloat16
from gpu_worker.models.matmul import PlainMatmul
from gpu_worker.models.weights import Pack

# torch's inductor compiles linear layers to these operations. They have no public name.
_mkldnn: Any = torch.ops.mkldnn


# Float32 matrices up to this size stay plain: for few rows, a call of oneDNN (20 us) takes longer than torch's product.
SMALL_ELEMENTS = 2**17


def packing(device: torch.device, dtype: torch.dtype) -> Pack | None:
    """How to pack the matrices of a model on this device; None: not at all."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    if not (hasattr(_mkldnn, "_linear_pointwise") and hasattr(_mkldnn, "_reorder_linear_weight")):
        return None
    is_possible = dtype == torch.float32 or (dtype == torch.bfloat16 and multiplies_bfloat16())
    return packed if is_possible else None


def packed(weight: Tensor) -> Tensor:
    """A matrix [out, in] in the order of memory that oneDNN's kernels read, or [in, out] if it is small."""
    if weight.dtype == torch.float32 and weight.numel() <= SMALL_ELEMENTS:
        return weight.t().contiguous()
    reordered: Tensor = _mkldnn._reorder_linear_weight(weight.contiguous(), None)
    return reordered


class PackedMatmul(PlainMatmul):
    """Matmul for packed matrices, and plain ones [in, out].

    torch's own products of float32 run in MKL, which uses less than half of an AMD core.
    """

    def of(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if not weight.is_mkldnn:
            return super().of(rows, weight, bias, out)
        product: Tensor = _mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
        return product if out is None else out.copy_(product)

    def added(self, total: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
        if not weight.is_mkldnn:
            return super().added(total, rows, weight)
        result: Tensor = _mkldnn._linear_pointwise.binary(rows, total, weight, None, "add")
        return result
