"""The operations of a decoder layer other than matrix products and attention: one contract, and an
implementation with plain torch. The others are flashinfer_ops.py and cpu/ops.py.

There is no fused add+norm. The products before the norms add to the residual stream themselves (Matmul.added). This
saves one pass over memory, compared with a product followed by a kernel for add and norm.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_worker.models.config import DecoderConfig
from gpu_worker.models.rope import angle_table, rotate


class LayerOps(Protocol):
    """The operations that a decoder layer calls."""

    def angles(self, positions: Tensor) -> Any:
        """The angles for rotary(), the same for all layers of a step. positions: int64 [rows]."""

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm of x [rows, width] with the model's epsilon."""

    def rotary(
        self, heads: Tensor, angles: Any, query_norm: Tensor | None, key_norm: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Queries [rows, heads, head_dim] and keys [rows, kv_heads, head_dim], normed if the model has norms, and
        rotated.

        heads: [rows, heads + 2 * kv_heads, head_dim]: queries, keys and values of a row, with rotary pairs side by side
        (models/rope.py). The queries and keys may be overwritten.
        """

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """silu(first half) * second half of each row: [rows, width] from [rows, 2 * width], which may be
        overwritten."""


class TorchOps:
    """LayerOps with plain torch, for every device and type."""

    def __init__(self, config: DecoderConfig, max_positions: int, device: torch.device) -> None:
        self._eps = config.rms_norm_eps
        self._keys_at, self._values_at = config.num_heads, config.num_heads + config.num_kv_heads
        self._turns = angle_table(config.rope, config.head_dim, max_positions, device)

    def angles(self, positions: Tensor) -> Tensor:
        return self._turns.index_select(0, positions).unsqueeze(1)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.rms_norm(x, (x.shape[-1],), weight, self._eps)

    def rotary(
        self, heads: Tensor, angles: Any, query_norm: Tensor | None, key_norm: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        turning = heads[:, : self._values_at]
        if query_norm is not None and key_norm is not None:
            queries = self.norm(turning[:, : self._keys_at], query_norm)
            turning = torch.cat((queries, self.norm(turning[:, self._keys_at :], key_norm)), dim=1)
        turned = rotate(turning, angles)
        return turned[:, : self._keys_at], turned[:, self._keys_at :]

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
