"""The running sequences of one worker, as a struct of arrays indexed by slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.request import Request

Slots = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

# Tokens of a sequence that wait for being taken out together.
TAIL_TOKENS = 256


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRows:
    """The sequences that decode, by ascending slot. The same object from step to step while they are the same."""

    slots: Slots
    generations: Longs
    bases: Longs
    handles: Longs
    sessions: Longs
    session: int  # of all of them; -1 if they differ

    def __len__(self) -> int:
        return len(self.slots)


class SlotTable:
    """Slots 0..num_slots-1 of a worker; the one freed last is handed out first.

    A slot's `generation` goes up when its sequence leaves: a step in flight that still names the old one is recognised
    by it, and its token dropped. Its `stint` goes up whenever it begins to decode: what the calendars noted for an
    earlier one is void.

    Tokens of a decoding sequence are found without touching it each step: the token that decode step t samples stands
    at position base + t. The latest tokens wait in `tail`, where one vectorised write puts a whole step; they leave it
    for the request's own record when it is full, or when the sequence leaves:

        positions   0 ............. given | given .. known-1 | known ..
                    in request.output     |  in tail[slot]   | not sampled yet
                                            (at position % TAIL_TOKENS)
    """

    def __init__(self, num_slots: int, block_size: int) -> None:
        self.num_slots = num_slots
        self.block_size = block_size
        self.requests: list[Request | None] = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self.generation = np.zeros(num_slots, np.int64)
        self.stint = np.zeros(num_slots, np.int64)
        self.base = np.zeros(num_slots, np.int64)
        self.known = np.zeros(num_slots, np.int64)
        self.given = np.zeros(num_slots, np.int64)
        self.capacity = np.zeros(num_slots, np.int64)  # tokens that the slot's blocks hold
        self.max_total = np.zeros(num_slots, np.int64)  # tokens that the sequence may grow to
        self.tail = np.zeros((num_slots, TAIL_TOKENS), np.int32)
        self.handle = np.zeros(num_slots, np.int64)
        self.session = np.zeros(num_slots, np.int64)
        self.stops_at_eos = np.zeros(num_slots, bool)
        self.extra_stops: dict[int, frozenset[int]] = {}
        self.decoding = np.zeros(num_slots, bool)
        self.sequence = np.zeros(num_slots, np.int64)  # the cache's name
        self.num_releases = 0  # of any slot; while it stands still, no sequence has left
        self._rows: DecodeRows | None = None

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    def occupy(self, request: Request, session_index: int, num_blocks: int) -> int:
        """Seat a request whose known tokens are in `num_blocks` blocks."""
        slot = self._free.pop()
        self.requests[slot] = request
        self.known[slot] = self.given[slot] = request.num_tokens
        self.capacity[slot] = num_blocks * self.block_size
        self.max_total[slot] = request.max_total_tokens
        self.sequence[slot] = request.sequence
        self.handle[slot] = request.handle
        self.session[slot] = session_index
        self.stops_at_eos[slot] = not request.sampling.ignore_eos
        if request.extra_stop_ids:
            self.extra_stops[slot] = request.extra_stop_ids
        return slot

    def release(self, slot: int) -> None:
        self.stop_decoding(slot)
        self.generation[slot] += 1
        self.num_releases += 1
        self.requests[slot] = None
        self.extra_stops.pop(slot, None)
        self._free.append(slot)

    def start_decoding(self, slot: int, num_tokens: int, step: int) -> None:
        """From decode step `step` on, at which the sequence has `num_tokens` tokens."""
        self.decoding[slot] = True
        self.stint[slot] += 1
        self.base[slot] = num_tokens - step
        self._rows = None

    def stop_decoding(self, slot: int) -> None:
        if self.decoding[slot]:
            self.decoding[slot] = False
            self._rows = None

    def decode_rows(self) -> DecodeRows:
        if self._rows is None:
            self._rows = self._decode_rows(np.flatnonzero(self.decoding).astype(np.int32))
        return self._rows

    def no_rows(self) -> DecodeRows:
        return self._decode_rows(np.zeros(0, np.int32))

    def _decode_rows(self, slots: Slots) -> DecodeRows:
        sessions = self.session[slots]
        session = int(sessions[0]) if len(slots) and bool((sessions == sessions[0]).all()) else -1
        return DecodeRows(slots, self.generation[slots], self.base[slots], self.handle[slots], sessions, session)

    def still_decoding(self, slots: list[int], stints: list[int]) -> Slots:
        """Those that decode, without a break since that stint."""
        found = np.array(slots, np.int32)
        if not slots:
            return found
        kept: Slots = found[(self.stint[found] == stints) & self.decoding[found]]
        return kept

    def write_token(self, slot: int, position: int, token: int) -> None:
        self.tail[slot, position % TAIL_TOKENS] = token
        self.known[slot] = position + 1

    def take_tail(self, slot: int) -> bytes:
        """The tokens between `given` and `known`, which count as given from now on. Packed int32."""
        given, known = int(self.given[slot]), int(self.known[slot])
        start = given % TAIL_TOKENS
        tokens: bytes = self.tail[slot, start : start + known - given].tobytes()
        self.given[slot] = known
        return tokens
