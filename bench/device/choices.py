"""Design choices that only a measurement on a GPU can check: each beside its alternative, at Llama-3.1-8B's widths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from bench.device.measure import Clock
from gpu_worker.sampling.filters import mask_top_k, mask_top_p

# Input and output widths of a layer's matmuls: qkv, output, gate and up, down.
MATMULS = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
ROWS = (1, 32, 128)
# The weights rotate over this many bytes, which is more than the GPU's cache holds.
ROTATED_BYTES = 512 << 20


def choices(
    flashinfer: Any, clock: Clock, device: torch.device, dtype: torch.dtype, scale: int = 1
) -> Iterator[dict[str, Any]]:
    """Measures each choice and its alternative. `scale` divides the widths."""
    for rows in ROWS:
        as_stored = transposed = 0.0
        for width, out in MATMULS:
            x = torch.randn(rows, width // scale, device=device, dtype=dtype)
            weights = _weights(out // scale, width // scale, device, dtype)
            as_stored += _each_ms(clock, weights, lambda w, x=x: x.mm(w.t()))  # type: ignore[misc]
            turned = [w.t().contiguous() for w in weights]
            transposed += _each_ms(clock, turned, lambda w, x=x: x.mm(w))  # type: ignore[misc]
        yield {
            "rows": rows,
            "what": "matmuls of a layer, weights [out, in] (chosen) or [in, out]",
            "chosen_ms": as_stored,
            "other_ms": transposed,
        }
        yield {
            "rows": rows,
            "what": "output matmul, residual, norm: addmm_ + rmsnorm (chosen) or mm + fused_add_rmsnorm",
            **_residual(flashinfer, clock, rows, 4096 // scale, device, dtype),
        }
        for top_k in (0, 50):
            yield {
                "rows": rows,
                "what": "top-p: exact (chosen) or softmax + top_p_renorm_probs(is_deterministic=True)",
                "after_top_k": top_k,
                **_top_p(flashinfer, clock, rows, 128_256 // scale, device, top_k),
            }


def _residual(
    flashinfer: Any, clock: Clock, rows: int, width: int, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    x, residual = (torch.randn(rows, width, device=device, dtype=dtype) * 0.01 for _ in range(2))
    norm = torch.ones(width, device=device, dtype=dtype)
    weights = _weights(width, width, device, dtype)

    def chosen(w: Tensor) -> None:
        residual.addmm_(x, w.t())
        flashinfer.rmsnorm(residual, norm, 1e-5)

    def other(w: Tensor) -> None:
        flashinfer.fused_add_rmsnorm(x.mm(w.t()), residual, norm, 1e-5)

    return {"chosen_ms": _each_ms(clock, weights, chosen), "other_ms": _each_ms(clock, weights, other)}


def _top_p(flashinfer: Any, clock: Clock, rows: int, vocab: int, device: torch.device, top_k: int) -> dict[str, float]:
    """Both ways to filter by top-p, and in how many rows they differ. The logits are bf16, so many are equal."""
    logits, top_p = (
        (2 * torch.randn(rows, vocab, device=device)).bfloat16().float(),
        torch.full((rows,), 0.9, device=device),
    )
    if top_k:
        logits = mask_top_k(logits, torch.full((rows,), top_k, device=device), top_k)

    def other() -> Tensor:
        kept: Tensor = flashinfer.top_p_renorm_probs(logits.softmax(-1), top_p, is_deterministic=True)
        return kept

    different = ((other() == 0) != (mask_top_p(logits, top_p) == -torch.inf)).any(-1).sum()
    return {
        "chosen_ms": clock.median_ms(lambda: mask_top_p(logits, top_p), 10),
        "other_ms": clock.median_ms(other, 10),
        "different_rows": int(different),
    }


def _weights(out: int, width: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    count = max(2, ROTATED_BYTES // (out * width * dtype.itemsize)) if device.type == "cuda" else 2
    return [torch.randn(out, width, device=device).mul_(0.01).to(dtype) for _ in range(count)]


def _each_ms(clock: Clock, weights: list[Tensor], work: Callable[[Tensor], object]) -> float:
    def all_of_them() -> None:
        for weight in weights:
            work(weight)

    return clock.median_ms(all_of_them, 10) / len(weights)
