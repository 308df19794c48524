"""Attention over the paged pool with FlashInfer's kernels, for 16-bit models on an NVIDIA GPU.

Decode rows use the decode wrapper, and chunks use the prefill wrapper. Each window has its own pair of wrappers,
because a wrapper has one window, which plan() sets. Choices (sources: docs of FlashInfer 0.7.2, and what vLLM and
SGLang do):

- fa2 for both, with tensor cores for decode: it allows any number of query heads per KV head, both share one kernel
  module, and on paged KV it is no slower than fa3;
- plan() gets host arrays, so it does not wait for the device; only the block ids are already on the device;
- the wrapper of a graph reads the step's arrays where the inputs have put them, and _plan_again() copies none;
- one kernel writes K and V of a step; it gets the pool as blocks of one token, with the KV slots as block ids.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
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
# Index of the keys in the arguments of paged_run(). The values come next (prefill.py of FlashInfer 0.7.2).
_KEYS_AT = 4


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
    """SplitAttention. `flashinfer`: the module (passed in, so that tests can read its calls). `windows`: per layer,
    how many tokens a token sees, itself included; 0: all."""

    reads_whole_blocks = True

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
        self._planned = DeviceEvent(device, blocking=True)
        # All wrappers share it, because they run one after the other.
        workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=device)
        self._wrappers = {window: _Wrappers(flashinfer, pool, window, num_heads, workspace) for window in set(windows)}
        self._windows = windows

    def plan(self, metadata: AttentionMetadata) -> None:
        # plan() writes to the wrapper's pinned memory, and the copy for the last step waits until the step before has
        # run. So if three steps are in flight, the third one waits here, and not on the device.
        self._planned.wait()
        self._slots = metadata.slot_mapping
        for wrappers in self._wrappers.values():
            wrappers.plan(metadata)
        self._planned.record()

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.store(layer, key, value)
        out = torch.empty(len(query), *self._shape, dtype=query.dtype, device=query.device)
        for wrapper, rows in self._wrappers[self._windows[layer]].parts:
            wrapper.run(query[rows], self._kv[layer], out=out[rows])
        return out.flatten(1)

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        rows = len(key)
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

    def attend(self, query: Tensor, out: Tensor) -> Callable[[int], None]:
        calls = {
            window: [_RepeatedRun(wrapper, query[rows], out[rows]) for wrapper, rows in wrappers.parts]
            for window, wrappers in self._wrappers.items()
        }

        def attend(layer: int) -> None:
            for call in calls[self._windows[layer]]:
                call(*self._kv[layer])

        return attend


class _RepeatedRun:
    """run() of a wrapper for layer after layer of a step. Its checks take more time on the host than the launch of the
    kernel, and only the KV differs between layers. So the first layer calls run(), and the others repeat the call of
    the kernel that run() makes."""

    def __init__(self, wrapper: Any, query: Tensor, out: Tensor) -> None:
        self._wrapper, self._query, self._out = wrapper, query, out
        self._module = wrapper._cached_module
        self._arguments: list[Any] = []

    def __call__(self, keys: Tensor, values: Tensor) -> None:
        if not self._arguments:
            self._wrapper._cached_module = self  # run() calls its paged_run(), which keeps the arguments
            try:
                self._wrapper.run(self._query, (keys, values), out=self._out)
            finally:
                self._wrapper._cached_module = self._module
        self._arguments[_KEYS_AT : _KEYS_AT + 2] = keys, values
        self._module.paged_run(*self._arguments)

    def paged_run(self, *arguments: Any) -> None:
        self._arguments = list(arguments)


class _Wrappers:
    """FlashInfer's wrappers for the layers of one window. plan() sets `parts`: which wrappers run, on which rows."""

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
        self._decode = self._decode_wrapper()
        self._captured_decode: dict[int, Any] = {}  # by batch size
        self.parts: list[tuple[Any, slice]] = []
        self._prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")

    def plan(self, metadata: AttentionMetadata) -> None:
        decodes, tables = metadata.num_decodes, metadata.tables
        assert tables is not None, "the inputs do not stage block ids"
        self.parts = []
        if metadata.captured:
            self.parts.append((self._plan_graph(metadata, tables), slice(0, decodes)))
        elif decodes:
            self.parts.append((self._decode, slice(0, decodes)))
            self._decode.plan(
                _tensor(metadata.kv_indptr[: decodes + 1]),
                tables.kv_indices[: int(metadata.kv_indptr[decodes])],
                _tensor(metadata.last_block_len[:decodes]),
                *self._dims,
                **self._options,
                **self._output,
            )
        if decodes < metadata.num_sequences:
            self.parts.append((self._prefill, slice(decodes, metadata.num_rows)))
            # The block tables of the chunks follow those of the decodes, and kv_indptr continues there.
            self._prefill.plan(
                _tensor(metadata.qo_indptr[decodes:] - metadata.qo_indptr[decodes]),
                _tensor(metadata.kv_indptr[decodes:]),
                tables.kv_indices[: len(metadata.kv_indices)],
                _tensor(metadata.last_block_len[decodes:]),
                *self._dims,
                causal=True,
                **self._options,
                **self._output,
            )

    def _plan_graph(self, metadata: AttentionMetadata, tables: DeviceTables) -> Any:
        """Plan and return the wrapper of the graph for this number of decodes. Its kernels read `tables` of the
        capture, so those of later steps must be at the same addresses."""
        known = self._captured_decode.get(metadata.num_decodes)
        if known is None:
            known = self._captured_decode[metadata.num_decodes] = self._decode_wrapper(
                use_cuda_graph=True,
                paged_kv_indptr_buffer=tables.kv_indptr,
                paged_kv_indices_buffer=tables.kv_indices,
                paged_kv_last_page_len_buffer=tables.last_block_len,
            )
            known.plan(
                _tensor(metadata.kv_indptr),
                tables.kv_indices[: len(metadata.kv_indices)],
                _tensor(metadata.last_block_len),
                *self._dims,
                **self._options,
                **self._output,
            )
        else:
            self._plan_again(known, metadata)
        return known

    def _plan_again(self, wrapper: Any, metadata: AttentionMetadata) -> None:
        """Plan new lengths for the same number of decodes. Calls only the planner, as vLLM's fast_plan_decode does: the
        rest of plan() checks and copies what a graph does not change, in 0.1 ms. The arguments are those of FlashInfer
        0.7.2 (fast_decode_plan() in decode.py)."""
        num_heads, num_kv_heads, head_dim, block_size = self._dims
        rows = metadata.num_decodes
        wrapper._plan_info = wrapper._cached_module.plan(
            wrapper._float_workspace_buffer,
            wrapper._int_workspace_buffer,
            wrapper._pin_memory_int_workspace_buffer,
            torch.from_numpy(metadata.qo_indptr),
            torch.from_numpy(metadata.kv_indptr),
            torch.from_numpy(metadata.kv_lens(block_size)),
            rows,
            rows,  # sequences
            num_heads,
            num_kv_heads,
            block_size,
            True,  # in a graph
            head_dim,
            head_dim,
            False,  # causal
            self._options["window_left"],
            -1,  # no fixed size of a split
            False,  # may split KV
            0,  # no CTAs beside others
            0,  # no uniform number of rows
        )

    def _decode_wrapper(self, **buffers: Any) -> Any:
        return self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=True, backend="fa2", **buffers
        )


def _tensor(array: Int32s) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
