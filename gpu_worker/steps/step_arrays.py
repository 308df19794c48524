"""A step's rows as host arrays, computed from the slots' state: the input of the forward pass and of attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from gpu_worker.kv.pool import DUMMY_BLOCK
from gpu_worker.steps.rows import NO_SLOTS, StepRows
from gpu_worker.steps.slots import SlotBuffers, SlotLimits

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
_Integer = TypeVar("_Integer", np.int32, np.int64)
_NO_TOKENS: Int64s = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class StepArrays:
    """Rows and sequences in the order of attention/base.py: decodes first, then the chunks."""

    decode_slots: Int64s  # [decodes]; the input is the slot's last sampled token
    prefill_tokens: Int64s  # [rows - decodes] of prefill rows and draft rows
    positions: Int64s  # [rows]
    slot_mapping: Int64s  # [rows] block * block_size + offset
    qo_indptr: Int32s  # [sequences + 1]
    kv_indptr: Int32s  # [sequences + 1]
    kv_indices: Int32s  # [kv_indptr[-1]]
    last_block_len: Int32s  # [sequences]
    # Rows that need logits: rows that sample, then draft rows, then scored rows; None: all rows.
    sampling_rows: Int32s | None
    sampled_slots: Int64s  # [rows that sample], without draft rows
    draws: Int32s | None = None  # [rows, NUM_PARAMETERS] for a graph that samples (fused.py)

    @property
    def num_decodes(self) -> int:
        return len(self.decode_slots)

    @property
    def num_rows(self) -> int:
        return len(self.positions)

    @property
    def decodes_only(self) -> bool:
        return self.num_decodes == self.num_rows

    def padded(self, size: int, spare_slot: int) -> StepArrays:
        """A step with only decodes, padded to `size` with sequences of one token in the dummy block. Each takes its
        token from `spare_slot`, and has position 0. The step's result leaves the padding out."""
        assert self.decodes_only, "chunks are not padded"
        more = size - self.num_rows
        if more == 0:
            return self
        return StepArrays(
            decode_slots=_grown(self.decode_slots, more, spare_slot),
            prefill_tokens=self.prefill_tokens,
            positions=_grown(self.positions, more, 0),
            slot_mapping=_grown(self.slot_mapping, more, 0),
            qo_indptr=np.arange(size + 1, dtype=np.int32),
            kv_indptr=np.concatenate((self.kv_indptr, self.kv_indptr[-1] + np.arange(1, more + 1, dtype=np.int32))),
            kv_indices=_grown(self.kv_indices, more, DUMMY_BLOCK),
            last_block_len=_grown(self.last_block_len, more, 1),
            sampling_rows=self.sampling_rows,
            sampled_slots=self.sampled_slots,
            draws=None if self.draws is None else np.pad(self.draws, ((0, more), (0, 0))),
        )

    def with_padding_rows(self, size: int) -> StepArrays:
        """Padded to `size` rows with rows of no sequence, for captured pieces: token 0 at position 0, with its KV slot
        in the dummy block. Attention does not see these rows."""
        more = size - self.num_rows
        return replace(
            self,
            prefill_tokens=_grown(self.prefill_tokens, more, 0),
            positions=_grown(self.positions, more, 0),
            slot_mapping=_grown(self.slot_mapping, more, 0),
        )


def step_arrays(rows: StepRows, table: SlotBuffers, scored_rows: npt.NDArray[np.integer] | None = None) -> StepArrays:
    """The arrays of a step. `scored_rows`: more rows that need logits. Only the block tables, and the token ids of
    chunks, take Python code per sequence."""
    block_size = table.limits.block_size
    kv_lens = rows.starts + rows.counts
    widths = -(-kv_lens // block_size)
    last_block_len = kv_lens - (widths - 1) * block_size
    kv_indices, kv_indptr = _tables(table, rows.slots, widths), indptr(widths)
    if rows.num_decodes == len(rows.slots):
        # One row for each sequence, and each row samples. Its KV slot is the last one of the sequence.
        slot_mapping = kv_indices[kv_indptr[1:] - 1] * np.int64(block_size) + (last_block_len - 1)
        return StepArrays(
            decode_slots=rows.slots,
            prefill_tokens=_NO_TOKENS,
            positions=rows.starts.astype(np.int64),
            slot_mapping=slot_mapping,
            qo_indptr=np.arange(len(rows.slots) + 1, dtype=np.int32),
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            last_block_len=last_block_len,
            sampling_rows=None,
            sampled_slots=rows.slots,
        )
    qo_indptr = indptr(rows.counts)
    owners = np.repeat(np.arange(len(rows.slots)), rows.counts)
    positions = rows.starts[owners] + np.arange(len(owners)) - qo_indptr[owners]
    block_ids = table.block_table[rows.slots[owners], positions // block_size]
    wanted = qo_indptr[1:][rows.samples] - 1
    if rows.num_drafted:
        wanted = np.concatenate((wanted, np.arange(qo_indptr[rows.drafted.start], qo_indptr[-1], dtype=np.int32)))
    if scored_rows is not None:
        wanted = np.concatenate((wanted, scored_rows)).astype(np.int32)
    all_sample = rows.num_rows == len(rows.slots) and bool(rows.samples.all())
    return StepArrays(
        decode_slots=rows.slots[: rows.num_decodes],
        prefill_tokens=table.prefill_tokens(rows),
        positions=positions,
        slot_mapping=block_ids.astype(np.int64) * block_size + positions % block_size,
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        last_block_len=last_block_len,
        sampling_rows=None if all_sample else wanted,
        sampled_slots=rows.sampled_slots,
    )


def _tables(table: SlotBuffers, slots: Int64s, widths: npt.NDArray[np.integer]) -> Int32s:
    """The first `widths` blocks of each slot, concatenated. A slice per slot costs only what it copies, and slices of
    bytes take half the time of numpy's (16 instead of 36 us for 128 slots). Two other ways are worse: with one masked
    rectangle, a single long sequence costs its length for every slot; a gather by index is slower from about 2k tokens
    per sequence on, and 6 times as slow at 64k. (A bytearray, because bytes would make a read-only array.)"""
    memory = table.block_table.data.cast("B")
    begins = slots * np.int64(table.block_table.strides[0])
    ends = begins + widths * table.block_table.itemsize
    pieces = [memory[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
    return np.frombuffer(bytearray().join(pieces), np.int32)


def dummy_decodes(size: int, spare_slot: int) -> StepArrays:
    """A dummy step with the shapes of `size` decodes of `spare_slot`, for warm-up and capture."""
    nothing = np.zeros(0, np.int32)
    return StepArrays(
        decode_slots=NO_SLOTS,
        prefill_tokens=_NO_TOKENS,
        positions=_NO_TOKENS,
        slot_mapping=_NO_TOKENS,
        qo_indptr=np.zeros(1, np.int32),
        kv_indptr=np.zeros(1, np.int32),
        kv_indices=nothing,
        last_block_len=nothing,
        sampling_rows=None,
        sampled_slots=NO_SLOTS,
    ).padded(size, spare_slot)


def largest_step(limits: SlotLimits) -> StepArrays:
    """A dummy step with the largest number of rows and samples."""
    rows = min(limits.max_batched_tokens, limits.max_num_seqs * limits.max_model_len)
    whole, rest = divmod(rows, limits.max_model_len)
    counts = np.array([limits.max_model_len] * whole + [rest] * bool(rest), np.int32)
    widths = -(-counts // limits.block_size)
    samples = min(limits.max_num_seqs, rows)
    return StepArrays(
        decode_slots=NO_SLOTS,
        prefill_tokens=np.zeros(rows, np.int64),
        positions=np.arange(rows) % limits.max_model_len,
        slot_mapping=np.zeros(rows, np.int64),
        qo_indptr=indptr(counts),
        kv_indptr=indptr(widths),
        kv_indices=np.full(widths.sum(), DUMMY_BLOCK, np.int32),
        last_block_len=counts - (widths - 1) * limits.block_size,
        sampling_rows=np.arange(samples, dtype=np.int32),
        sampled_slots=np.arange(samples),
    )


def indptr(counts: npt.NDArray[np.integer]) -> Int32s:
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts


def _grown(array: npt.NDArray[_Integer], more: int, value: int) -> npt.NDArray[_Integer]:
    return np.concatenate((array, np.full(more, value, array.dtype)))
