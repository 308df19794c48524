"""Attention over the paged pool with FlashInfer's kernels, for 16-bit models on an NVIDIA GPU.

Decode rows use the decode wrapper, and chunks use the prefill wrapper. Each window has its own pair of wrappers,
because a wrapper has one window, which plan() sets. Choices (sources: docs of FlashInfer 0.7.2, and what vLLM and
SGLang do):

- fa2 for both, with tensor cores for decode: it allows any number of query heads per KV head, both share one kernel
  module, and on paged KV it is no slower than fa3;
- plan() gets host arrays, so it does not wait for the device; only the block ids are already on the device;
- the wrapper of a graph reads the step's arrays where the inputs have put them, and fast_decode_plan() copies none;
- one kernel writes K and V of a step; it gets the pool as blocks of one token, with the KV slots as block ids.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_worker.attention.base import AttentionMetadata, DeviceTables, Int32s
from gpu_worker.device import DeviceEvent
from gpu_worker.kv.pool import KvPool

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
# Partial results of sequences with split KV. plan() raises if this is too small.
WORKSPACE_BYTES = 384 << 20


# FlashInfer has two kinds of norm kernels, and reads this variable when it is imported. 1: its CUDA kernels, which
# flashinfer-jit-cache and scripts/gpu_lease.sh bring compiled. 0: kernels of CuTe DSL, which are compiled
# at their first use, and which tests/gpu does not test.
_CUDA_NORMS = "FLASHINFER_USE_CUDA_NORM"


def load_flashinfer() -> ModuleType:
    """The package `flashinfer`, with its CUDA norm kernels unless the environment names the others."""
    os.environ.setdefault(_CUDA_NORMS, "1")
    return importlib.import_module("flashinfer")


def unsupported(head_dim: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why FlashInfer cannot serve this model here; None if it can."""
    if device.type != "cuda":
        return f"it needs an NVIDIA GPU, not {device.type}"
    if head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim} is none of {', '.join(map(str, HEAD_DIMS))}"
    if dtype not in DTYPES:
        return f"dtype {str(dtype).removeprefix('torch.')} is neither float16 nor bfloat16"
    return None


class FlashInferAttention:
    """AttentionBackend. `flashinfer`: the module (passed in, so that tests can read its calls). `windows`: per layer,
    how many tokens a token sees, itself included; 0: all."""

    def __init__(
        self,
        flashinfer: Any,
        pool: KvPool,
        windows: tuple[int, ...],
        num_heads: int,
        max_rows: int,
        workspace_bytes: int = WORKSPACE_BYTES,
    ) -> None:
        self._flashinfer = flashinfer
        device = pool.storage.device
        self._shape = (num_heads, pool.storage.shape[-1])  # one row
        self._kv = list(zip(pool.keys, pool.values, strict=True))
        # The same memory as blocks of one token.
        self._tokens = [
            (keys.flatten(0, 1).unsqueeze(1), values.flatten(0, 1).unsqueeze(1)) for keys, values in self._kv
        ]
        self._zeros, self._ones = torch.zeros(2, max_rows, dtype=torch.int32, device=device).unbind()
        self._ones.fill_(1)
        self._slots = self._zeros[:0]
        self._row_ids = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._num_decodes = 0
        self._planned = DeviceEvent(device)
        # All wrappers share it, because they run one after the other.
        workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=device)
        self._wrappers = {window: _Wrappers(flashinfer, pool, window, num_heads, workspace) for window in set(windows)}
        self._by_layer = [self._wrappers[window] for window in windows]

    def plan(self, metadata: AttentionMetadata) -> None:
        # plan() writes to the wrapper's pinned memory, and the copy of the last step may still be waiting.
        self._planned.wait()
        self._num_decodes = metadata.num_decodes
        self._slots = metadata.slot_mapping
        for wrappers in self._wrappers.values():
            wrappers.plan(metadata)
        self._planned.record()

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, decodes = len(query), self._num_decodes
        self._flashinfer.append_paged_kv_cache(
            key,
            value,
            self._row_ids[:rows],
            self._zeros[:rows],
            self._tokens[layer],
            self._slots,
            self._row_ids[: rows + 1],
            self._ones[:rows],
        )
        out = torch.empty(rows, *self._shape, dtype=query.dtype, device=query.device)
        wrappers = self._by_layer[layer]
        if decodes:
            wrappers.decode.run(query[:decodes], self._kv[layer], out=out[:decodes])
        if decodes < rows:
            wrappers.prefill.run(query[decodes:], self._kv[layer], out=out[decodes:])
        return out.flatten(1)


class _Wrappers:
    """FlashInfer's wrappers for the layers of one window. After plan(), run `decode` and `prefill`."""

    def __init__(self, flashinfer: Any, pool: KvPool, window: int, num_heads: int, workspace: Tensor) -> None:
        self._flashinfer = flashinfer
        self._workspace = workspace
        block_size, num_kv_heads, head_dim = pool.storage.shape[3:]
        self._dims = (num_heads, num_kv_heads, head_dim, block_size)
        dtype = pool.storage.dtype
        self._options: dict[str, Any] = {
            "window_left": window - 1 if window else -1,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }
        self._output = {"o_data_type": dtype}
        self._eager_decode = self._decode_wrapper()
        self._captured_decode: dict[int, Any] = {}  # by batch size
        self.decode = self._eager_decode
        self.prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")

    def plan(self, metadata: AttentionMetadata) -> None:
        decodes, tables = metadata.num_decodes, metadata.tables
        assert tables is not None, "the inputs do not stage block ids"
        if metadata.captured:
            self._plan_graph(metadata, tables)
        elif decodes:
            self.decode = self._eager_decode
            self.decode.plan(
                _tensor(metadata.kv_indptr[: decodes + 1]),
                tables.kv_indices[: int(metadata.kv_indptr[decodes])],
                _tensor(metadata.last_block_len[:decodes]),
                *self._dims,
                **self._options,
                **self._output,
            )
        if decodes < metadata.num_sequences:
            # The block tables of the chunks follow those of the decodes, and kv_indptr continues there.
            self.prefill.plan(
                _tensor(metadata.qo_indptr[decodes:] - metadata.qo_indptr[decodes]),
                _tensor(metadata.kv_indptr[decodes:]),
                tables.kv_indices[: len(metadata.kv_indices)],
                _tensor(metadata.last_block_len[decodes:]),
                *self._dims,
                causal=True,
                **self._options,
                **self._output,
            )

    def _plan_graph(self, metadata: AttentionMetadata, tables: DeviceTables) -> None:
        """Plan the wrapper of the graph for this number of decodes. Its kernels read `tables` of the capture, so those
        of later steps must be at the same addresses."""
        size = metadata.num_decodes
        indptr, last = _tensor(metadata.kv_indptr), _tensor(metadata.last_block_len)
        known = self._captured_decode.get(size)
        if known is None:
            known = self._captured_decode[size] = self._decode_wrapper(
                use_cuda_graph=True,
                paged_kv_indptr_buffer=tables.kv_indptr,
                paged_kv_indices_buffer=tables.kv_indices,
                paged_kv_last_page_len_buffer=tables.last_block_len,
            )
            indices = tables.kv_indices[: len(metadata.kv_indices)]
            known.plan(indptr, indices, last, *self._dims, **self._options, **self._output)
        else:
            self._flashinfer.decode.fast_decode_plan(
                known, indptr, tables.kv_indices[: len(metadata.kv_indices)], last, *self._dims, **self._options,
                global_override_indptr_cpu=indptr,
            )  # fmt: skip
        self.decode = known

    def _decode_wrapper(self, **buffers: Any) -> Any:
        return self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=True, backend="fa2", **buffers
        )


def _tensor(array: Int32s) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
