"""Sampled tokens of a worker's slots that the requests' own records lack yet."""

from __future__ import annotations

import numpy as np

from scheduler_svc.core.arrays import Slots, Tokens

# Decode steps whose tokens are kept here, and after how many of them a slot is flushed. The difference leaves room for
# the steps in flight.
BUFFER_STEPS = 256
FLUSH_EVERY_STEPS = 192
FAR = np.iinfo(np.int64).max


class OutputBuffer:
    """A ring of decode steps, each a row of one token for each slot, so that one vectorised write takes in a step.

        decode steps   0 ........... flushed | flushed .. seen-1 | seen ..
                       in request.output     | in the ring       | in flight, or not planned yet

    `write` names the slots that are due to be flushed: each is, every FLUSH_EVERY_STEPS steps. A slot decodes in spans
    of steps, as a sequence may be held and go on.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._ring = np.zeros((BUFFER_STEPS, num_slots), np.int32)
        self._seen = 0  # decode steps whose results are here
        self._flushed = [0] * num_slots
        self._spans: list[list[tuple[int, int]]] = [[] for _ in range(num_slots)]  # [first, end) step; the last: open

    def start(self, slot: int, step: int) -> None:
        """The slot's sequence decodes from that decode step on."""
        if not self._spans[slot]:
            self._flushed[slot] = step
        self._spans[slot].append((step, FAR))

    def stop(self, slot: int, step: int) -> None:
        """It decodes no more from that decode step on."""
        self._spans[slot][-1] = (self._spans[slot][-1][0], step)

    def clear(self, slot: int) -> None:
        """The sequence has left the slot."""
        self._spans[slot].clear()

    def due(self, step: int) -> range:
        """The slots that are to be flushed before decode step `step` is written."""
        return range(-step % FLUSH_EVERY_STEPS, self._num_slots, FLUSH_EVERY_STEPS)

    def write(self, step: int, slots: Slots, tokens: Tokens) -> None:
        """What decode step `step` sampled for these slots. Steps come in their order."""
        self._ring[step % BUFFER_STEPS][slots] = tokens
        self._seen = step + 1

    def is_complete(self, slot: int) -> bool | None:
        """Whether every token has come that a slot sampled which has stopped decoding; None if it never decoded."""
        spans = self._spans[slot]
        return spans[-1][1] <= self._seen if spans else None

    def num_tokens(self, slot: int) -> int:
        """Tokens that the request's own record lacks."""
        flushed, seen = self._flushed[slot], self._seen
        return sum(max(0, min(end, seen) - max(first, flushed)) for first, end in self._spans[slot])

    def flush(self, slot: int) -> bytes:
        """The tokens that the request's own record lacks, which is to get them. Packed int32."""
        if not self._spans[slot]:
            return b""
        flushed, seen = self._flushed[slot], self._seen
        self._flushed[slot] = seen
        parts = []
        for first, end in self._spans[slot]:
            step = max(first, flushed)
            while step < min(end, seen):
                row = step % BUFFER_STEPS
                count = min(min(end, seen) - step, BUFFER_STEPS - row)
                parts.append(self._ring[row : row + count, slot].tobytes())
                step += count
        return b"".join(parts)
