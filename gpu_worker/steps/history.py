"""The tokens of a link's sequences, so that the next link can be told what the blocks contain.

The device needs only the last sampled token of a sequence. The host knows a step's tokens only with the step's result,
when the slot may already belong to another sequence. So tokens are noted by slot and epoch; a slot's epoch grows with
each new sequence. Struct of arrays: noting a step costs the same few calls for any number of rows.
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
    """The slots that sample in a step, and the positions of the new tokens."""

    slots: Int64s  # [rows that sample]
    epochs: Int64s
    positions: Int32s


@dataclass(slots=True)
class TokenHistory:
    """The known tokens of every slot, on the host."""

    num_slots: int
    max_model_len: int  # tokens
    tokens: Int32s = field(init=False)  # [slots, max_model_len + 1]: the longest sequence may sample once more
    num_known: Int64s = field(init=False)  # [slots] known leading tokens; 0: the slot is empty or has failed
    epochs: Int64s = field(init=False)

    def __post_init__(self) -> None:
        # Unwritten pages cost nothing, so this has space for the longest sequences, and no step waits for an
        # allocation. Not np.zeros: it asks for huge pages, and a short sequence would take a whole one.
        shape = self.num_slots, self.max_model_len + 1
        memory = mmap.mmap(-1, 4 * math.prod(shape), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.tokens = np.frombuffer(memory, np.int32).reshape(shape)
        self.epochs = np.zeros(self.num_slots, np.int64)
        self.num_known = np.zeros(self.num_slots, np.int64)

    def begin(self, slot: int, token_ids: Int32s) -> None:
        """A sequence begins in the slot, with these known tokens."""
        self.tokens[slot, : len(token_ids)] = token_ids
        self.num_known[slot] = len(token_ids)
        self.epochs[slot] += 1

    def free(self, slots: Int32s) -> None:
        self.num_known[slots] = 0

    def sampling(self, slots: Int64s, positions: Int32s) -> SampledSlots:
        """The slots that sample in a step. Pass the result to note() when the step's tokens have arrived."""
        return SampledSlots(slots, self.epochs[slots], positions)

    def note(self, sampled: SampledSlots, tokens: Int64s) -> None:
        """Add a step's tokens. Call this in the order of the steps. tokens: [rows that sample]; -1 for a failed row:
        its slot then counts as empty."""
        is_current = (self.epochs[sampled.slots] == sampled.epochs) & (
            self.num_known[sampled.slots] == sampled.positions
        )
        slots, positions = sampled.slots, sampled.positions
        if not is_current.all():
            slots, positions, tokens = slots[is_current], positions[is_current], tokens[is_current]
        self.tokens[slots, positions] = tokens
        self.num_known[slots] = np.where(tokens < 0, 0, positions + 1)

    def extend(self, slot: int, tokens: Int32s) -> None:
        """Add tokens to the known ones of the slot's sequence. All earlier tokens must be known. With no token, the
        slot counts as empty."""
        known = self.num_known[slot]
        self.tokens[slot, known : known + len(tokens)] = tokens
        self.num_known[slot] = known + len(tokens) if len(tokens) else 0

    def of(self, slot: int) -> Int32s:
        """The known tokens of the sequence in the slot."""
        return self.tokens[slot, : self.num_known[slot]]
