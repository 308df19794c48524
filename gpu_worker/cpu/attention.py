"""Attention over the paged pool for CPUs: a compiled kernel for decodes, and SDPA for prefill chunks."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gpu_worker.attention.base import AttentionMetadata
from gpu_worker.attention.torch_backend import TorchAttention, WindowPlan
from gpu_worker.cpu.kernels import Kernels
from gpu_worker.cpu.numbers import as_array
from gpu_worker.kv.pool import KvPool


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
        """The kernel takes all decodes at once. Their arrays are the same for every window."""
        decodes = np.flatnonzero(np.diff(metadata.qo_indptr) == 1)
        kv_lens = metadata.kv_lens(self._block_size)
        arrays = metadata.kv_indptr[decodes], kv_lens[decodes], metadata.qo_indptr[decodes]
        first_blocks, kv_lens, rows = (np.ascontiguousarray(array, np.int32) for array in arrays)
        self._decodes = (np.ascontiguousarray(metadata.kv_indices, np.int32), first_blocks, kv_lens, rows)
        self._plans = {window: WindowPlan((), tuple(self._chunks(metadata, window))) for window in set(self._windows)}

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._write(layer, key, value)
        out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        window = self._windows[layer]
        if len(self._decodes[-1]):
            keys, values = self._pool_arrays[layer]
            self._kernels.attend(as_array(query), keys, values, *self._decodes, window, self._scale, as_array(out))
        for chunk in self._plans[window].chunks:
            self._prefill(layer, chunk, query, key, value, out)
        return out
