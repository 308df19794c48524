"""The rows of a step's forward pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Pairs = tuple[Int32s, Int32s]
NO_INTS: Int32s = np.zeros(0, np.int32)
NO_SLOTS: Int64s = np.zeros(0, np.int64)


@dataclass(frozen=True)
class StepRows:
    """The sequences of a step: decodes in slot order, then prefills, then draft rows, both in plan order."""

    slots: Int64s  # [sequences]; int64, because numpy takes twice as long to index with int32
    num_decodes: int
    starts: Int32s  # [sequences] position of the first row
    counts: Int32s  # [sequences] rows
    samples: Bools  # [sequences] whether the last row, and no other, samples; False for draft rows
    granted_blocks: Int32s  # blocks that get a new owner in this step
    # Block copies, as sources and targets. They run before anything else: first all swaps out, then all swaps in, then
    # the other copies.
    swaps_out: Pairs  # to host blocks
    swaps_in: Pairs  # from host blocks
    copies: Pairs
    num_drafted: int = 0  # sequences with draft rows: the last ones. Each of their rows samples
    draft_tokens: Int32s = field(default_factory=lambda: NO_INTS)  # of all of them, one sequence after the other

    @cached_property
    def num_rows(self) -> int:
        return int(self.counts.sum())

    @cached_property
    def sampled_slots(self) -> Int64s:
        """The slots that sample, in row order, without draft rows."""
        return self.slots[self.samples]

    @property
    def moves_blocks(self) -> bool:
        return bool(len(self.swaps_out[0]) or len(self.swaps_in[0]) or len(self.copies[0]))

    @property
    def drafted(self) -> slice:
        """The sequences with draft rows."""
        return slice(len(self.slots) - self.num_drafted, len(self.slots))

    @property
    def num_draft_rows(self) -> int:
        return self.num_drafted + len(self.draft_tokens)

    def drafts(self) -> list[Int32s]:
        """The draft tokens of each sequence with draft rows."""
        ends = np.cumsum(self.counts[self.drafted] - 1)
        return np.split(self.draft_tokens, ends[:-1]) if self.num_drafted else []
