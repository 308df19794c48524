"""FlashInfer's own planner, compiled for the host, and a reference kernel that executes its table.

PrefillPlan() of scheduler.cuh is code for the host. It needs three functions of CUDA, which are replaced here: the
number of multiprocessors is a test's choice, and the copy to the device is left to the caller."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.flashinfer_kernels import FOLDER, Fa2, Fa2Plan
from tests.support.late_device import tensors
from tests.support.late_device.device import LateDevice

HEADERS = FOLDER / "flashinfer" / "data" / "include" / "flashinfer"
NUM_PLAN_INFO = 15
_CUDA = """
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <sstream>
#include <tuple>
#include <vector>
typedef int cudaError_t;
typedef void* cudaStream_t;
enum { cudaSuccess, cudaMemcpyHostToDevice, cudaDevAttrMultiProcessorCount, cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor, cudaDevAttrMaxSharedMemoryPerBlockOptin };
static int num_multiprocessors;
static size_t copied_bytes;
static int cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
static int cudaDeviceGetAttribute(int* value, int which, int) {
  *value = which == cudaDevAttrMultiProcessorCount ? num_multiprocessors
         : which == cudaDevAttrComputeCapabilityMajor ? 9
         : which == cudaDevAttrMaxSharedMemoryPerBlockOptin ? 232448 : 0;
  return cudaSuccess;
}
static int cudaMemcpyAsync(void*, const void*, size_t bytes, int, cudaStream_t) {
  copied_bytes = bytes; return cudaSuccess;
}
#define FLASHINFER_CUDA_CALL(call) { cudaError_t e = (call); if (e != cudaSuccess) return e; }
"""
_ENTRY = """
static std::string message;
extern "C" const char* planner_message() { return message.c_str(); }
extern "C" long planner_plan(int multiprocessors, void* float_buffer, long float_bytes, void* int_buffer,
    void* pinned, long int_bytes, int32_t* qo_indptr, int32_t* kv_indptr, int rows, int batch, int heads, int kv_heads,
    int head_dim, int page_size, int graph, int window_left, int fixed_split, int no_split, long colocated,
    long uniform, int64_t* out) {
  num_multiprocessors = multiprocessors;
  flashinfer::PrefillPlanInfo info;
  try {
    flashinfer::PrefillPlan<int32_t>(float_buffer, float_bytes, int_buffer, pinned, int_bytes, info, qo_indptr,
        kv_indptr, rows, batch, heads, kv_heads, head_dim, head_dim, page_size, graph, 2, window_left, fixed_split,
        no_split, colocated, uniform, nullptr, 2);
  } catch (const std::exception& error) { message = error.what(); return -1; }
  auto numbers = info.ToVector();
  std::copy(numbers.begin(), numbers.end(), out);
  return copied_bytes;
}
"""


def compile_planner(folder: Path) -> ctypes.CDLL:
    """Skips the test where the headers or a compiler are missing."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler for FlashInfer's planner")
    if not (HEADERS / "attention" / "scheduler.cuh").is_file():
        pytest.skip(f"no headers of FlashInfer in {HEADERS}: `make setup` fetches them")
    utils, scheduler = ((HEADERS / name).read_text() for name in ("utils.cuh", "attention/scheduler.cuh"))
    source, library = folder / "planner.cpp", folder / "planner.so"
    pieces = [
        "template <typename T1, typename T2> constexpr T1 ceil_div(const T1 x, const T2 y) { return (x + y - 1) / y; }",
        _piece(utils, "inline std::pair<int, int> GetCudaComputeCapability"),
        _piece(utils, "inline uint32_t FA2DetermineCtaTileQ"),
        _piece(scheduler, "inline auto PrefillBinarySearchKVChunkSize"),
        _piece(scheduler, "template <typename IdType>\ninline auto PrefillSplitQOKVIndptr"),
        _piece(scheduler, "struct PrefillPlanInfo", "};"),
        _piece(scheduler, "template <bool MATERIALIZE, typename IdType>\ninline cudaError_t PrefillPlanImpl"),
        _piece(scheduler, "template <typename IdType>\ninline cudaError_t PrefillPlan("),
    ]
    includes = f'#include "{HEADERS}/exception.h"\n#include "{HEADERS}/allocator.h"\n'
    source.write_text("\n".join([_CUDA, includes, "namespace flashinfer {", *pieces, "}", _ENTRY]))
    subprocess.run([compiler, "-O1", "-std=c++17", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    made = ctypes.CDLL(str(library))
    made.planner_plan.restype = ctypes.c_long
    made.planner_message.restype = ctypes.c_char_p
    return made


def _piece(source: str, begin: str, end: str = "}") -> str:
    """A function or a struct: from these words to the first closing brace at the beginning of a line."""
    found = re.search(re.escape(begin) + r".*?^" + re.escape(end) + "$", source, re.DOTALL | re.MULTILINE)
    assert found is not None, f"FlashInfer's headers have no {begin!r}"
    return found.group()


class PlannedFa2(Fa2):
    """Attention of the simulated GPU with FlashInfer's own plan: tiles of query rows, chunks of KV, merged results."""

    def __init__(self, device: LateDevice, planner: ctypes.CDLL, multiprocessors: int, *options: Any) -> None:
        super().__init__(*options)
        self._device, self._planner, self._multiprocessors = device, planner, multiprocessors
        self.graph_plans: dict[int, Sequence[int]] = {}  # by the address of the wrapper's workspace
        self.split_steps = 0

    def plan(self, float_workspace: Tensor, int_workspace: Tensor, pinned: Tensor, *args: Any) -> Any:
        made: Fa2Plan = super().plan(float_workspace, int_workspace, pinned, *args)
        rows, batch, heads, kv_heads, page_size, graph, head_dim, _, causal, window_left, *rest = args[3:]
        numbers = (ctypes.c_int64 * NUM_PLAN_INFO)()
        copied = self._planner.planner_plan(
            self._multiprocessors, _address(float_workspace), ctypes.c_long(float_workspace.nbytes),
            _address(int_workspace), _address(pinned), ctypes.c_long(pinned.nbytes),
            _address(made.qo_indptr), _address(made.kv_indptr),
            rows, batch, heads, kv_heads, head_dim, page_size, int(graph), window_left,
            rest[0], int(rest[1]), ctypes.c_long(rest[2]), ctypes.c_long(rest[3]), numbers,
        )  # fmt: skip
        assert copied >= 0, self._planner.planner_message().decode()
        tensors.copy(int_workspace[:copied], pinned[:copied], non_blocking=True)
        info = tuple(numbers)
        if graph:
            known = self.graph_plans.setdefault(int_workspace.data_ptr(), info)
            assert known == info, "the plan of a graph has other numbers than at its capture"
        chunk_tokens = pinned[info[9] : info[9] + 4].view(torch.int32)  # kv_chunk_size_ptr_offset
        self.split_steps += int(bool((made.kv_lens > chunk_tokens).any()))
        return (info, page_size, causal, window_left)

    def paged_run(self, float_workspace: Tensor, int_workspace: Tensor, plan: Any, *args: Any) -> None:
        tensors.queue(self._device, _execute, (float_workspace, int_workspace, plan, *args))


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _execute(
    float_workspace: Tensor,
    int_workspace: Tensor,
    plan: Any,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    last_page_len: Tensor,
    out: Tensor,
    *more: Any,
) -> None:
    """What each thread block of prefill.cuh does with the plan (BatchPrefillWithPagedKVCacheDevice)."""
    info, page_size, causal, window = plan
    (blocks, rows, rows_at, tile_rows, requests_at, tiles_at, chunks_at, merge_at, o_at, chunk_at, v_at, s_at, mask_at,
     graph, split) = info  # fmt: skip

    def ints(start: int, count: int) -> list[int]:
        return int_workspace[start : start + 4 * count].view(torch.int32).tolist()

    sm_scale, heads, dim = more[12], q.shape[1], q.shape[2]
    group = heads // k_cache.shape[2]
    valid = int_workspace[mask_at : mask_at + blocks].tolist() if graph else [True] * blocks
    num_rows = ints(rows_at, 1)[0] if graph else rows
    o_indptr = ints(o_at, len(last_page_len) + 1)
    chunk_tokens = ints(chunk_at, 1)[0]
    partial, partial_lse = out, None
    if split:
        most = -(-blocks * tile_rows // group)
        partial = float_workspace[v_at : v_at + 4 * most * heads * dim].view(torch.float32).view(most, heads, dim)
        partial_lse = float_workspace[s_at : s_at + 4 * most * heads].view(torch.float32).view(most, heads)
    tables = zip(valid, ints(requests_at, blocks), ints(tiles_at, blocks), ints(chunks_at, blocks), strict=True)
    for is_valid, request, tile, chunk in tables:
        if not is_valid:
            continue
        pages = kv_indices[int(kv_indptr[request]) : int(kv_indptr[request + 1])]
        kv_len = (len(pages) - 1) * page_size + int(last_page_len[request])
        first_row = int(qo_indptr[request])
        qo_len = int(qo_indptr[request + 1]) - first_row
        seen = window if window >= 0 else kv_len
        start = max(0, kv_len + tile * tile_rows // group - qo_len - seen)
        low, high = start, kv_len
        if split:
            low, high = (min((chunk + i) * chunk_tokens + start, kv_len) for i in (0, 1))
        num_chunks = -(-min(kv_len, seen + tile_rows) // chunk_tokens)
        keys, values = (cache[pages].flatten(0, 1)[low:high].double() for cache in (k_cache, v_cache))
        for packed in range(tile * tile_rows, min((tile + 1) * tile_rows, qo_len * group)):
            row, in_group = divmod(packed, group)
            position = kv_len - qo_len + row
            hidden = torch.arange(low, high) > position if causal else torch.zeros(high - low, dtype=torch.bool)
            hidden = hidden | (torch.arange(low, high) < position - seen)
            for kv_head in range(k_cache.shape[2]):
                head = kv_head * group + in_group
                scores = (keys[:, kv_head] @ q[first_row + row, head].double()) * sm_scale
                scores = scores.masked_fill(hidden, -torch.inf)
                is_empty = bool(hidden.all())
                mixed = torch.zeros(dim, dtype=torch.double) if is_empty else scores.softmax(0) @ values[:, kv_head]
                if partial_lse is None:
                    partial[o_indptr[request] + row, head] = mixed.to(out.dtype)
                else:
                    place = o_indptr[request] + row * num_chunks + chunk
                    partial[place, head] = mixed.float()
                    partial_lse[place, head] = -torch.inf if is_empty else scores.logsumexp(0)
    if partial_lse is not None:
        merge = ints(merge_at, rows + 1)
        for row in range(num_rows):
            parts = slice(merge[row], merge[row + 1])
            weights = partial_lse[parts].double().softmax(0)
            out[row] = (weights.unsqueeze(-1) * partial[parts].double()).sum(0).to(out.dtype)
