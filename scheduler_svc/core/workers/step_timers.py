"""Events of decode steps to come."""

from __future__ import annotations

from scheduler_svc.core.arrays import Slots
from scheduler_svc.core.workers.slots import SlotLedger

NOTHING: tuple[list[int], list[int]] = ([], [])


class StepTimers:
    """What happens to which slot at which decode step.

    A decoding sequence advances by one token a step, so the step at which it reaches its limit is known when it starts
    to decode. Noting it here makes a step cost what happens in it: nothing scans the running sequences. An entry
    carries the slot's stint; one whose sequence has left or stopped since is dropped when
    it is due.
    """

    def __init__(self) -> None:
        self._at: dict[int, tuple[list[int], list[int]]] = {}  # by step: slots, their stints

    def add(self, step: int, slots: list[int], decode_epochs: list[int]) -> None:
        entry = self._at.get(step)
        if entry is None:
            self._at[step] = (slots, decode_epochs)
        else:
            entry[0].extend(slots)
            entry[1].extend(decode_epochs)

    def is_due(self, step: int) -> bool:
        """Whether anything may be due; what was noted may have left since."""
        return step in self._at

    def due(self, step: int, table: SlotLedger) -> Slots:
        """The slots for which this is the step, in no particular order."""
        slots, decode_epochs = self._at.get(step, NOTHING)
        return table.still_decoding(slots, decode_epochs)

    def discard(self, step: int) -> None:
        self._at.pop(step, None)
