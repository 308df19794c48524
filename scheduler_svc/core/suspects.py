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
    alone, for the second time    in a row (`guilty_after`): it is poison, and never retried

Only who was alone is ever found guilty, so company cannot hurt: however often a request stands beside poison, it is
cleared as soon as it runs without it. And twice, because the first time may be a coincidence (somebody killed that
worker): a poison that arrives in a crowd fails once in the crowd, perhaps once in a small group, and twice alone. A
machine whose workers are killed from outside all the time wants more than twice.

Suspects are numbers here. What "gets through" means is for those to say who run the steps (trials.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isqrt

FEW = 8


@dataclass(slots=True)
class _Record:
    failures: int = 0  # in a row
    alone: int = 0  # of these, the last ones, in which it was the only row


@dataclass(slots=True)
class Suspects:
    """A suspect is in one of the groups that wait to be retried, or in one that has been taken out for that."""

    guilty_after: int  # failures in a row in which it was alone
    _records: dict[int, _Record] = field(default_factory=dict)
    _waiting: list[list[int]] = field(default_factory=list)

    def __contains__(self, suspect: int) -> bool:
        return suspect in self._records

    def accuse(self, rows: Sequence[int], num_rows: int) -> int | None:
        """A step has failed, or several of which nobody knows which: these had rows in it that are still there, of
        `num_rows` rows in all. Returns the one that is found guilty, if any; the others will be retried."""
        fresh = [suspect for suspect in rows if suspect not in self._records]
        for suspect in rows:
            record = self._records.setdefault(suspect, _Record())
            record.failures += 1
            record.alone = record.alone + 1 if num_rows == 1 else 0
            if record.alone >= self.guilty_after:
                self.clear(suspect)
                return suspect
        self._waiting = [left for group in self._waiting if (left := [one for one in group if one not in rows])]
        size = isqrt(len(fresh)) if len(fresh) > FEW else 1
        self._waiting += (fresh[i : i + size] for i in range(0, len(fresh), size))
        self._waiting += ([suspect] for suspect in rows if suspect not in fresh)
        return None

    def clear(self, suspect: int) -> None:
        """It got through, or has ended."""
        self._records.pop(suspect, None)

    def waiting(self) -> list[list[int]]:
        """The groups to be retried, least suspected first: who is cleared early is out of harm's way."""
        self._waiting = [left for group in self._waiting if (left := [one for one in group if one in self._records])]
        self._waiting.sort(key=lambda group: max(self._records[one].failures for one in group))
        return self._waiting

    def take(self, suits: Callable[[list[int]], bool]) -> list[int]:
        """The next group to be retried; empty if none suits."""
        for group in self.waiting():
            if suits(group):
                self._waiting.remove(group)
                return group
        return []

    def put_back(self, group: list[int]) -> None:
        """It was taken, and has not been retried."""
        if group:
            self._waiting.append(group)
