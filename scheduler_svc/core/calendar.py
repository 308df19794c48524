"""Events of decode steps to come."""

from __future__ import annotations


class Calendar:
    """What happens to which slot at which decode step.

    A decoding sequence advances by one token a step, so the step at which it crosses its last block or reaches its
    limit is known when it starts to decode. Noting it here makes a step cost what happens in it: nothing scans the
    running sequences. An entry carries the slot's generation; one whose sequence has left since is skipped by its
    reader.
    """

    def __init__(self) -> None:
        self._slots_at: dict[int, list[tuple[int, int]]] = {}

    def add(self, step: int, slot: int, generation: int) -> None:
        self._slots_at.setdefault(step, []).append((slot, generation))

    def due(self, step: int) -> list[tuple[int, int]]:
        return self._slots_at.get(step, [])

    def discard(self, step: int) -> None:
        self._slots_at.pop(step, None)
