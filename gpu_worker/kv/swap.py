"""Blocks on their way between device and host memory, beside what the device computes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.device import Fence, SideStream, upload

# Blocks that wait in one staging buffer.
SWAP_BATCH_BLOCKS = 64

Int32s = npt.NDArray[np.int32]


class SwapLane:
    """Two staging buffers on the device take turns, and the copies to and from host memory have a stream of their own.

        compute stream | ... gather A ............. gather B . next step's kernels ..................... scatter A
        side stream    |          `- A -> host  ..........`- B -> host ... host -> A (swapped in) -'

    What is gathered is as the steps before left it, and their successors may overwrite it at once. A block of host
    memory is written and read on the side stream alone, so in the order of the calls. A buffer is written again when
    its last reader is done, whichever stream that was on.
    """

    def __init__(self, kv: Tensor, host: Tensor) -> None:
        """kv: [2 * layers, blocks, ...]; host: [host blocks, 2 * layers, ...], at least one."""
        self._kv, self._host = kv, host
        size = min(SWAP_BATCH_BLOCKS, len(host))
        self._buffers = [torch.zeros(size, *host.shape[1:], dtype=kv.dtype, device=kv.device) for _ in range(2)]
        self._free = [Fence(kv.device) for _ in range(2)]
        self._filled = [Fence(kv.device) for _ in range(2)]
        self._side = SideStream(kv.device)
        self._turn = 0

    def out(self, blocks: Int32s, places: Int32s) -> None:
        """kv[:, blocks[i]] to host[places[i]]."""
        for ids, targets in self._batches(blocks, places):
            staged, free, filled = self._next(len(targets))
            free.hold()
            staged.copy_(self._kv.index_select(1, ids).transpose(0, 1))
            filled.record()
            with self._side.use():
                filled.hold()
                for target, block in zip(targets, staged, strict=True):
                    self._host[target].copy_(block, non_blocking=True)
                free.record()

    def back(self, places: Int32s, blocks: Int32s) -> None:
        """host[places[i]] to kv[:, blocks[i]]; what is queued from then on finds it there."""
        for ids, sources in self._batches(blocks, places):
            staged, free, filled = self._next(len(sources))
            with self._side.use():
                free.hold()
                for source, block in zip(sources, staged, strict=True):
                    block.copy_(self._host[source], non_blocking=True)
                filled.record()
            filled.hold()
            self._kv.index_copy_(1, ids, staged.transpose(0, 1))
            free.record()

    def _next(self, count: int) -> tuple[Tensor, Fence, Fence]:
        self._turn ^= 1
        return self._buffers[self._turn][:count], self._free[self._turn], self._filled[self._turn]

    def _batches(self, blocks: Int32s, places: Int32s) -> Iterator[tuple[Tensor, list[int]]]:
        """Block ids on the device, and places in host memory."""
        size = len(self._buffers[0])
        for start in range(0, len(blocks), size):
            batch = slice(start, start + size)
            yield upload(blocks[batch], self._kv.device), places[batch].tolist()
