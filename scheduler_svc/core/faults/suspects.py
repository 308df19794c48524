"""Which request is to blame for a failed step: the rule, and nothing else.

A step fails as a whole: it raised, was overdue, or took its worker down. Any of its rows may be the reason, or none
(the machine lost power). So:

    every row of a failed step    is a suspect. Suspects are retried in groups. A step with rows of one group has no
                                  other rows.
    suspected for the first time  A group has as many members as there are groups (256 rows: 16 groups of 16), so that
                                  few steps clear the many innocent rows. Up to FEW rows are retried one by one.
    suspected again               It is retried alone.
    a group gets through          Its members are cleared, and all blames are forgotten.
    a group fails                 Its members stay suspects. A request outside the failed step is not suspected.
    a suspect alone fails         After `poisoned_after` failures in a row as the only row, the request is poisoned, and
                                  never retried.

Only a request that ran alone can be found poisoned. An innocent request from the same failed step is cleared as soon as
it runs without the poisoned request. One failure alone is not enough: it may be a coincidence, for example if an
operator killed the worker. Where workers are killed from outside all the time, two failures are not enough either.

A worker with a lost link may be dead or alive. Its rows are blamed, and retried at once. If the same process comes
back, it has not died of these rows, and that blame is withdrawn. A blame that may still be withdrawn has an `Absence`.
A suspect that reaches `poisoned_after` only with blames that may still be withdrawn is held: it is not retried until a
worker comes back. For this number, only its latest unbroken run of failures as the only row matters. It is found
poisoned when `poisoned_after` of these have no `Absence`, or an `Absence` that began at least RETURN_S ago.

The withdrawals have a limit. A request that stops its worker's event loop for seconds, or has a result that no link can
carry, loses the worker each time, and each time the worker comes back. So after as many withdrawals as `Loss` says, a
suspect's new blames are not withdrawn any more until it is cleared. A blame is never withdrawn if the worker reported
the failure (a step that raised, or is overdue), or did something wrong itself.

Suspects are numbers here. The caller, which runs the steps (retry_groups.py), decides when a suspect gets through.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import takewhile
from math import isqrt

FEW = 8
RETURN_S = 10.0  # a frozen or unreachable worker is mostly back within this time


class Loss(IntEnum):
    """How a worker was lost. The value: the most blames of one suspect that can be withdrawn for this kind of loss.
    Later blames stay. The count starts again when the suspect is cleared."""

    FAULT = 0  # it made no progress with a step, or sent an invalid message
    SILENCE = 3  # no heartbeat came
    LINK = 16  # its link broke or ended, which hardly ever is the work of a row


@dataclass(frozen=True, slots=True)
class Absence:
    """A lost worker that may come back."""

    incarnation: str  # as in its registration
    loss: Loss
    since_s: float


@dataclass(frozen=True, slots=True)
class _Blame:
    was_alone: bool  # it was the only row
    absence: Absence | None  # the worker's return withdraws the blame; None: the blame is never withdrawn


@dataclass(slots=True)
class _Record:
    blames: list[_Blame] = field(default_factory=list)  # since the request became a suspect, oldest first
    withdrawn: Counter[Loss] = field(default_factory=Counter)

    def blame(self, was_alone: bool, absence: Absence | None) -> None:
        if absence is not None and self.withdrawn[absence.loss] >= absence.loss:
            absence = None
        self.blames.append(_Blame(was_alone, absence))

    def withdraw(self, incarnation: str) -> None:
        """Withdraw every blame for this worker's absence."""
        for one in list(self.blames):
            if one.absence is not None and one.absence.incarnation == incarnation:
                self.withdrawn[one.absence.loss] += 1
                self.blames.remove(one)

    def alone(self) -> list[_Blame]:
        """The latest blames, as far back as the suspect was the only row."""
        return list(takewhile(lambda one: one.was_alone, reversed(self.blames)))


@dataclass(slots=True)
class Suspects:
    """A suspect is in a group that waits to be retried, in a group that was taken for a retry, or held."""

    poisoned_after: int  # failures in a row with the suspect as the only row
    _records: dict[int, _Record] = field(default_factory=dict)
    _waiting: list[list[int]] = field(default_factory=list)
    held: set[int] = field(default_factory=set)  # not retried until it is known whether the lost workers come back

    def __contains__(self, suspect: int) -> bool:
        return suspect in self._records

    def blame(self, rows: Sequence[int], num_rows: int, absence: Absence | None = None) -> int | None:
        """A step has failed, or one of several steps in flight has. `rows` are the live requests in these steps, of
        `num_rows` rows in all. With an `absence`, it is only known that the worker is away. Returns the suspect that is
        found poisoned, if any."""
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
        """A lost worker is back: its rows did not break it."""
        for suspect, record in self._records.items():
            record.withdraw(incarnation)
            if suspect in self.held and len(record.alone()) < self.poisoned_after:
                self.held.remove(suspect)
                self._waiting.append([suspect])

    def find_poisoned(self, now_s: float) -> list[int]:
        """Held suspects that are poisoned: too many workers have not come back."""
        poisoned = []
        for suspect in sorted(self.held):
            absences = (one.absence for one in self._records[suspect].alone())
            stands = sum(absence is None or now_s - absence.since_s >= RETURN_S for absence in absences)
            if stands >= self.poisoned_after:
                self.clear(suspect)
                poisoned.append(suspect)
        return poisoned

    def clear(self, suspect: int) -> None:
        """The suspect got through, or has ended."""
        self._records.pop(suspect, None)
        self.held.discard(suspect)

    def waiting(self) -> list[list[int]]:
        """The groups to retry, least suspected first, so that innocent requests are cleared early."""
        self._waiting = [left for group in self._waiting if (left := [one for one in group if one in self._records])]
        self._waiting.sort(key=lambda group: max(len(self._records[one].blames) for one in group))
        return self._waiting

    def take(self, suits: Callable[[list[int]], bool]) -> list[int]:
        """Take the next group to retry. Empty if none suits."""
        for group in self.waiting():
            if suits(group):
                self._waiting.remove(group)
                return group
        return []

    def requeue(self, group: list[int]) -> None:
        """The group was taken, and has not been retried."""
        if group:
            self._waiting.append(group)
