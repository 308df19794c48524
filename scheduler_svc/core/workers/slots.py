"""The running sequences of one worker, as a struct of arrays indexed by slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.arrays import Longs, Slots, Tokens
from scheduler_svc.core.requests.output_buffer import FAR, OutputBuffer
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.workers.block_boundaries import BlockBoundaries

# After this many noted growths, all of them go into the block tables at once. Noting one costs almost nothing.
NOTED_GROWTHS = 256


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRows:
    """The decoding sequences, by ascending slot. The same object from step to step while the sequences are the same."""

    slots: Slots
    generations: Longs
    handles: Longs
    sessions: Longs
    session: int  # session of all rows; -1 if they differ
    base_tokens: int  # sum of `base`: at decode step t they have base_tokens + t * rows tokens

    def __len__(self) -> int:
        return len(self.slots)


class SlotLedger:
    """The scheduler's record of a worker's slots 0..num_slots-1. The slot freed last is used first.

    A slot's `generation` goes up when its sequence leaves: the result of a step in flight that names the old generation
    is dropped. Its `decode_epoch` goes up whenever the slot begins to decode: a step timer of an earlier epoch is void.

    At decode step t a decoding sequence has base + t tokens, so a step writes nothing for each sequence.

    Block tables are complete only after `complete_tables`, which is rarely called.
    """

    def __init__(self, num_slots: int, block_size: int) -> None:
        self.num_slots = num_slots
        self.block_size = block_size
        self.requests: list[Request | None] = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self.generation = np.zeros(num_slots, np.int64)
        self.decode_epoch = np.zeros(num_slots, np.int64)
        self.base = np.zeros(num_slots, np.int64)
        self.capacity = np.zeros(num_slots, np.int64)  # tokens that the slot's blocks hold
        self.max_total = np.zeros(num_slots, np.int64)  # tokens that the sequence may grow to
        self.handle = np.zeros(num_slots, np.int64)
        self.session = np.zeros(num_slots, np.int64)
        self.stops_at_eos = np.zeros(num_slots, bool)
        self.offline = np.zeros(num_slots, bool)  # whether the slot's sequence, or its last one, is offline
        self.extra_stops: dict[int, frozenset[int]] = {}
        self.decoding = np.zeros(num_slots, bool)
        self.sequence = np.zeros(num_slots, np.int64)  # the cache's name for the sequence
        self.num_releases = 0  # of any slot; if it has not changed, no sequence has left
        self.block_boundaries = BlockBoundaries(block_size)
        self._next_boundary = [0] * num_slots  # the step that `block_boundaries` has for the slot
        self._rows: DecodeRows | None = None
        self.output = OutputBuffer(num_slots)
        # growths since `complete_tables`: slots and their new blocks; packed int32
        self._growths: list[tuple[bytes, bytes]] = []
        self._num_growths = 0  # growths ever
        self._grows_from = np.full(num_slots, FAR)  # number of the first growth of the slot's current sequence

    @property
    def num_free(self) -> int:
        return len(self._free)

    def occupy(self, request: Request, session_index: int, num_blocks: int) -> int:
        """Put a request that holds `num_blocks` blocks into a free slot. Returns the slot."""
        slot = self._free.pop()
        self.requests[slot] = request
        request.held.unflushed = (self.output, slot)
        self.capacity[slot] = num_blocks * self.block_size
        self.max_total[slot] = request.max_total_tokens
        self.sequence[slot] = request.held.sequence
        self._grows_from[slot] = self._num_growths
        self.handle[slot] = request.handle
        self.session[slot] = session_index
        self.stops_at_eos[slot] = not request.sampling.ignore_eos
        self.offline[slot] = request.metadata.offline
        if request.extra_stop_ids:
            self.extra_stops[slot] = request.extra_stop_ids
        return slot

    def release(self, slot: int, step: int) -> None:
        self.stop_decoding(slot, step)
        self.generation[slot] += 1
        self.num_releases += 1
        if (request := self.requests[slot]) is not None:
            request.held.unflushed = None
        self.requests[slot] = None
        self._grows_from[slot] = FAR
        self.output.clear(slot)
        self.extra_stops.pop(slot, None)
        self._free.append(slot)

    def start_decoding(self, slot: int, num_tokens: int, step: int) -> None:
        """The slot's sequence decodes from decode step `step` on, with `num_tokens` tokens at that step."""
        self.decoding[slot] = True
        self.decode_epoch[slot] += 1
        self.base[slot] = num_tokens - step
        self.output.start(slot, step)
        # At step t the sequence computes position base + t - 1 and needs room for base + t tokens.
        self._next_boundary[slot] = int(self.capacity[slot]) - num_tokens + step + 1
        self.block_boundaries.add(slot, self._next_boundary[slot])
        self._rows = None

    def stop_decoding(self, slot: int, step: int) -> None:
        """The slot's sequence, if it decodes, stops at decode step `step`."""
        if self.decoding[slot]:
            self.decoding[slot] = False
            self.output.stop(slot, step)
            self.block_boundaries.remove(slot, self._next_boundary[slot])
            self._rows = None

    def decode_rows(self) -> DecodeRows:
        if self._rows is None:
            self._rows = self.rows_of(np.flatnonzero(self.decoding))
        return self._rows

    def rows_of(self, slots: Slots) -> DecodeRows:
        sessions = self.session[slots]
        session = int(sessions[0]) if len(slots) and bool((sessions == sessions[0]).all()) else -1
        base_tokens = int(self.base[slots].sum())
        return DecodeRows(slots, self.generation[slots], self.handle[slots], sessions, session, base_tokens)

    # ── blocks ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def note_growth(self, slots: bytes, blocks: bytes) -> None:
        """Each slot gets one more block; a slot may occur several times. Packed int32."""
        self._growths.append((slots, blocks))
        self._num_growths += 1
        if len(self._growths) == NOTED_GROWTHS:
            self.complete_tables()

    def complete_tables(self) -> None:
        """Complete the requests' block tables."""
        growths, self._growths = self._growths, []
        if not growths:
            return
        slots = np.frombuffer(b"".join(slots for slots, _ in growths), np.int32)
        blocks = np.frombuffer(b"".join(blocks for _, blocks in growths), np.int32)
        numbers = np.arange(self._num_growths - len(growths), self._num_growths)
        own = np.repeat(numbers, [len(slots) // 4 for slots, _ in growths]) >= self._grows_from[slots]
        slots, blocks = slots[own], blocks[own]
        order = np.argsort(slots, kind="stable")
        blocks = blocks[order]
        grown, counts = np.unique(slots, return_counts=True)
        ends = np.cumsum(counts)
        for slot, start, end in zip(grown.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True):
            request = self.requests[slot]
            assert request is not None, "only running sequences grow"
            request.held.block_table.frombytes(blocks[start:end].tobytes())

    # ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def write_tokens(self, step: int, slots: Slots, tokens: Tokens) -> None:
        """Store what decode step `step` sampled for these slots. Steps come in order."""
        for slot in self.output.due(step):
            if (request := self.requests[slot]) is not None:
                request.add_output(self.output.flush(slot))
        self.output.write(step, slots, tokens)

    def has_all_tokens(self, slot: int) -> bool:
        """Whether the slot's sequence, which has stopped decoding, has every token that it sampled."""
        request, complete = self.requests[slot], self.output.is_complete(slot)
        if complete is not None:
            return complete
        # its one token came from a prefill
        return request is not None and request.num_tokens >= request.max_total_tokens
