"""CUDA graphs for steps with prompt chunks: piece by piece, because attention cannot be captured. A step of decodes
alone that no whole graph fits (graphs.py) uses them, too.

The launches of attention depend on the lengths of a step's sequences. All other kernels of a layer depend only on the
number of rows. So everything between two attention calls is captured, for each of several numbers of rows, and
attention runs eagerly between the graphs (vLLM and SGLang call this piecewise graphs):

    eager  | embed |         | attend 0 |         | attend 1 | ... | attend last | the last layer's rest, logits
    graph          | piece 0 |          | piece 1 |

Piece i is the rest of layer i - 1 after its attention, and layer i up to its attention with the writes of its K and V.
The last layer's rest runs eagerly, because the number of rows that need logits varies.

A step is padded to the next captured number of rows. Padding rows belong to no sequence: attention does not see them,
and their K and V go to the dummy block. No other kernel mixes rows, so they change nothing but rounding: a matrix
product chooses the order of its sums by the number of rows."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gpu_worker.attention.base import SplitAttention
from gpu_worker.models.config import DecoderConfig
from gpu_worker.models.decoder import Decoder
from gpu_worker.steps.graphs import Capture, CaptureProgress, Replay
from gpu_worker.steps.inputs import StepInput


def piece_sizes(largest: int) -> list[int]:
    """Numbers of rows: multiples of 16 up to 256, then 8 sizes per doubling, and always `largest`. So a step of more
    than 128 rows has at most an eighth of padding. Empty if `largest` is 0."""
    sizes, size = [], 16
    while size < largest:
        sizes.append(size)
        size += max(16, 2 ** (size.bit_length() - 1) // 8)
    return [*sizes, largest] if largest else []


@dataclass(frozen=True, slots=True)
class PassedRows:
    """What passes between graphs and eager calls. Not in a graph's own memory, which the next replay overwrites."""

    hidden: Tensor  # [rows, hidden size]
    projected: Tensor  # [rows, (heads + 2 * kv_heads) * head_dim]: queries, keys and values
    mixed: Tensor  # [rows, heads * head_dim]: the result of attention

    @classmethod
    def make(cls, rows: int, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> PassedRows:
        heads = config.num_heads, config.num_heads + 2 * config.num_kv_heads
        widths = config.hidden_size, heads[1] * config.head_dim, heads[0] * config.head_dim
        return cls(*(torch.zeros(rows, width, dtype=dtype, device=device) for width in widths))

    def first(self, rows: int) -> PassedRows:
        return PassedRows(self.hidden[:rows], self.projected[:rows], self.mixed[:rows])


class PieceGraphs:
    """The captured pieces, by number of rows."""

    def __init__(
        self, sizes: list[int], decoder: Decoder, attention: SplitAttention, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._sizes = sorted(sizes)
        self._decoder, self._attention = decoder, attention
        self._passed = PassedRows.make(self._sizes[-1], decoder.config, dtype, device)
        self._replays: dict[int, tuple[list[Replay], PassedRows, Tensor]] = {}

    def size_for(self, num_rows: int) -> int | None:
        """The smallest size with room for the rows of a step; None: run the step eagerly."""
        return None if num_rows > self._sizes[-1] else self._sizes[bisect.bisect_left(self._sizes, num_rows)]

    def capture(
        self, prepare: Callable[[int], StepInput], capture: Capture, progress: CaptureProgress | None = None
    ) -> None:
        """`prepare(size)` stages a step of `size` padding rows. In every later step of this size, the positions and KV
        slots must be at the same addresses."""
        # The largest size first: the other graphs reuse its scratch memory.
        for done, size in enumerate(reversed(self._sizes)):
            if progress is not None:
                progress(done, len(self._sizes))
            positions, passed, queries = prepare(size).positions, self._passed.first(size), list[Tensor]()
            replays = []
            for layer in range(self._decoder.config.num_layers):
                run = partial(self._run, layer, passed, positions)
                replays.append(capture(lambda run=run, queries=queries: queries.append(run())))  # type: ignore[misc]
            self._replays[size] = replays, passed, queries[-1]
        if progress is not None:
            progress(len(self._sizes), len(self._sizes))

    def forward(self, size: int, tokens: Tensor, num_rows: int, wanted: Tensor | None) -> Tensor:
        """Decoder.forward() of a step that is padded to `size` rows. The result is valid until the next step.

        tokens: int64 [size]. num_rows: the rows that belong to a sequence. wanted: of these; None: all of them."""
        replays, passed, queries = self._replays[size]
        passed.hidden.copy_(self._decoder.embed(tokens))
        if num_rows < size:
            passed.mixed[num_rows:].zero_()
        rows = queries[:num_rows]
        attend = self._attention.attend(rows, passed.mixed[:num_rows].view(rows.shape))
        for layer, replay in enumerate(replays):
            replay()
            attend(layer)
        return self._decoder.finish_last_layer(passed.hidden[:num_rows], passed.mixed[:num_rows], wanted)

    def _run(self, layer: int, passed: PassedRows, positions: Tensor) -> Tensor:
        """Compute a piece. Returns the queries, a view of passed.projected."""
        if layer:
            hidden = self._decoder.finish_layer(layer - 1, passed.hidden, passed.mixed)
            assert hidden.data_ptr() == passed.hidden.data_ptr(), "the products do not add in place"
        angles = self._decoder.angles(positions)
        queries, keys, values = self._decoder.begin_layer(layer, passed.hidden, angles, out=passed.projected)
        assert queries.data_ptr() == passed.projected.data_ptr(), "the rotation is not in place"
        self._attention.store(layer, keys, values)
        return queries
