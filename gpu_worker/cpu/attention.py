"""Attention over the paged pool for CPUs: a compiled kernel for decodes and short chunks, SDPA for longer chunks."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gpu_worker.attention.base import AttentionMetadata
from gpu_worker.attention.torch_backend import TorchAttention, WindowPlan
from gpu_worker.cpu.kernels import Kernels
from gpu_worker.cpu.numbers import as_array
from gpu_worker.kv.pool import KvPool

# A chunk with at most this many rows runs in the kernel, each row like a decode. Measured with one thread and
# the shapes of Qwen3-0.6B, after 128 and 1,024 tokens: up to 7 rows the kernel is faster than SDPA, from 12 on slower.
KERNEL_ROWS = 8


class CpuAttention(TorchAttention):
    """The kernel reads the blocks where they are. To gather them, as SDPA needs it, takes three times as long as the
    attention itself. `by_row`: all rows are decodes, so that a row's result depends only on its own tokens.
    """

    def __init__(self, pool: KvPool, windows: tuple[int, ...], kernels: Kernels, by_row: bool = False) -> None:
        super().__init__(pool, windows, by_row)
        self._kernels = kernels
        self._pool_arrays = [(as_array(k), as_array(v)) for k, v in zip(pool.keys, pool.values, strict=True)]
        self._scale = np.float32(self._head_dim**-0.5)

    def _plan_sequences(self, metadata: AttentionMetadata) -> None:
        """The kernel takes all decodes and short chunks at once. Their arrays are the same for every window."""
        counts = np.diff(metadata.qo_indptr)
        owners = np.repeat(np.arange(len(counts)), np.where(counts <= KERNEL_ROWS, counts, 0))
        rows = np.flatnonzero(np.repeat(counts <= KERNEL_ROWS, counts))
        # A row sees the tokens up to its own. The sequence's last row sees all.
        kv_lens = metadata.kv_lens(self._block_size)[owners] - (metadata.qo_indptr[owners + 1] - 1 - rows)
        arrays = metadata.kv_indices, metadata.kv_indptr[owners], kv_lens, rows
        self._by_kernel = tuple(np.ascontiguousarray(array, np.int32) for array in arrays)
        self._plans = {
            window: WindowPlan((), tuple(self._chunks(metadata, window, KERNEL_ROWS))) for window in set(self._windows)
        }

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._write(layer, key, value)
        out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        window = self._windows[layer]
        if len(self._by_kernel[-1]):
            keys, values = self._pool_arrays[layer]
            self._kernels.attend(as_array(query), keys, values, *self._by_kernel, window, self._scale, as_array(out))
        for chunk in self._plans[window].chunks:
            self._prefill(layer, chunk, query, key, value, out)
        return out
