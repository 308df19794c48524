"""Pools the final hidden states of inputs to vectors, in the step that computes an input's last token.

`last` needs the hidden state of that token alone, so an input may begin with cached KV, and nothing is kept between its
chunks. `mean` needs the hidden states of all tokens: the sums of the chunks so far stay on the device, by slot. The
scheduler reuses no KV for such an input, so that its first chunk in a slot begins at position 0, also after a
preemption. That chunk clears the slot's sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_worker.device import fetch, upload
from gpu_worker.errors import ProtocolViolation
from gpu_worker.models.embedding import EmbeddingConfig
from gpu_worker.steps.rows import Int32s, Int64s, StepRows
from paceline.v1.worker_pb2 import StepResult


@dataclass(frozen=True, slots=True)
class Pooled:
    """The vectors of the inputs that a step completes, on their way to host memory."""

    slots: Int64s  # [inputs]
    vectors: Tensor  # float32 [inputs, hidden size]

    def add_to(self, result: StepResult, no_number: str) -> None:
        """Call this when the step is done. A vector that is not finite fails its row with the message `no_number`."""
        vectors = self.vectors.numpy().astype("<f4", copy=False)
        finite = np.isfinite(vectors).all(axis=1)
        for slot, vector, is_finite in zip(self.slots.tolist(), vectors, finite.tolist(), strict=True):
            if is_finite:
                result.embeddings.add(slot=slot, values=vector.tobytes())
            else:
                result.errors.add(slot=slot, message=no_number)


class Pooler:
    """Pools hidden states to vectors. Keeps the sums of unfinished inputs by slot."""

    def __init__(self, config: EmbeddingConfig, hidden_size: int, max_num_seqs: int, device: torch.device) -> None:
        self._normalize = config.normalize
        self._device = device
        # By slot: the sum of the hidden states of the tokens so far.
        self._sums: Tensor | None = None
        if config.pooling == "mean":
            self._sums = torch.zeros(max_num_seqs, hidden_size, dtype=torch.float32, device=device)

    @property
    def needs_all_rows(self) -> bool:
        """Whether pool() needs the hidden states of all rows, and not only of the last rows of inputs."""
        return self._sums is not None

    def pool(self, rows: StepRows, num_tokens: Int32s, hidden: Tensor) -> Pooled | None:
        """The vectors of the inputs that this step completes (rows.samples); None if there are none. Does not wait for
        the device.

        num_tokens: by slot. hidden: [rows, hidden size], after the final norm; without needs_all_rows, the last row of
        each input that this step completes. Raises ProtocolViolation for a row that cannot be pooled."""
        if rows.num_decodes:
            raise ProtocolViolation("an embedding model has no decode rows")
        slots = rows.slots[rows.samples]
        vectors = hidden.float() if self._sums is None else self._means(self._sums, rows, num_tokens, hidden)
        if not len(slots):
            return None
        if self._normalize:
            vectors = F.normalize(vectors, dim=-1)
        return Pooled(slots, fetch(vectors))

    def _means(self, sums: Tensor, rows: StepRows, num_tokens: Int32s, hidden: Tensor) -> Tensor:
        """Add the rows to the sums of their slots. Returns the means of the inputs that the step completes."""
        if len(first := rows.slots[rows.starts == 0]):
            sums.index_fill_(0, upload(first, self._device), 0.0)
        # A CPU adds the rows in their order, so the rounded sum does not depend on where chunks end.
        sums.index_add_(0, upload(np.repeat(rows.slots, rows.counts), self._device), hidden.float())
        slots = rows.slots[rows.samples]
        counts = upload(num_tokens[slots], self._device).unsqueeze(-1)
        return sums.index_select(0, upload(slots, self._device)) / counts
