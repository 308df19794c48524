"""The matrix products of a decoder: fast ones, and ones with a result that does not depend on other rows.

A matrix product chooses its kernel, and so the order of its sums, by the shapes. So a token's row may differ in its
last bits in a larger batch, or in another chunk of its prompt. If two tokens have nearly the same logit, which often
happens with bfloat16, this can change the chosen token. TiledMatmul multiplies TILE_ROWS rows at a time in every step:
one shape, one kernel (like batch-invariant kernels; He et al., "Defeating Nondeterminism in LLM Inference", 2025)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_worker.errors import ModelError
from gpu_worker.models.int8 import Int8Matrix

TILE_ROWS = 32


Weight_contra = TypeVar("Weight_contra", contravariant=True)


class Matmul(Protocol[Weight_contra]):
    """Computes the matrix products of a decoder with one kind of weights."""

    def of(self, rows: Tensor, weight: Weight_contra, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """rows [rows, in] @ weight [in, out] (+ bias [out]): [rows, out], written to `out` if given."""

    def added(self, total: Tensor, rows: Tensor, weight: Weight_contra) -> Tensor:
        """total [rows, out] + rows [rows, in] @ weight [in, out]. May overwrite `total` and return it."""


class PlainMatmul:
    """torch's own products."""

    def of(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        return torch.mm(rows, weight, out=out) if bias is None else torch.addmm(bias, rows, weight, out=out)

    def added(self, total: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
        return total.addmm_(rows, weight)


class TiledMatmul:
    """Products in tiles of TILE_ROWS rows: a row does not depend on the other rows, bit for bit."""

    def of(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = rows.new_empty(len(rows), weight.shape[1])
        for tile, part in zip(torch.split(rows, TILE_ROWS), torch.split(out, TILE_ROWS), strict=True):
            product = _whole(tile).mm(weight) if bias is None else torch.addmm(bias, _whole(tile), weight)
            part.copy_(product[: len(part)])
        return out

    def added(self, total: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
        for tile, part in zip(torch.split(rows, TILE_ROWS), torch.split(total, TILE_ROWS), strict=True):
            part.copy_(_whole(part).addmm(_whole(tile), weight)[: len(part)])
        return total


def _whole(tile: Tensor) -> Tensor:
    """The tile, padded with zeros to TILE_ROWS rows."""
    return F.pad(tile, (0, 0, 0, TILE_ROWS - len(tile)))


@torch.inference_mode()
def check_matmul(matmul: Matmul[Any], weights: Iterable[Tensor | Int8Matrix], like: Tensor) -> None:
    """Raises ModelError if a row's product with a weight [in, out] depends on its position or on other rows. The rows
    have the type and the device of `like`."""
    for weight in weights:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(2 * TILE_ROWS - 3, weight.shape[0], generator=generator).to(like)
        order = torch.randperm(len(rows), generator=generator).to(like.device)
        product = matmul.of(rows, weight).nan_to_num()  # a NaN in the weights is no reason to refuse the worker here
        if not torch.equal(matmul.of(rows[order], weight).nan_to_num(), product[order]):
            raise ModelError(
                f"deterministic: products with {list(weight.shape)} {like.dtype} depend on a row's position"
            )
        if not torch.equal(matmul.of(rows[:1], weight).nan_to_num(), product[:1]):
            raise ModelError(f"deterministic: products with {list(weight.shape)} {like.dtype} depend on other rows")
