"""The KV pool: fixed blocks of keys and values for every layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.errors import DeviceError

# Never granted to a sequence: padding reads it, so it must stay finite.
DUMMY_BLOCK = 0


@dataclass(frozen=True, slots=True)
class KvPool:
    """Keys and values of all layers in one tensor: [2, layers, num_blocks + 1, block_size, kv_heads, head_dim]."""

    storage: Tensor

    @property
    def keys(self) -> Tensor:
        """[layers, num_blocks + 1, block_size, kv_heads, head_dim]; block 0 is the dummy."""
        return self.storage[0]

    @property
    def values(self) -> Tensor:
        return self.storage[1]

    @property
    def num_layers(self) -> int:
        return self.storage.shape[1]

    @property
    def block_size(self) -> int:
        """Tokens."""
        return self.storage.shape[3]

    @property
    def num_blocks(self) -> int:
        """Usable blocks; their ids are 1..num_blocks."""
        return self.storage.shape[2] - 1

    def copy(self, sources: npt.NDArray[np.int32], targets: npt.NDArray[np.int32]) -> None:
        """Block sources[i] to block targets[i], in every layer. No block stands in both."""
        kv, device = self.storage.flatten(0, 1), self.storage.device
        source_ids, target_ids = (torch.from_numpy(ids.astype(np.int64)).to(device) for ids in (sources, targets))
        kv.index_copy_(1, target_ids, kv.index_select(1, source_ids))

    def clear(self, block_ids: npt.NDArray[np.int32]) -> None:
        """Zeros into blocks that got a new owner. Attention reads a block's unused rest with weight 0, and 0 x NaN of
        whoever failed there before would be NaN."""
        ids = torch.from_numpy(block_ids.astype(np.int64)).to(self.storage.device)
        self.storage.flatten(0, 1).index_fill_(1, ids, 0)


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
    shape = (2, num_layers, num_blocks + 1, block_size, num_kv_heads, head_dim)
    try:
        return KvPool(torch.zeros(shape, dtype=dtype, device=device))
    except (torch.OutOfMemoryError, RuntimeError) as error:
        needed_gib = torch.Size(shape).numel() * dtype.itemsize / 2**30
        raise DeviceError(f"no memory for a KV pool of {needed_gib:.2f} GiB on {device}: {error}") from error
