"""LayerOps with FlashInfer's kernels, for 16-bit models on an NVIDIA GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpu_worker.models.config import DecoderConfig
from gpu_worker.models.rope import angle_table


class FlashInferOps:
    """LayerOps on FlashInfer's kernels. `flashinfer`: the module (passed in, so that tests can read its calls)."""

    def __init__(self, flashinfer: Any, config: DecoderConfig, max_positions: int, device: torch.device) -> None:
        self._flashinfer = flashinfer
        self._eps, self._head_dim = config.rms_norm_eps, config.head_dim
        self._keys_at, self._values_at = config.num_heads, config.num_heads + config.num_kv_heads
        # One row more than there are positions: the kernel loads as many sines as a lane has elements, and uses half of
        # them. So the last lane of a row reads up to 16 bytes of the next row (FlashInfer 0.7.2.post1, pos_enc.cuh).
        turns = angle_table(config.rope, config.head_dim, max_positions + 1, device)
        self._cos_sin = torch.cat((turns.real, turns.imag), dim=1).contiguous()  # float32 [max_positions + 1, head_dim]

    def angles(self, positions: Tensor) -> Tensor:
        return positions

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        normed: Tensor = self._flashinfer.rmsnorm(x, weight, self._eps)
        return normed

    def rotary(
        self, heads: Tensor, angles: Any, query_norm: Tensor | None, key_norm: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """In place."""
        queries, keys = heads[:, : self._keys_at], heads[:, self._keys_at : self._values_at]
        if query_norm is not None and key_norm is not None:
            for part, weight in ((queries, query_norm), (keys, key_norm)):
                self._flashinfer.rmsnorm(part, weight, self._eps, out=part)
        self._flashinfer.apply_rope_with_cos_sin_cache_inplace(
            angles, queries.flatten(1), keys.flatten(1), self._head_dim, self._cos_sin, is_neox=False
        )
        return queries, keys

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        product: Tensor = self._flashinfer.silu_and_mul(gate_up)
        return product
