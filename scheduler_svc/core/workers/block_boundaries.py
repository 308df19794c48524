"""When decoding sequences cross into a new block."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from scheduler_svc.core.arrays import Longs, Slots

NONE: Slots = np.zeros(0, np.intp)


@dataclass(slots=True)
class Group:
    """Sequences that cross at the same steps. From step `certain_from` on all of them are due whenever it is their
    turn; before, some have their block already."""

    members: dict[int, None] = field(default_factory=dict)
    certain_from: int = 0
    slots: Slots | None = None  # the members, once asked for


class BlockBoundaries:
    """Decoding sequences by the step at which they next need a block, modulo the block size.

    They all advance by one token a step, so who crosses together once does so every `block_size` steps. Keeping them in
    groups makes a step cost what changes in it: nothing scans the running sequences, and while nobody comes or leaves,
    a group is one array that stays as it is.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._groups = [Group() for _ in range(block_size)]

    def add(self, slot: int, step: int) -> None:
        """The slot's sequence decodes, and first needs a block at that step."""
        group = self._groups[step % self.block_size]
        group.members[slot] = None
        group.slots = None
        group.certain_from = max(group.certain_from, step)

    def remove(self, slot: int, step: int) -> None:
        """It decodes no more; `step` is as in `add`."""
        group = self._groups[step % self.block_size]
        del group.members[slot]
        group.slots = None

    def due(self, step: int, num_tokens: Longs, capacity: Longs) -> Slots:
        """The slots that need one more block before decode step `step`, at which a sequence has num_tokens[slot] + step
        tokens and blocks for capacity[slot]. The same array as long as nothing has changed."""
        group = self._groups[step % self.block_size]
        if not group.members:
            return NONE
        slots = group.slots
        if slots is None:
            slots = group.slots = np.fromiter(group.members, np.intp, len(group.members))
        if step >= group.certain_from:
            return slots
        lacking: Slots = slots[capacity[slots] < num_tokens[slots] + step]
        return lacking

    def grown(self, slots: Slots, step: int) -> bool:
        """These got a block before that decode step. Whether they are all that were due, each once."""
        group = self._groups[step % self.block_size]
        group.certain_from = max(group.certain_from, step + 1)
        return slots is group.slots
