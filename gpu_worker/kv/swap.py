"""Copies blocks between device and host memory, in parallel with the device's computation."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.device import DeviceEvent, SideStream, upload
from gpu_worker.kv.rows import BlockRows

# The number of blocks in one staging buffer.
SWAP_BATCH_BLOCKS = 64

Int32s = npt.NDArray[np.int32]


def staging_bytes(num_host_blocks: int, block_bytes: int) -> int:
    """The device memory of a lane."""
    return 2 * min(SWAP_BATCH_BLOCKS, num_host_blocks) * block_bytes


class SwapLane:
    """Two staging buffers on the device take turns. Copies to and from host memory run on their own stream.

        compute stream | ... gather A ............. gather B . next step's kernels ..................... scatter A
        side stream    |          `- A -> host  ..........`- B -> host ... host -> A (swapped in) -'

    A gather reads the blocks as the earlier steps left them, and later steps may overwrite them at once. Only the side
    stream reads and writes host blocks, so this happens in the order of the calls. A buffer is written again only when
    its last reader is done, on either stream.
    """

    def __init__(self, rows: BlockRows, host: Tensor) -> None:
        """host: [host blocks, 2 * layers, ...], at least one."""
        self._rows, self._host, self._device = rows, host, rows.matrix.device
        size = min(SWAP_BATCH_BLOCKS, len(host))
        self._buffers = [torch.zeros(size, *host.shape[1:], dtype=host.dtype, device=self._device) for _ in range(2)]
        self._free = [DeviceEvent(self._device) for _ in range(2)]
        self._filled = [DeviceEvent(self._device) for _ in range(2)]
        self._side = SideStream(self._device)
        self._turn = 0

    def out(self, blocks: Int32s, host_blocks: Int32s) -> None:
        """Copy block blocks[i] to host[host_blocks[i]]."""
        matrix = self._rows.matrix
        for rows, targets in self._batches(blocks, host_blocks):
            staged, free, filled = self._next(len(targets))
            free.hold()
            torch.index_select(matrix, 0, rows, out=staged.view(len(rows), -1))
            filled.record()
            with self._side.use():
                filled.hold()
                for target, block in zip(targets, staged, strict=True):
                    self._host[target].copy_(block, non_blocking=True)
                free.record()

    def back(self, host_blocks: Int32s, blocks: Int32s) -> None:
        """Copy host[host_blocks[i]] to block blocks[i]. Work that is queued later sees the result."""
        matrix = self._rows.matrix
        for rows, sources in self._batches(blocks, host_blocks):
            staged, free, filled = self._next(len(sources))
            with self._side.use():
                free.hold()
                for source, block in zip(sources, staged, strict=True):
                    block.copy_(self._host[source], non_blocking=True)
                filled.record()
            filled.hold()
            matrix.index_copy_(0, rows, staged.view(len(rows), -1))
            free.record()

    def _next(self, count: int) -> tuple[Tensor, DeviceEvent, DeviceEvent]:
        self._turn ^= 1
        return self._buffers[self._turn][:count], self._free[self._turn], self._filled[self._turn]

    def _batches(self, blocks: Int32s, host_blocks: Int32s) -> Iterator[tuple[Tensor, list[int]]]:
        """Batches of pool rows and host blocks."""
        size = len(self._buffers[0])
        for start in range(0, len(blocks), size):
            batch = slice(start, start + size)
            yield self._rows.of(upload(blocks[batch], self._device)), host_blocks[batch].tolist()
