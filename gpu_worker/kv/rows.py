"""Blocks of the KV pool as rows of one matrix, so that one kernel can work on any set of them."""

from __future__ import annotations

import torch
from torch import Tensor


class BlockRows:
    """In each layer, a block has one row for its keys and one row for its values.

    This view exists for speed. Without it, `index_fill_` and `index_copy_` would index the third dimension of the pool.
    Torch splits such a call into several kernels, because the offsets in a kernel have 32 bits: 32 kernels for a pool
    of 111 GiB."""

    def __init__(self, storage: Tensor) -> None:
        """storage: [2, layers, blocks, ...]"""
        parts, num_blocks = storage.shape[0] * storage.shape[1], storage.shape[2]
        self.matrix = storage.view(parts * num_blocks, -1)
        self.per_block = parts
        self._first = torch.arange(parts, device=storage.device) * num_blocks

    def of(self, blocks: Tensor) -> Tensor:
        """Row numbers [len(blocks) * 2 * layers], block by block, of int64 block ids."""
        return (blocks.unsqueeze(1) + self._first).flatten()
