"""Moves a step's arrays to the device that runs the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker.attention.base import AttentionMetadata, DeviceTables
from gpu_worker.device import DeviceEvent
from gpu_worker.sampling.fused import NUM_PARAMETERS
from gpu_worker.steps.slots import SlotLimits
from gpu_worker.steps.step_arrays import StepArrays

_WORD = 8  # bytes
_DRAW_WORDS = NUM_PARAMETERS * 4 // _WORD


@dataclass(frozen=True, slots=True)
class StepInput:
    """The arrays of a step on the device."""

    decode_slots: Tensor  # int64 [decodes]
    prefill_tokens: Tensor | None  # int64 [rows - decodes]; None if there are no such rows
    positions: Tensor  # int64 [rows]
    sampling_rows: Tensor | None  # int64: the rows that need logits; None: all rows
    sampled_slots: Tensor  # int64 [rows that sample]
    attention: AttentionMetadata
    draws: Tensor | None = None  # int32 [rows, NUM_PARAMETERS] for a graph that samples (fused.py)


class StepInputs(Protocol):
    """Copies the arrays of a step to the device."""

    def send(self, arrays: StepArrays, captured: bool = False) -> StepInput:
        """The result is valid until the next send(). `captured`: see AttentionMetadata."""

    def sent(self) -> None:
        """Call this when attention.plan has queued its own copies of the last send()'s host arrays."""


class HostInputs:
    """For a CPU: the arrays, without a copy."""

    def send(self, arrays: StepArrays, captured: bool = False) -> StepInput:
        return StepInput(
            _int64(arrays.decode_slots),
            _int64(arrays.prefill_tokens) if len(arrays.prefill_tokens) else None,
            _int64(arrays.positions),
            None if arrays.sampling_rows is None else _int64(arrays.sampling_rows),
            _int64(arrays.sampled_slots),
            AttentionMetadata(
                num_decodes=arrays.num_decodes,
                qo_indptr=arrays.qo_indptr,
                kv_indptr=arrays.kv_indptr,
                kv_indices=arrays.kv_indices,
                last_block_len=arrays.last_block_len,
                slot_mapping=_int64(arrays.slot_mapping),
                captured=captured,
            ),
        )

    def sent(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _DeviceViews:
    """The arrays of a step in the device's block."""

    decode_slots: Tensor
    prefill_tokens: Tensor
    positions: Tensor
    draws: Tensor | None
    slot_mapping: Tensor
    tables: DeviceTables


class PinnedInputs:
    """For a GPU: all arrays end to end in pinned memory, with one copy to the device.

    Two blocks of pinned memory take turns, because the host writes a step while the copy of the last step may still
    wait on the device. The device has one block, because each copy queues behind the step that reads the block.

        int64 | decode_slots | prefill_tokens | positions | draws |
        int32 | slot_mapping | kv_indptr | last_block_len | kv_indices |
        int64 | sampling_rows | sampled_slots |          end of the copied part ^
        int32 | qo_indptr |                              attention.plan copies it itself

    In every step of a graph of n decodes, the arrays of the first two lines begin at the same addresses, because a
    captured graph reads them there. So the views of the capture serve all its steps, and save 20 small calls of torch.
    The last two lines are left out there: every row samples, and the planner reads qo_indptr at once.

    Captured pieces (pieces.py) read only positions and slot_mapping. Both addresses must depend on nothing but the
    number of rows: decode_slots and prefill_tokens together have one element per row, whatever the number of decodes.
    And steps in pieces have no draws, which would move slot_mapping."""

    def __init__(self, limits: SlotLimits, max_table_blocks: int, device: torch.device) -> None:
        """max_table_blocks: the limit for one sequence's block table."""
        seqs, rows = limits.max_num_seqs, limits.max_batched_tokens
        sent = 3 * rows + (2 + _DRAW_WORDS) * seqs  # int64
        sent += _words(rows) + _words(2 * seqs + 2) + _words(seqs * max_table_blocks)
        kept = seqs + 2
        pinned = device.type == "cuda"
        self._hosts = [torch.zeros(sent + kept, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._int64s = [host.numpy() for host in self._hosts]
        self._int32s = [words.view(np.int32) for words in self._int64s]
        self._fences = [DeviceEvent(device, blocking=True) for _ in range(2)]
        self._block = torch.zeros(sent, dtype=torch.int64, device=device)
        self._captured: dict[int, _DeviceViews] = {}  # by the number of decodes of a graph
        self._turn = 0
        self._used = 0  # words

    def send(self, arrays: StepArrays, captured: bool = False) -> StepInput:
        self._turn ^= 1
        self._fences[self._turn].wait()
        self._used = 0
        decode_slots = self._put(arrays.decode_slots)
        prefill_tokens = self._put(arrays.prefill_tokens)
        positions = self._put(arrays.positions)
        draws = None if arrays.draws is None else self._put(arrays.draws.view(np.int64).ravel())
        slot_mapping, _ = self._put_int32(arrays.slot_mapping)
        kv_indptr, host_kv_indptr = self._put_int32(arrays.kv_indptr)
        last_block_len, host_last_block_len = self._put_int32(arrays.last_block_len)
        kv_indices, host_kv_indices = self._put_int32(arrays.kv_indices)
        views = self._captured.get(arrays.num_decodes) if captured else None
        if views is None:
            views = _DeviceViews(
                self._block[decode_slots],
                self._block[prefill_tokens],
                self._block[positions],
                None if draws is None else self._block[draws].view(torch.int32).view(-1, NUM_PARAMETERS),
                self._device_int32(slot_mapping, arrays.slot_mapping),
                DeviceTables(
                    self._device_int32(kv_indptr, arrays.kv_indptr),
                    self._device_int32(last_block_len, arrays.last_block_len),
                    self._block[kv_indices.start :].view(torch.int32),
                ),
            )
        if captured:
            self._captured[arrays.num_decodes] = views
            sampling_rows, sampled_slots = None, views.decode_slots[: len(arrays.sampled_slots)]
            qo_indptr, sent = arrays.qo_indptr, self._used
        else:
            sampling_rows = None if arrays.sampling_rows is None else self._block[self._put(arrays.sampling_rows)]
            sampled_slots, sent = self._block[self._put(arrays.sampled_slots)], self._used
            _, qo_indptr = self._put_int32(arrays.qo_indptr)
        self._block[:sent].copy_(self._hosts[self._turn][:sent], non_blocking=True)
        metadata = AttentionMetadata(
            num_decodes=arrays.num_decodes,
            qo_indptr=qo_indptr,
            kv_indptr=host_kv_indptr,
            kv_indices=host_kv_indices,
            last_block_len=host_last_block_len,
            slot_mapping=views.slot_mapping,
            captured=captured,
            tables=views.tables,
        )
        return StepInput(
            views.decode_slots,
            views.prefill_tokens if len(arrays.prefill_tokens) else None,
            views.positions,
            sampling_rows,
            sampled_slots,
            metadata,
            views.draws,
        )

    def sent(self) -> None:
        self._fences[self._turn].record()

    def _put(self, array: npt.NDArray[np.integer]) -> slice:
        """Write the array to pinned memory as int64. Returns its place in words."""
        place = slice(self._used, self._used + len(array))
        self._int64s[self._turn][place] = array
        self._used = place.stop
        return place

    def _put_int32(self, array: npt.NDArray[np.integer]) -> tuple[slice, npt.NDArray[np.int32]]:
        """The same as int32, aligned to a word. Also returns the copy in pinned memory."""
        start = self._used
        self._used = start + _words(len(array))
        host = self._int32s[self._turn][2 * start : 2 * start + len(array)]
        host[:] = array
        return slice(start, self._used), host

    def _device_int32(self, place: slice, array: npt.NDArray[np.integer]) -> Tensor:
        """The view of an array of _put_int32() on the device."""
        return self._block[place].view(torch.int32)[: len(array)]


def _words(count: int) -> int:
    """The words that `count` numbers of int32 take."""
    return -(-count * 4 // _WORD)


def _int64(array: npt.NDArray[np.integer]) -> Tensor:
    return torch.from_numpy(array.astype(np.int64, copy=False))
