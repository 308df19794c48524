"""Which tokens the sequences of a link have, so that the next link can be told what is in the blocks.

The device needs no more of a token than the one sampled last, and a step's tokens are known here only when its result
is, by which time the slot may belong to another sequence. So they are noted by seat: one more with each sequence that
a slot gets. Struct of arrays: noting a step costs the same few calls whatever the number of its rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
FIRST_CAPACITY = 256  # tokens of a slot


@dataclass(frozen=True, slots=True)
class Sampling:
    """Which sequences of a step sample, and where their tokens go."""

    slots: Int32s  # [rows that sample]
    seats: Int64s
    positions: Int32s


@dataclass(slots=True)
class TokenHistory:
    num_slots: int
    tokens: Int32s = field(init=False)  # [slots, capacity]
    num_known: Int64s = field(init=False)  # [slots] leading tokens that are known; 0: the slot is empty, or has failed
    seats: Int64s = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = np.zeros((self.num_slots, FIRST_CAPACITY), np.int32)
        self.seats = np.zeros(self.num_slots, np.int64)
        self.num_known = np.zeros(self.num_slots, np.int64)

    def seat(self, slot: int, token_ids: Int32s) -> None:
        """A sequence begins there, with the tokens that are known of it."""
        self._reach(len(token_ids))
        self.tokens[slot, : len(token_ids)] = token_ids
        self.num_known[slot] = len(token_ids)
        self.seats[slot] += 1

    def free(self, slots: Int32s) -> None:
        self.num_known[slots] = 0

    def sampling(self, slots: Int32s, positions: Int32s) -> Sampling:
        """To be noted when the step's tokens are here."""
        return Sampling(slots, self.seats[slots], positions)

    def note(self, sampled: Sampling, tokens: Int64s) -> None:
        """Step by step. tokens: [rows that sample], -1 where the row has failed: nothing is known of it any more."""
        is_seated = (self.seats[sampled.slots] == sampled.seats) & (self.num_known[sampled.slots] == sampled.positions)
        slots, positions, tokens = sampled.slots[is_seated], sampled.positions[is_seated], tokens[is_seated]
        if not len(slots):
            return
        self._reach(int(positions.max()) + 1)
        self.tokens[slots, positions] = tokens
        self.num_known[slots] = np.where(tokens < 0, 0, positions + 1)

    def of(self, slot: int) -> Int32s:
        """The known tokens of the sequence in the slot."""
        return self.tokens[slot, : self.num_known[slot]]

    def _reach(self, length: int) -> None:
        capacity = self.tokens.shape[1]
        if length > capacity:
            more = np.zeros((self.num_slots, max(length, 2 * capacity) - capacity), np.int32)
            self.tokens = np.concatenate((self.tokens, more), axis=1)
