"""Blocks on their way between device and host memory, beside what the device computes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.device import DeviceEvent, SideStream, upload
from gpu_worker.kv.rows import BlockRows

# Blocks that wait in one staging buffer.
SWAP_BATCH_BLOCKS = 64

Int32s = npt.NDArray[np.int32]


def staging_bytes(num_host_blocks: int, block_bytes: int) -> int:
    """What a lane takes of the device."""
    return 2 * min(SWAP_BATCH_BLOCKS, num_host_blocks) * block_bytes


class SwapLane:
    """Two staging buffers on the device take turns, and the copies to and from host memory have a stream of their own.

        compute stream | ... gather A ............. gather B . next step's kernels ..................... scatter A
        side stream    |          `- A -> host  ..........`- B -> host ... host -> A (swapped in) -'

    What is gathered is as the steps before left it, and their successors may overwrite it at once. A block of host
    memory is written and read on the side stream alone, so in the order of the calls. A buffer is written again when
    its last reader is done, whichever stream that was on.
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

    def out(self, blocks: Int32s, places: Int32s) -> None:
        """Block blocks[i] to host[places[i]]."""
        matrix = self._rows.matrix
        for rows, targets in self._batches(blocks, places):
            staged, free, filled = self._next(len(targets))
            free.hold()
            torch.index_select(matrix, 0, rows, out=staged.view(len(rows), -1))
            filled.record()
            with self._side.use():
                filled.hold()
                for target, block in zip(targets, staged, strict=True):
                    self._host[target].copy_(block, non_blocking=True)
                free.record()

    def back(self, places: Int32s, blocks: Int32s) -> None:
        """host[places[i]] to block blocks[i]; what is queued from then on finds it there."""
        matrix = self._rows.matrix
        for rows, sources in self._batches(blocks, places):
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

    def _batches(self, blocks: Int32s, places: Int32s) -> Iterator[tuple[Tensor, list[int]]]:
        """Rows of the pool, and places in host memory."""
        size = len(self._buffers[0])
        for start in range(0, len(blocks), size):
            batch = slice(start, start + size)
            yield self._rows.of(upload(blocks[batch], self._device)), places[batch].tolist()
