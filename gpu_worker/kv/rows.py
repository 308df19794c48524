"""Blocks of the KV pool as rows of one matrix, so that whatever is done to some of them is one kernel."""

from __future__ import annotations

import torch
from torch import Tensor


class BlockRows:
    """A block has a row for its keys and one for its values in each layer.

    Along the third dimension of the pool itself, torch would cut `index_fill_` and `index_copy_` into as many kernels
    as it takes to count each one's elements in 32 bits from its first to its last: 32 for a pool of 111 GiB.
    """

    def __init__(self, storage: Tensor) -> None:
        """storage: [2, layers, blocks, ...]"""
        parts, num_blocks = storage.shape[0] * storage.shape[1], storage.shape[2]
        self.matrix = storage.view(parts * num_blocks, -1)
        self.per_block = parts
        self._first = torch.arange(parts, device=storage.device) * num_blocks

    def of(self, blocks: Tensor) -> Tensor:
        """[len(blocks) * 2 * layers], block by block, of int64 ids."""
        return (blocks.unsqueeze(1) + self._first).flatten()
