"""One decoder for all of ARCHITECTURES. Their differences are in DecoderConfig."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.models.config import DecoderConfig
from gpu_worker.models.matmul import Matmul
from gpu_worker.models.ops import LayerOps
from gpu_worker.models.weights import DecoderWeights, LayerWeights


def nothing() -> None:
    """Does nothing."""


class AllLayers(Protocol):
    """Computes all layers of some steps at once. Attention must be planned for all rows.

    tokens, positions: int64 [rows]. before_kernels: called when nothing is left to do but to run a kernel. The results
    are None, and nothing is done, if it cannot compute this step."""

    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        wanted: Tensor | None = None,
        before_kernels: Callable[[], None] = nothing,
    ) -> Tensor | None:
        """The result of Decoder.forward()."""

    def logits(self, tokens: Tensor, positions: Tensor, before_kernels: Callable[[], None] = nothing) -> Tensor | None:
        """The result of Decoder.all_logits()."""

    def head(self, hidden: Tensor) -> Tensor | None:
        """The result of Decoder.logits(): of a row the same bits as from logits()."""

    def likeliest(
        self, tokens: Tensor, positions: Tensor, before_kernels: Callable[[], None] = nothing
    ) -> tuple[Tensor, Tensor] | None:
        """The result of Decoder.likeliest()."""

    def likeliest_of(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """The result of Decoder.likeliest_of()."""


class Decoder:
    """Computes hidden states and logits for the rows of a step. `before_kernels`: forward(), all_logits()
    and likeliest() call it when the kernels start."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        attention: AttentionBackend,
        ops: LayerOps,
        matmul: Matmul[Any],
        all_layers: AllLayers | None = None,
    ) -> None:
        """`matmul`: for the kind of matrices that `weights` has. `all_layers`: a faster way for some steps."""
        self._config = config
        self._weights = weights
        self._attention = attention
        self._ops = ops
        self._matmul = matmul
        self._all_layers = all_layers
        self.before_kernels: Callable[[], None] = nothing

    def forward(self, tokens: Tensor, positions: Tensor, wanted: Tensor | None = None) -> Tensor:
        """Hidden states [wanted rows, hidden size], for logits() or final(). Attention must be planned for all rows.

        tokens, positions: int64 [rows]. wanted: int64, the rows to return; None: all.
        """
        if self._all_layers is not None:
            hidden = self._all_layers.run(tokens, positions, wanted, self.before_kernels)
            if hidden is not None:
                return hidden
        self.before_kernels()
        angles = self._ops.angles(positions)
        hidden = self.embed(tokens)
        last = self._config.num_layers - 1
        for index in range(last):
            mixed = self._attention.run(index, *self.begin_layer(index, hidden, angles))
            hidden = self.finish_layer(index, hidden, mixed)
        mixed = self._attention.run(last, *self.begin_layer(last, hidden, angles))
        return self.finish_last_layer(hidden, mixed, wanted)

    def final(self, hidden: Tensor) -> Tensor:
        """The rows from forward() after the final norm, [rows, hidden size]: transformers' last hidden states."""
        return self._ops.norm(hidden, self._weights.final_norm)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Logits [rows, vocab] of rows from forward(), written to `out` if given."""
        if self._all_layers is not None and out is None:
            made = self._all_layers.head(hidden)
            if made is not None:
                return made
        return self._matmul.of(self.final(hidden), self._weights.head, out=out)

    def all_logits(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits [rows, vocab] of all rows. The arguments are those of forward() and logits()."""
        if self._all_layers is not None:
            logits = self._all_layers.logits(tokens, positions, self.before_kernels)
            if logits is not None:
                return logits
        return self.logits(self.forward(tokens, positions))

    def likeliest(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """What largest_logits() returns for logits of all rows, if there is a faster way. For many rows, all_logits()
        may round differently."""
        layers = self._all_layers
        return None if layers is None else layers.likeliest(tokens, positions, self.before_kernels)

    def likeliest_of(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """As likeliest(), of rows from forward()."""
        return None if self._all_layers is None else self._all_layers.likeliest_of(hidden)

    @property
    def config(self) -> DecoderConfig:
        return self._config

    def embed(self, tokens: Tensor) -> Tensor:
        """The input of the first layer, [rows, hidden size]. tokens: int64 [rows]."""
        return self._weights.embedding.index_select(0, tokens)

    def angles(self, positions: Tensor) -> Any:
        """What begin_layer() needs of the positions, int64 [rows]."""
        return self._ops.angles(positions)

    def begin_layer(
        self, index: int, hidden: Tensor, angles: Any, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A layer up to its attention: queries [rows, heads, head_dim], keys and values [rows, kv_heads, head_dim].

        out: [rows, (heads + 2 * kv_heads) * head_dim], for the projection that the results may be views of."""
        config, layer = self._config, self._weights.layers[index]
        normed = self._ops.norm(hidden, layer.input_norm)
        projected = self._matmul.of(normed, layer.qkv, layer.qkv_bias, out=out)
        # The heads of a row: queries, keys, values.
        values_at = config.num_heads + config.num_kv_heads
        heads = projected.view(-1, values_at + config.num_kv_heads, config.head_dim)
        queries, keys = self._ops.rotary(heads, angles, layer.query_norm, layer.key_norm)
        return queries, keys, heads[:, values_at:]

    def finish_layer(self, index: int, hidden: Tensor, mixed: Tensor) -> Tensor:
        """A layer after its attention. May overwrite `hidden` and return it.

        mixed: the result of attention, [rows, heads * head_dim]."""
        layer = self._weights.layers[index]
        hidden = self._add_attention(layer, hidden, mixed)
        return self._mlp(layer, hidden)

    def finish_last_layer(self, hidden: Tensor, mixed: Tensor, wanted: Tensor | None) -> Tensor:
        """The last layer after its attention, for the wanted rows alone, because nothing reads the other rows."""
        if wanted is not None:
            hidden, mixed = hidden.index_select(0, wanted), mixed.index_select(0, wanted)
        return self.finish_layer(self._config.num_layers - 1, hidden, mixed) if len(hidden) else hidden

    def _add_attention(self, layer: LayerWeights, hidden: Tensor, mixed: Tensor) -> Tensor:
        """hidden + the attention's output. May overwrite `hidden`."""
        hidden = self._matmul.added(hidden, mixed, layer.output)
        return hidden if layer.output_bias is None else hidden.add_(layer.output_bias)

    def _mlp(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        """hidden + the feed-forward's output. May overwrite `hidden`."""
        gate_up = self._matmul.of(self._ops.norm(hidden, layer.mlp_norm), layer.gate_up)
        return self._matmul.added(hidden, self._ops.silu_and_mul(gate_up), layer.down)
