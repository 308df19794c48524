"""Matrices as int8 with one scale per output channel: symmetric, weight-only quantization."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.models.config import DecoderConfig

# The largest int8 that is used. Without -128 a matrix and its negative have the same errors.
LARGEST = 127
# Channels that are quantized at a time, so that their float32 copies stay small.
_CHANNELS = 4096


@dataclass(frozen=True, slots=True)
class Int8Embedding:
    """An embedding [vocab, hidden]: values[t, i] * scales[t]."""

    values: Tensor  # int8 [vocab, hidden]
    scales: Tensor  # float32 [vocab, 1]
    dtype: torch.dtype  # that the model is served in

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        """The rows `index` as numbers, [rows, hidden], as Tensor.index_select. `dim`: 0."""
        return (self.values.index_select(dim, index) * self.scales.index_select(dim, index)).to(self.dtype)


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """A matrix [out, in], packed for the int8 kernels of a CPU."""

    packed: Tensor
    scales: Tensor  # float32 [out]
    zeros: Tensor  # int32 [1]: the zero point of all channels

    @property
    def shape(self) -> tuple[int, ...]:
        """[in, out], as of a Tensor for the same products."""
        return tuple(self.packed.shape)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix [out, in] of floating-point numbers as int8 [out, in] and scales, float32 [out, 1]. A scale is the
    channel's largest absolute value / 127, so the error of a number is at most half of its channel's scale."""
    scales = (weight.abs().amax(1, keepdim=True).float() / LARGEST).clamp_(min=1e-30)  # a channel may be all zeros
    values = torch.empty_like(weight, dtype=torch.int8)
    for part, scale, out in zip(*(torch.split(x, _CHANNELS) for x in (weight, scales, values)), strict=True):
        out.copy_((part.float() / scale).round_())
    return values, scales


def type_name(dtype: torch.dtype, quantization: str) -> str:
    """How a worker names the types that it serves in: `bfloat16`, or `bfloat16+int8`."""
    name = str(dtype).removeprefix("torch.")
    return name if quantization == "none" else f"{name}+{quantization}"


def weights_bytes(
    shapes: dict[str, tuple[int, ...]], config: DecoderConfig, dtype: torch.dtype, quantization: str
) -> int:
    """Bytes of the weights `shapes` in memory. Vectors (norms, biases) are never quantized. A tied head is packed
    beside the embedding, so it is in memory twice."""
    if quantization == "none":
        return sum(map(math.prod, shapes.values())) * dtype.itemsize
    matrices = [shape for shape in shapes.values() if len(shape) == 2]
    vectors = [shape for shape in shapes.values() if len(shape) == 1]
    if config.has_head and config.tie_embeddings:
        matrices.append((config.vocab_size, config.hidden_size))
    # A byte per number, a float32 scale per channel. oneDNN keeps a sum of 4 bytes per channel of a packed matrix.
    int8_bytes = sum(math.prod(shape) + 8 * shape[0] for shape in matrices)
    return int8_bytes + sum(map(math.prod, vectors)) * dtype.itemsize
