"""One decoder for all of ARCHITECTURES. Their differences are in DecoderConfig."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.models.config import DecoderConfig
from gpu_worker.models.matmul import Matmul
from gpu_worker.models.ops import LayerOps
from gpu_worker.models.weights import DecoderWeights, LayerWeights


class Decoder:
    """Computes hidden states and logits for the rows of a step."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        attention: AttentionBackend,
        ops: LayerOps,
        matmul: Matmul[Any],
    ) -> None:
        """`matmul`: for the kind of matrices that `weights` has."""
        self._config = config
        self._weights = weights
        self._attention = attention
        self._ops = ops
        self._matmul = matmul

    def forward(self, tokens: Tensor, positions: Tensor, wanted: Tensor | None = None) -> Tensor:
        """Hidden states [wanted rows, hidden size], for logits() or final(). Attention must be planned for all rows.

        tokens, positions: int64 [rows]. wanted: int64, the rows to return; None: all. After its attention, the last
        layer computes only these rows, because nothing reads the other rows of that layer.
        """
        angles = self._ops.angles(positions)
        hidden = self._weights.embedding.index_select(0, tokens)
        last = len(self._weights.layers) - 1
        for index, layer in enumerate(self._weights.layers):
            mixed = self._attend(index, layer, hidden, angles)
            if index == last and wanted is not None:
                hidden, mixed = hidden.index_select(0, wanted), mixed.index_select(0, wanted)
                if not len(wanted):
                    break
            hidden = self._add_attention(layer, hidden, mixed)
            hidden = self._mlp(layer, hidden)
        return hidden

    def final(self, hidden: Tensor) -> Tensor:
        """The rows from forward() after the final norm, [rows, hidden size]: transformers' last hidden states."""
        return self._ops.norm(hidden, self._weights.final_norm)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Logits [rows, vocab] of rows from forward(), written to `out` if given."""
        return self._matmul.of(self.final(hidden), self._weights.head, out=out)

    def _attend(self, index: int, layer: LayerWeights, hidden: Tensor, angles: Any) -> Tensor:
        """What attention mixes for each row, [rows, heads * head_dim]. Writes the rows' keys and values to the pool."""
        config = self._config
        normed = self._ops.norm(hidden, layer.input_norm)
        projected = self._matmul.of(normed, layer.qkv, layer.qkv_bias)
        # The heads of a row: queries, keys, values.
        values_at = config.num_heads + config.num_kv_heads
        heads = projected.view(-1, values_at + config.num_kv_heads, config.head_dim)
        queries, keys = self._ops.rotary(heads, angles, layer.query_norm, layer.key_norm)
        return self._attention.run(index, queries, keys, heads[:, values_at:])

    def _add_attention(self, layer: LayerWeights, hidden: Tensor, mixed: Tensor) -> Tensor:
        """hidden + the attention's output. May overwrite `hidden`."""
        hidden = self._matmul.added(hidden, mixed, layer.output)
        return hidden if layer.output_bias is None else hidden.add_(layer.output_bias)

    def _mlp(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        """hidden + the feed-forward's output. May overwrite `hidden`."""
        gate_up = self._matmul.of(self._ops.norm(hidden, layer.mlp_norm), layer.gate_up)
        return self._matmul.added(hidden, self._ops.silu_and_mul(gate_up), layer.down)
