"""The KV pool: blocks of keys and values for every layer, and blocks in host memory for swapped-out sequences and
evicted KV."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.cpu.huge_pages import begin_in_huge_pages
from gpu_worker.device import pin, upload
from gpu_worker.errors import DeviceError
from gpu_worker.kv.rows import BlockRows
from gpu_worker.kv.swap import SwapLane

# Never granted to a sequence. Padding reads and writes it, so it must stay finite.
DUMMY_BLOCK = 0


@dataclass(frozen=True, slots=True)
class KvPool:
    """Keys and values of all layers in one tensor: [2, layers, num_blocks + 1, block_size, kv_heads, head_dim].

    Host memory stores whole blocks, so that one copy between host and device moves a block of all layers:
    [num_host_blocks, 2 * layers, block_size, kv_heads, head_dim]. It is pinned if the device can use that.
    """

    storage: Tensor
    rows: BlockRows
    host: Tensor
    lane: SwapLane | None  # None without host blocks

    @property
    def keys(self) -> Tensor:
        """[layers, num_blocks + 1, block_size, kv_heads, head_dim]. Block 0 is the dummy."""
        return self.storage[0]

    @property
    def values(self) -> Tensor:
        return self.storage[1]

    @property
    def num_layers(self) -> int:
        return self.storage.shape[1]

    @property
    def block_size(self) -> int:
        """In tokens."""
        return self.storage.shape[3]

    @property
    def num_blocks(self) -> int:
        """Usable blocks. Their ids are 1..num_blocks."""
        return self.storage.shape[2] - 1

    @property
    def num_host_blocks(self) -> int:
        """Host blocks. Their ids are 1..num_host_blocks."""
        return self.host.shape[0]

    def copy(self, sources: npt.NDArray[np.int32], targets: npt.NDArray[np.int32]) -> None:
        """Copy block sources[i] to block targets[i], in every layer. No block may be in both."""
        rows, device = self.rows, self.storage.device
        content = rows.matrix.index_select(0, rows.of(upload(sources, device)))
        rows.matrix.index_copy_(0, rows.of(upload(targets, device)), content)

    def swap_out(self, blocks: npt.NDArray[np.int32], host_blocks: npt.NDArray[np.int32]) -> None:
        """Copy block blocks[i], as it is now, to host block host_blocks[i]. Does not block, see kv/swap.py."""
        assert self.lane is not None, "there are no host blocks"
        self.lane.out(blocks, host_blocks - 1)

    def swap_in(self, host_blocks: npt.NDArray[np.int32], blocks: npt.NDArray[np.int32]) -> None:
        """Copy host block host_blocks[i] to block blocks[i]. The device waits for the copy, the host does not."""
        assert self.lane is not None, "there are no host blocks"
        self.lane.back(host_blocks - 1, blocks)

    def clear(self, block_ids: npt.NDArray[np.int32]) -> None:
        """Zero blocks that have a new owner. Attention reads a block's unused rest with weight 0, and 0 x NaN of a
        failed earlier owner would be NaN."""
        self.rows.matrix.index_fill_(0, self.rows.of(upload(block_ids, self.storage.device)), 0)


def allocate_pool(
    num_blocks: int,
    block_size: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    num_host_blocks: int = 0,
) -> KvPool:
    """Allocate the pool. Raises DeviceError if there is not enough memory."""
    block = (block_size, num_kv_heads, head_dim)
    storage = _zeros((2, num_layers, num_blocks + 1, *block), dtype, device)
    pinned = device.type == "cuda" and num_host_blocks > 0
    host = _zeros((num_host_blocks, 2 * num_layers, *block), dtype, torch.device("cpu"), pinned)
    rows = BlockRows(storage)
    return KvPool(storage, rows, host, SwapLane(rows, host) if num_host_blocks else None)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, pinned: bool = False) -> Tensor:
    try:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if device.type == "cpu":
            begin_in_huge_pages(tensor)
        tensor.zero_()
        if pinned:
            pin(tensor)
        return tensor
    except (torch.OutOfMemoryError, RuntimeError) as error:
        needed_gib = torch.Size(shape).numel() * dtype.itemsize / 2**30
        raise DeviceError(f"no memory for a KV pool of {needed_gib:.2f} GiB on {device}: {error}") from error
