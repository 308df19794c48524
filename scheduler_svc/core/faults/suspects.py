"""Who is to blame for a step that failed: the rule, and nothing else.

A step fails as a whole: it raised, was overdue, or took its worker down. Any of its rows may be the reason, or none
(the machine lost power). So:

    every row of a failed step    is a suspect. Suspects are retried in groups, each of them apart from all else: no
                                  step has rows of a group and rows of anything else
    suspected for the first time  the groups are as large as there are groups (256 rows: 16 of 16), so that it takes few
                                  steps to clear the many who did nothing; up to FEW rows are retried one by one
    suspected once more           alone
    a group gets through          its members are cleared, and all is forgotten
    it fails                      its members stay suspects; what was not in the failed step is not
    alone, for the second time    in a row (`poisoned_after`): it is poison, and never retried

Only who was alone is ever found guilty, so company cannot hurt: however often a request stands beside poison, it is
cleared as soon as it runs without it. And twice, because the first time may be a coincidence (somebody killed that
worker): a poison that arrives in a crowd fails once in the crowd, perhaps once in a small group, and twice alone. A
machine whose workers are killed from outside all the time wants more than twice.

A worker whose link was lost may be dead or not, so its rows are accused, and retried at once. But if the same process
comes back it has not died of them, and that accusation is withdrawn. So a suspect that is guilty only if a worker which
may still come back (`Absence`) does not, is held: not tried for RETURN_S, and found guilty if nobody is back by then.

Not for ever, though: a request that stops its worker's event loop for seconds, or has a result that no link can carry,
loses the worker each time, and each time it comes back. A process that stops is something that rows may well do, a
connection that breaks under one which runs hardly: so an accusation counts if as many as `Loss` says were withdrawn
before it since the suspect last got through. What a worker says of itself (a step that raised, or is overdue), and what
it does wrong, is never withdrawn.

Suspects are numbers here. What "gets through" means is for those to say who run the steps (retry_groups.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import takewhile
from math import isqrt

FEW = 8
# A worker that is frozen, or cannot reach us, is mostly back in that time.
RETURN_S = 10.0


class Loss(IntEnum):
    """How a worker was lost, and how many accusations of a suspect in a row may be withdrawn that came of it."""

    FAULT = 0  # it did not get on with a step, or sent what makes no sense
    SILENCE = 3  # it had no heartbeat
    LINK = 16  # its link broke or ended


@dataclass(frozen=True, slots=True)
class Absence:
    """Of a worker that may come back."""

    incarnation: str  # as in its registration
    loss: Loss
    since_s: float


@dataclass(frozen=True, slots=True)
class _Blame:
    was_alone: bool  # it was the only row
    absence: Absence | None  # whose end withdraws it


@dataclass(slots=True)
class _Record:
    blames: list[_Blame] = field(default_factory=list)  # in a row
    withdrawn: dict[Loss, int] = field(default_factory=dict)

    def blame(self, was_alone: bool, absence: Absence | None) -> None:
        if absence is not None and self.withdrawn.get(absence.loss, 0) >= absence.loss:
            absence = None
        self.blames.append(_Blame(was_alone, absence))

    def withdraw(self, incarnation: str) -> None:
        """All that stands against it because of this worker's absence."""
        standing = []
        for one in self.blames:
            if one.absence is not None and one.absence.incarnation == incarnation:
                self.withdrawn[one.absence.loss] = self.withdrawn.get(one.absence.loss, 0) + 1
            else:
                standing.append(one)
        self.blames = standing

    def alone(self) -> list[_Blame]:
        """The last ones, in which it was the only row."""
        return list(takewhile(lambda one: one.was_alone, reversed(self.blames)))


@dataclass(slots=True)
class Suspects:
    """A suspect is in one of the groups that wait to be retried, in one that has been taken out for that, or held."""

    poisoned_after: int  # failures in a row in which it was alone
    _records: dict[int, _Record] = field(default_factory=dict)
    _waiting: list[list[int]] = field(default_factory=list)
    held: set[int] = field(default_factory=set)  # not to be tried before it is known who comes back

    def __contains__(self, suspect: int) -> bool:
        return suspect in self._records

    def blame(self, rows: Sequence[int], num_rows: int, absence: Absence | None = None) -> int | None:
        """A step has failed, or several of which nobody knows which: these had rows in it that are still there, of
        `num_rows` rows in all. With an absence, all that is known is that the worker is away. Returns the one that is
        found guilty, if any; the others will be retried."""
        fresh = [suspect for suspect in rows if suspect not in self._records]
        for suspect in rows:
            record = self._records.setdefault(suspect, _Record())
            record.blame(num_rows == 1, absence)
            alone = record.alone()
            if sum(one.absence is None for one in alone) >= self.poisoned_after:
                self.clear(suspect)
                return suspect
            if len(alone) >= self.poisoned_after:
                self.held.add(suspect)
        self._waiting = [left for group in self._waiting if (left := [one for one in group if one not in rows])]
        size = isqrt(len(fresh)) if len(fresh) > FEW else 1
        self._waiting += (fresh[i : i + size] for i in range(0, len(fresh), size))
        self._waiting += ([suspect] for suspect in rows if suspect not in fresh)
        self._waiting = [group for group in self._waiting if not self.held.issuperset(group)]
        return None

    def came_back(self, incarnation: str) -> None:
        """A worker has: what it was given has not broken it."""
        for suspect, record in self._records.items():
            record.withdraw(incarnation)
            if suspect in self.held and len(record.alone()) < self.poisoned_after:
                self.held.remove(suspect)
                self._waiting.append([suspect])

    def find_poisoned(self, now_s: float) -> list[int]:
        """Those that were held, and are found guilty now: too many workers have not come back."""
        poisoned = []
        for suspect in self.held:
            absences = (one.absence for one in self._records[suspect].alone())
            stands = sum(absence is None or now_s - absence.since_s >= RETURN_S for absence in absences)
            if stands >= self.poisoned_after:
                poisoned.append(suspect)
        for suspect in poisoned:
            self.clear(suspect)
        return sorted(poisoned)

    def clear(self, suspect: int) -> None:
        """It got through, or has ended."""
        self._records.pop(suspect, None)
        self.held.discard(suspect)

    def waiting(self) -> list[list[int]]:
        """The groups to be retried, least suspected first: who is cleared early is out of harm's way."""
        self._waiting = [left for group in self._waiting if (left := [one for one in group if one in self._records])]
        self._waiting.sort(key=lambda group: max(len(self._records[one].blames) for one in group))
        return self._waiting

    def take(self, suits: Callable[[list[int]], bool]) -> list[int]:
        """The next group to be retried; empty if none suits."""
        for group in self.waiting():
            if suits(group):
                self._waiting.remove(group)
                return group
        return []

    def requeue(self, group: list[int]) -> None:
        """It was taken, and has not been retried."""
        if group:
            self._waiting.append(group)
