"""One decoder for Llama, Mistral, Qwen2 and Qwen3: what differs between them is in DecoderConfig."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.models.config import DecoderConfig
from gpu_worker.models.rope import angle_table, rotate
from gpu_worker.models.weights import DecoderWeights, LayerWeights


class Decoder:
    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, attention: AttentionBackend, max_model_len: int
    ) -> None:
        self._config = config
        self._weights = weights
        self._attention = attention
        self._turns = angle_table(config.rope, config.head_dim, max_model_len, weights.embedding.device)

    def forward(self, tokens: Tensor, positions: Tensor, sampling_rows: Tensor | None) -> Tensor:
        """Logits [rows that sample, vocab]; attention must have been planned for these rows.

        tokens, positions: int64 [rows]; sampling_rows: int64 indexes of rows, None for all of them.
        """
        turns = self._turns.index_select(0, positions).unsqueeze(1)
        hidden = self._weights.embedding.index_select(0, tokens)
        for index, layer in enumerate(self._weights.layers):
            self._attend(index, layer, hidden, turns)
            self._mlp(layer, hidden)
        if sampling_rows is not None:
            hidden = hidden.index_select(0, sampling_rows)
        return self._norm(hidden, self._weights.final_norm).mm(self._weights.head)

    def _attend(self, index: int, layer: LayerWeights, hidden: Tensor, turns: Tensor) -> None:
        """Adds the attention's output to `hidden`, in place."""
        config = self._config
        normed = self._norm(hidden, layer.input_norm)
        bias = layer.qkv_bias
        projected = normed.mm(layer.qkv) if bias is None else torch.addmm(bias, normed, layer.qkv)
        # Heads of a row: queries, keys, values.
        keys_at, values_at = config.num_heads, config.num_heads + config.num_kv_heads
        heads = projected.view(-1, values_at + config.num_kv_heads, config.head_dim)
        turning = heads[:, :values_at]
        if layer.query_norm is not None and layer.key_norm is not None:
            queries = self._norm(turning[:, :keys_at], layer.query_norm)
            turning = torch.cat((queries, self._norm(turning[:, keys_at:], layer.key_norm)), dim=1)
        turned = rotate(turning, turns)
        mixed = self._attention.run(index, turned[:, :keys_at], turned[:, keys_at:], heads[:, values_at:])
        hidden.addmm_(mixed, layer.output)
        if layer.output_bias is not None:
            hidden.add_(layer.output_bias)

    def _mlp(self, layer: LayerWeights, hidden: Tensor) -> None:
        """Adds the feed-forward's output to `hidden`, in place."""
        gate, up = self._norm(hidden, layer.mlp_norm).mm(layer.gate_up).chunk(2, dim=-1)
        hidden.addmm_(F.silu(gate).mul_(up), layer.down)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.rms_norm(x, (x.shape[-1],), weight, self._config.rms_norm_eps)
