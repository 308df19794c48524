"""Who stands in the order, where tenants have a budget of running tokens.

A tenant that is at its limit may have thousands waiting, none of whom can run before one of its own has ended. Of each
tenant only those stand in the order who fit its budget one after the other, and the first who does not; so a step does
not look at the rest, and no request of a tenant passes another one that waits for the tenant's tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sortedcontainers import SortedList

from scheduler_svc.core.request import Request

Entry = tuple[Any, int]  # where the order puts it; seniority


@dataclass(slots=True)
class Line:
    """What waits of a tenant. The first ones are shown."""

    entries: SortedList[Entry] = field(default_factory=SortedList)
    num_shown: int = 0
    shown_tokens: int = 0  # that these may grow to


class TenantLines:
    def __init__(self, free_tokens: Callable[[str], int]) -> None:
        """`free_tokens`: what a tenant may still have running beside what it has."""
        self._free_tokens = free_tokens
        self._lines: dict[str, Line] = {}
        self._entries: dict[int, tuple[Entry, Request]] = {}  # by seniority

    def add(self, request: Request, rank: Any) -> list[Request]:
        """Requests of the tenant that are shown from now on, or no more: each call turns it round."""
        entry = (rank, request.seniority)
        self._entries[request.seniority] = entry, request
        line = self._lines.setdefault(request.tenant, Line())
        turned = []
        if line.entries.bisect_left(entry) < line.num_shown:
            line.num_shown += 1
            line.shown_tokens += request.max_total_tokens
            turned.append(request)
        line.entries.add(entry)
        return turned + self.balance(request.tenant)

    def remove(self, request: Request) -> list[Request]:
        """As add()."""
        entry, _ = self._entries.pop(request.seniority)
        line = self._lines[request.tenant]
        index = line.entries.bisect_left(entry)
        del line.entries[index]
        turned = []
        if index < line.num_shown:
            line.num_shown -= 1
            line.shown_tokens -= request.max_total_tokens
            turned.append(request)
        return turned + self.balance(request.tenant)

    def balance(self, tenant: str) -> list[Request]:
        """As add(), after the tenant's free tokens have changed."""
        line = self._lines.get(tenant)
        if line is None:
            return []
        if not line.entries:
            del self._lines[tenant]
            return []
        free_tokens, turned = self._free_tokens(tenant), list[Request]()
        while line.num_shown < len(line.entries) and (line.shown_tokens <= free_tokens or not line.num_shown):
            turned.append(self._at(line, line.num_shown))
            line.num_shown += 1
            line.shown_tokens += turned[-1].max_total_tokens
        while line.num_shown > 1:
            last = self._at(line, line.num_shown - 1)
            if line.shown_tokens - last.max_total_tokens <= free_tokens:
                break
            turned.append(last)
            line.num_shown -= 1
            line.shown_tokens -= last.max_total_tokens
        return turned

    def _at(self, line: Line, index: int) -> Request:
        return self._entries[line.entries[index][1]][1]
