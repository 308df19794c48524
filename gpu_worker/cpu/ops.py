"""LayerOps with compiled kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_worker.cpu.kernels import Kernels
from gpu_worker.cpu.numbers import as_array
from gpu_worker.models.config import DecoderConfig
from gpu_worker.models.rope import angle_table


def largest_logits(kernels: Kernels, logits: Tensor) -> tuple[Tensor, Tensor]:
    """As of sampling/sampler.py, for logits of the kernels' type."""
    tokens, failed = np.empty(logits.shape[0], np.int64), np.empty(logits.shape[0], np.bool_)
    kernels.largest(as_array(logits), tokens, failed)
    return torch.from_numpy(tokens), torch.from_numpy(failed)


class CpuOps:
    """LayerOps with compiled kernels, for float32 and bfloat16."""

    def __init__(self, config: DecoderConfig, max_positions: int, kernels: Kernels) -> None:
        self._kernels = kernels
        self._eps = np.float32(config.rms_norm_eps)
        self._num_queries = config.num_heads
        self._values_at = config.num_heads + config.num_kv_heads
        self._turns = torch.view_as_real(angle_table(config.rope, config.head_dim, max_positions, torch.device("cpu")))
        self._turns = self._turns.flatten(1)  # float32 [max_positions, head_dim]: cos and sin of each pair
        self._norms: dict[int, np.ndarray] = {}

    @property
    def turns(self) -> np.ndarray:
        """float32 [max_positions, head_dim]: angles() of each position."""
        return self._turns.numpy()

    def angles(self, positions: Tensor) -> np.ndarray:
        return self._turns.index_select(0, positions).numpy()

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self._kernels.norm(as_array(x), as_array(weight), self._eps, as_array(out))
        return out

    def rotary(
        self, heads: Tensor, angles: Any, query_norm: Tensor | None, key_norm: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """In place."""
        array = as_array(heads)
        norms = array[0, :2]  # a placeholder: the kernel does not read it without norms
        if query_norm is not None and key_norm is not None:
            norms = self.norms_of(query_norm, key_norm)
        has_norms = query_norm is not None
        self._kernels.rotate(array, self._values_at, angles, has_norms, norms, self._num_queries, self._eps)
        return heads[:, : self._num_queries], heads[:, self._num_queries : self._values_at]

    def norms_of(self, query_norm: Tensor, key_norm: Tensor) -> np.ndarray:
        """[2, head_dim], made once per layer."""
        key = query_norm.data_ptr()
        if key not in self._norms:
            self._norms[key] = as_array(torch.stack((query_norm, key_norm)))
        return self._norms[key]

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        self._kernels.silu_and_mul(as_array(gate_up), as_array(out))
        return out
