"""The KV pool: fixed blocks of keys and values, one pair of tensors per layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.errors import DeviceError

# Never granted to a sequence: padding reads it, so it must stay finite.
DUMMY_BLOCK = 0


@dataclass(frozen=True, slots=True)
class KvPool:
    """`keys[layer]`, `values[layer]`: [num_blocks + 1, block_size, kv_heads, head_dim]; block 0 is the dummy."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def block_size(self) -> int:
        """Tokens."""
        return self.keys[0].shape[1]

    @property
    def num_blocks(self) -> int:
        """Usable blocks; their ids are 1..num_blocks."""
        return self.keys[0].shape[0] - 1


def allocate_pool(
    num_blocks: int,
    block_size: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KvPool:
    """DeviceError if the memory is not there."""
    shape = (num_blocks + 1, block_size, num_kv_heads, head_dim)

    def blocks() -> tuple[Tensor, ...]:
        return tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers))

    try:
        return KvPool(blocks(), blocks())
    except (torch.OutOfMemoryError, RuntimeError) as error:
        needed = 2 * num_layers * torch.Size(shape).numel() * dtype.itemsize
        raise DeviceError(f"no memory for a KV pool of {needed / 2**30:.2f} GiB on {device}: {error}") from error
