"""Runs FlashInfer's Python code on a CPU. A reference replaces the compiled modules. It reads their arguments by their
rules (CSR block tables, last_page_len, bottom-right causal masks, windows, interleaved rotary pairs).

So a test sees that the arguments fit FlashInfer's signatures and checks, and that the arrays have the right meaning.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gpu_worker.attention.flashinfer import load_flashinfer

# scripts/flashinfer_api.sh installs FlashInfer here.
FOLDER = Path(sys.prefix) / "flashinfer-api"

Kernel = Callable[..., None]


def import_flashinfer() -> Any:
    """The real package. Skips the test if there is none, except where CI requires it."""
    sys.path.append(str(FOLDER))
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode  # it would write some 300 files
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return load_flashinfer()
    except ModuleNotFoundError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no flashinfer ({error}): `make setup` fetches its Python side into {FOLDER}")
    finally:
        sys.path.remove(str(FOLDER))
        sys.dont_write_bytecode = before


def _at_once(kernel: Kernel) -> Kernel:
    return kernel


@contextmanager
def reference_kernels(
    launch: Callable[[Kernel], Kernel] = _at_once, make_attention: Callable[..., Fa2] | None = None, on_cpu: bool = True
) -> Iterator[Any]:
    """The module `flashinfer`. While the context lasts, the reference replaces its kernels.

    launch: wraps a kernel; callers call the wrapper. make_attention: makes the attention of each set of options.
    on_cpu: torch has no pinned memory and no CUDA device."""
    flashinfer = import_flashinfer()
    real_empty = torch.empty
    make_attention = functools.cache(make_attention or Fa2)

    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        return real_empty(*args, **kwargs)  # a CPU build of torch refuses to pin

    def attention_module(backend: str, *options: Any) -> Fa2:
        assert backend == "fa2"
        return make_attention(*options)

    with pytest.MonkeyPatch.context() as patch:
        if on_cpu:
            patch.setattr(torch, "empty", empty)
            patch.setattr(torch.cuda, "device", lambda device: nullcontext())
        for module in (flashinfer.prefill, flashinfer.decode):
            patch.setattr(module, "get_batch_prefill_module", attention_module)
        for module, getter, functions in (
            ("norm", "get_norm_module", {"rmsnorm": _rmsnorm, "fused_add_rmsnorm": _fused_add_rmsnorm}),
            ("rope", "get_rope_module", {"apply_rope_pos_ids_cos_sin_cache": _rope}),
            ("page", "get_page_module", {"append_paged_kv_cache": _append}),
        ):
            kernels = SimpleNamespace(**{name: launch(kernel) for name, kernel in functions.items()})
            patch.setattr(importlib.import_module(f"flashinfer.{module}"), getter, lambda kernels=kernels: kernels)
        activation = importlib.import_module("flashinfer.activation")
        patch.setattr(
            activation, "get_act_and_mul_module", lambda name: SimpleNamespace(silu_and_mul=launch(_silu_and_mul))
        )
        yield flashinfer


# ── attention ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Fa2Plan:
    """Sequences, as plan() got them."""

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_lens: Tensor
    page_size: int
    causal: bool
    window_left: int


class Fa2:
    """Batch prefill with paged KV, which serves decode with tensor cores as well."""

    def __init__(
        self,
        q_dtype: torch.dtype,
        kv_dtype: torch.dtype,
        o_dtype: torch.dtype,
        index_dtype: torch.dtype,
        head_dim: int,
        head_dim_vo: int,
        pos_encoding: int,
        has_window: bool,
        has_soft_cap: bool,
        fp16_reduction: bool,
    ) -> None:
        assert (index_dtype, head_dim_vo, pos_encoding) == (torch.int32, head_dim, 0)
        assert not has_soft_cap
        assert not fp16_reduction
        self.dtypes, self.head_dim, self.has_window = (q_dtype, kv_dtype, o_dtype), head_dim, has_window

    def plan(
        self,
        float_workspace: Tensor,
        int_workspace: Tensor,
        pinned_int_workspace: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_lens: Tensor,
        num_rows: int,
        batch_size: int,
        num_heads: int,
        num_kv_heads: int,
        page_size: int,
        cuda_graph: bool,
        head_dim: int,
        head_dim_vo: int,
        causal: bool,
        window_left: int,
        fixed_split_size: int,
        disable_split_kv: bool,
        num_colocated_ctas: int,
        uniform_q_len: int,
    ) -> Fa2Plan:
        for array, length in ((qo_indptr, batch_size + 1), (kv_indptr, batch_size + 1), (kv_lens, batch_size)):
            assert array.device.type == "cpu"
            assert array.dtype == torch.int32
            assert array.is_contiguous()
            assert len(array) == length
        assert qo_indptr[0] == 0
        assert qo_indptr[-1] == num_rows
        assert (qo_indptr.diff() > 0).all()
        assert num_heads % num_kv_heads == 0
        assert self.has_window == (window_left >= 0)
        pages = -(-kv_lens // page_size)
        assert torch.equal(kv_indptr.diff(), pages), "the last page holds 1..page_size tokens"
        return Fa2Plan(qo_indptr.clone(), kv_indptr.clone(), kv_lens.clone(), page_size, causal, window_left)

    def paged_run(
        self,
        float_workspace: Tensor,
        int_workspace: Tensor,
        plan: Fa2Plan,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        last_page_len: Tensor,
        out: Tensor,
        lse: Tensor | None,
        mask_mode: int,
        layout: int,
        window_left: int,
        enable_pdl: bool,
        *more: Any,
    ) -> None:
        assert (q.dtype, k_cache.dtype, out.dtype) == self.dtypes
        assert q.stride(-1) == 1
        assert out.is_contiguous()
        assert k_cache.stride() == v_cache.stride(), "unequal strides need another compiled module"
        assert layout == 0, "NHD"
        assert mask_mode == (1 if plan.causal else 0)
        assert kv_indices.dtype == last_page_len.dtype == torch.int32
        # The arrays read during the run must equal the planned arrays.
        assert torch.equal(qo_indptr, plan.qo_indptr)
        assert torch.equal(kv_indptr, plan.kv_indptr)
        assert torch.equal((kv_indptr.diff() - 1) * plan.page_size + last_page_len, plan.kv_lens)
        sm_scale = more[7]
        groups = q.shape[1] // k_cache.shape[2]
        for i, kv_len in enumerate(plan.kv_lens.tolist()):
            pages = kv_indices[kv_indptr[i] : kv_indptr[i + 1]]
            k, v = (cache[pages].flatten(0, 1)[:kv_len].double() for cache in (k_cache, v_cache))
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
            rows = slice(int(qo_indptr[i]), int(qo_indptr[i + 1]))
            scores = torch.einsum("qhd,khd->hqk", q[rows].double(), k) * sm_scale
            position = torch.arange(kv_len - (rows.stop - rows.start), kv_len)[:, None]
            key = torch.arange(kv_len)
            hidden = key > position if plan.causal else torch.zeros(len(position), kv_len, dtype=torch.bool)
            if plan.window_left >= 0:
                hidden = hidden | (key < position - plan.window_left)
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out[rows] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)


def _append(
    key: Tensor,
    value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    indices: Tensor,
    indptr: Tensor,
    last_page_len: Tensor,
    layout: int,
) -> None:
    assert layout == 0, "NHD"
    assert k_cache.stride() == v_cache.stride()
    assert len(batch_indices) == len(positions) == len(key) == len(value)
    assert len(indptr) == len(last_page_len) + 1
    for array in (batch_indices, positions, indices, indptr, last_page_len):
        assert array.dtype == torch.int32
        assert array.is_contiguous()
    entries = indptr[batch_indices] * k_cache.shape[1] + positions
    pages, offsets = indices[entries // k_cache.shape[1]], entries % k_cache.shape[1]
    for cache, new in ((k_cache, key), (v_cache, value)):
        assert new.stride(-1) == 1
        assert new.shape[1:] == cache.shape[2:]
        cache[pages, offsets] = new


# ── the rest of a layer ──────────────────────────────────────────────────────────────────────────────────────────────


def _rmsnorm(out: Tensor, x: Tensor, weight: Tensor, eps: float, enable_pdl: bool) -> None:
    assert x.dim() in (2, 3)
    assert x.stride(-1) == out.stride(-1) == 1
    assert weight.shape == x.shape[-1:]
    assert weight.dtype == x.dtype
    wide = x.float()
    out.copy_(wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float())


def _fused_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, enable_pdl: bool) -> None:
    residual.copy_(residual.float() + x.float())
    _rmsnorm(x, residual, weight, eps, enable_pdl)


def _rope(
    q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, cos_sin: Tensor, positions: Tensor, interleave: bool
) -> None:
    assert positions.is_contiguous()
    assert cos_sin.is_contiguous()
    # A lane rotates 16 bytes of a head, or 1/32 of the head if that is more. It loads as many sines as it has elements,
    # and uses half of them.
    lane = max(16 // q.element_size(), q.shape[-1] // 32)
    assert (int(positions.max()) + 1) * q.shape[-1] + lane // 2 <= cos_sin.numel(), "the last lane reads past the table"
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    for heads, turned in ((q, q_out), (k, k_out)):
        assert heads.stride(-1) == 1
        wide = heads.float()
        a, b = (wide[..., ::2], wide[..., 1::2]) if interleave else wide.chunk(2, dim=-1)
        pair = (a * cos - b * sin, b * cos + a * sin)
        turned.copy_(torch.stack(pair, dim=-1).flatten(-2) if interleave else torch.cat(pair, dim=-1))


def _silu_and_mul(out: Tensor, x: Tensor, enable_pdl: bool) -> None:
    assert x.is_contiguous()
    gate, up = x.float().chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)
