"""Sampled tokens of a worker's slots that are not in the requests' own records yet."""

from __future__ import annotations

import numpy as np

from scheduler_svc.core.arrays import Slots, Tokens

# Decode steps that the ring holds, and decode steps between two flushes of a slot. The difference leaves room for the
# steps in flight.
BUFFER_STEPS = 256
FLUSH_EVERY_STEPS = 192
FAR = np.iinfo(np.int64).max


class OutputBuffer:
    """A ring of decode steps. Each step is a row with one token for each slot, so one vectorised write stores a step.

        decode steps   0 ........... flushed | flushed .. seen-1 | seen ..
                       in request.output     | in the ring       | in flight, or not planned yet

    Every slot is flushed every FLUSH_EVERY_STEPS steps; `due` names the slots of a step. A slot decodes in spans of
    steps, because a sequence may be paused and resumed. Between two spans, draft rows may add tokens to request.output
    directly, once all tokens of the earlier span are there.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._ring = np.zeros((BUFFER_STEPS, num_slots), np.int32)
        self._seen = 0  # decode steps with stored results
        self._flushed = [0] * num_slots
        self._spans: list[list[tuple[int, int]]] = [[] for _ in range(num_slots)]  # [first, end); the last is open

    def start(self, slot: int, step: int) -> None:
        """The slot's sequence decodes from this decode step on."""
        if self._spans[slot] and self._spans[slot][-1][1] <= self._flushed[slot]:
            self._spans[slot].clear()  # otherwise a sequence that drafts now and then would gather too many
        if not self._spans[slot]:
            self._flushed[slot] = step
        self._spans[slot].append((step, FAR))

    def stop(self, slot: int, step: int) -> None:
        """The slot's sequence does not decode from this decode step on."""
        self._spans[slot][-1] = (self._spans[slot][-1][0], step)

    def clear(self, slot: int) -> None:
        """The sequence has left the slot."""
        self._spans[slot].clear()

    def due(self, step: int) -> range:
        """The slots to flush before decode step `step` is written."""
        return range(-step % FLUSH_EVERY_STEPS, self._num_slots, FLUSH_EVERY_STEPS)

    def write(self, step: int, slots: Slots, tokens: Tokens) -> None:
        """Store what decode step `step` sampled for these slots. Steps come in order."""
        self._ring[step % BUFFER_STEPS][slots] = tokens
        self._seen = step + 1

    def is_complete(self, slot: int) -> bool | None:
        """Whether every token of a slot that stopped decoding has come. None if the slot never decoded."""
        spans = self._spans[slot]
        return spans[-1][1] <= self._seen if spans else None

    def num_tokens(self, slot: int) -> int:
        """Tokens that are not in the request's own record."""
        flushed, seen = self._flushed[slot], self._seen
        return sum(max(0, min(end, seen) - max(first, flushed)) for first, end in self._spans[slot])

    def flush(self, slot: int) -> bytes:
        """Remove and return the tokens that are not in the request's own record. Packed int32."""
        flushed, seen = self._flushed[slot], self._seen
        self._flushed[slot] = seen
        parts = []
        for first, end in self._spans[slot]:
            step, end = max(first, flushed), min(end, seen)
            while step < end:
                row = step % BUFFER_STEPS
                count = min(end - step, BUFFER_STEPS - row)
                parts.append(self._ring[row : row + count, slot].tobytes())
                step += count
        return b"".join(parts)
