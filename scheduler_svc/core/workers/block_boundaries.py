"""The steps at which decoding sequences need a new block."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from scheduler_svc.core.arrays import Longs, Slots

NONE: Slots = np.zeros(0, np.intp)


@dataclass(slots=True)
class Group:
    """Sequences that need a block at the same steps. From step `certain_from` on, every member needs one each time.
    Before that step, some members may have their block already."""

    members: dict[int, None] = field(default_factory=dict)
    certain_from: int = 0
    slots: Slots | None = None  # the members as an array, once a step has asked


class BlockBoundaries:
    """Decoding sequences, grouped by the step at which they next need a block, modulo the block size.

    All sequences advance by one token per step, so sequences that need a block together do so every `block_size` steps.
    Because of the groups, no step scans the running sequences, and a group stays the same array while no sequence
    enters or leaves it.
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
        """The slot's sequence stops decoding; `step` is as in `add`."""
        group = self._groups[step % self.block_size]
        del group.members[slot]
        group.slots = None

    def due(self, step: int, num_tokens: Longs, capacity: Longs) -> Slots:
        """The slots that need one more block before decode step `step`. At that step a sequence has num_tokens[slot] +
        step tokens, and blocks for capacity[slot]. Returns the same array as long as nothing has changed."""
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
        """These slots got a block before that step. Returns whether `slots` is the array of a whole group, as `due`
        returns it: then each slot occurs once. A part of a group is another array."""
        group = self._groups[step % self.block_size]
        group.certain_from = max(group.certain_from, step + 1)
        return slots is group.slots
