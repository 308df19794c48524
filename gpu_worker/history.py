"""Which tokens the sequences of a link have, so that the next link can be told what is in the blocks.

The device needs no more of a token than the one sampled last, and a step's tokens are known here only when its result
is, by which time the slot may belong to another sequence. So they are noted by seat: one more with each sequence that
a slot gets. Struct of arrays: noting a step costs the same few calls whatever the number of its rows.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampledSlots:
    """Which sequences of a step sample, and where their tokens go."""

    slots: Int32s  # [rows that sample]
    epochs: Int64s
    positions: Int32s


@dataclass(slots=True)
class TokenHistory:
    num_slots: int
    max_model_len: int  # tokens
    tokens: Int32s = field(init=False)  # [slots, max_model_len + 1]: the longest one may sample once more
    num_known: Int64s = field(init=False)  # [slots] leading tokens that are known; 0: the slot is empty, or has failed
    epochs: Int64s = field(init=False)

    def __post_init__(self) -> None:
        # Pages that nobody has written to cost nothing, so there is room for the longest sequences without a step that
        # waits while it is made. Not np.zeros: it asks for huge pages, of which a short sequence takes a whole one.
        shape = self.num_slots, self.max_model_len + 1
        memory = mmap.mmap(-1, 4 * math.prod(shape), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.tokens = np.frombuffer(memory, np.int32).reshape(shape)
        self.epochs = np.zeros(self.num_slots, np.int64)
        self.num_known = np.zeros(self.num_slots, np.int64)

    def begin(self, slot: int, token_ids: Int32s) -> None:
        """A sequence begins there, with the tokens that are known of it."""
        self.tokens[slot, : len(token_ids)] = token_ids
        self.num_known[slot] = len(token_ids)
        self.epochs[slot] += 1

    def free(self, slots: Int32s) -> None:
        self.num_known[slots] = 0

    def sampling(self, slots: Int32s, positions: Int32s) -> SampledSlots:
        """To be noted when the step's tokens are here."""
        return SampledSlots(slots, self.epochs[slots], positions)

    def note(self, sampled: SampledSlots, tokens: Int64s) -> None:
        """Step by step. tokens: [rows that sample], -1 where the row has failed: nothing is known of it any more."""
        is_current = (self.epochs[sampled.slots] == sampled.epochs) & (
            self.num_known[sampled.slots] == sampled.positions
        )
        slots, positions, tokens = sampled.slots[is_current], sampled.positions[is_current], tokens[is_current]
        self.tokens[slots, positions] = tokens
        self.num_known[slots] = np.where(tokens < 0, 0, positions + 1)

    def of(self, slot: int) -> Int32s:
        """The known tokens of the sequence in the slot."""
        return self.tokens[slot, : self.num_known[slot]]
