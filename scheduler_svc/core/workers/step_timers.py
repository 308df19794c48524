"""Timers for decode steps to come."""

from __future__ import annotations

from scheduler_svc.core.arrays import Slots
from scheduler_svc.core.workers.slots import SlotLedger

NOTHING: tuple[list[int], list[int]] = ([], [])


class StepTimers:
    """What happens to which slot at which decode step.

    A decoding sequence advances by one token per step, so the step of its last token is known when it starts to decode.
    Because of the timer, a step costs what happens in it: nothing scans the running sequences. A timer carries the
    slot's decode epoch; it is dropped when due if the sequence has left or stopped since.
    """

    def __init__(self) -> None:
        self._at: dict[int, tuple[list[int], list[int]]] = {}  # by step: slots, and their decode epochs

    def add(self, step: int, slots: list[int], decode_epochs: list[int]) -> None:
        entry = self._at.get(step)
        if entry is None:
            self._at[step] = (slots, decode_epochs)
        else:
            entry[0].extend(slots)
            entry[1].extend(decode_epochs)

    def is_due(self, step: int) -> bool:
        """Whether a timer may be due. Its sequence may have left since."""
        return step in self._at

    def due(self, step: int, ledger: SlotLedger) -> Slots:
        """The slots with a valid timer for this step, in no particular order."""
        slots, decode_epochs = self._at.get(step, NOTHING)
        return ledger.still_decoding(slots, decode_epochs)

    def discard(self, step: int) -> None:
        self._at.pop(step, None)
