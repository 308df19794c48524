"""The input of an attention backend, and its duties.

A step's rows are tokens: first one row per decoding sequence, then the chunks of prefills and draft rows, one sequence
after the other. The block tables of all sequences are concatenated (CSR), as FlashInfer and our torch backend need
them:

    rows          | d0 | d1 | d2 | p0 p0 p0 p0 | p1 p1 |
    qo_indptr     0    1    2    3             7       9
    kv_indices    | 4 9 | 2 | 7 8 1 | 5 6 | 3 |           blocks of d0, d1, d2, p0, p1
    kv_indptr     0     2   3       6     8   9
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DeviceTables:
    """Arrays of AttentionMetadata on the device, int32."""

    kv_indptr: Tensor
    last_block_len: Tensor
    kv_indices: Tensor  # longer than this step's block ids: later steps of a graph may have more


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The arrays of one step, on the host unless a comment says otherwise. Sequence i has rows
    qo_indptr[i]:qo_indptr[i+1], and kv_lens(block_size)[i] tokens, including its new ones. A row attends to the tokens
    up to its own. In a layer with an attention window, a row attends only to the last tokens of these."""

    num_decodes: int
    qo_indptr: Int32s  # [sequences + 1], rows
    kv_indptr: Int32s  # [sequences + 1], blocks
    kv_indices: Int32s  # [kv_indptr[-1]], block ids
    last_block_len: Int32s  # [sequences], tokens in the last block, 1..block_size
    # int32 or int64 [rows] on the device: block * block_size + offset of the row's K and V
    slot_mapping: Tensor
    # True: the step runs in a captured graph, or is being captured. It has only decodes, as many as the graph has, and
    # the arrays that run() reads must be at the addresses that they had when the graph was captured.
    captured: bool = False
    tables: DeviceTables | None = None  # if the inputs have put them on the device

    @property
    def num_sequences(self) -> int:
        return len(self.last_block_len)

    @property
    def num_rows(self) -> int:
        return int(self.qo_indptr[-1])

    def kv_lens(self, block_size: int) -> Int32s:
        """Tokens in the KV blocks of each sequence, after this step's K and V are written."""
        return (self.kv_indptr[1:] - self.kv_indptr[:-1] - 1) * block_size + self.last_block_len

    def by_row(self, block_size: int) -> AttentionMetadata:
        """The same rows, each as its own decode. All KV that a row sees is stored before any row attends."""
        counts = np.diff(self.qo_indptr)
        owners = np.repeat(np.arange(self.num_sequences), counts)
        behind = self.qo_indptr[owners + 1] - 1 - np.arange(self.num_rows)  # rows of the same sequence after this row
        kv_lens = self.kv_lens(block_size)[owners] - behind
        num_blocks = -(-kv_lens // block_size)
        kv_indptr = np.concatenate(([0], np.cumsum(num_blocks))).astype(np.int32)
        places = np.arange(kv_indptr[-1]) + np.repeat(self.kv_indptr[owners] - kv_indptr[:-1], num_blocks)
        return AttentionMetadata(
            num_decodes=self.num_rows,
            qo_indptr=np.arange(self.num_rows + 1, dtype=np.int32),
            kv_indptr=kv_indptr,
            kv_indices=self.kv_indices[places],
            last_block_len=(kv_lens - (num_blocks - 1) * block_size).astype(np.int32),
            slot_mapping=self.slot_mapping,
        )


class AttentionBackend(Protocol):
    """Owns only scratch memory. It gets the KV pool when it is made."""

    # Whether it multiplies what is behind a sequence's tokens in its last block, by 0: then that must not be NaN.
    reads_whole_blocks: bool

    def plan(self, metadata: AttentionMetadata) -> None:
        """Call once per step, before any layer."""

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write key and value [rows, kv_heads, head_dim] to their slots of the pool, then attend.

        query: [rows, heads, head_dim]. The result is [rows, heads * head_dim].
        """


@runtime_checkable
class AdvancingAttention(AttentionBackend, Protocol):
    """An attention backend that need not plan a step of the same decodes again. It reads no whole blocks."""

    def advance(self, block_table: Int32s, slots: npt.NDArray[np.integer]) -> None:
        """Instead of plan(): each decode of the planned step is one token further. block_table: [slots, blocks]. slots:
        of the decodes."""


@runtime_checkable
class SplitAttention(AttentionBackend, Protocol):
    """An attention backend with the two parts of run(): a captured graph may contain store(), but not attend()."""

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write key and value [rows, kv_heads, head_dim] to the KV slots of the step."""

    def attend(self, query: Tensor, out: Tensor) -> Callable[[int], None]:
        """Returns a function that attends for a layer of this step, with the same memory in each layer.

        query, out: [rows, heads, head_dim], of the rows that belong to a sequence."""
