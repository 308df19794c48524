"""Who stands in the order, where tenants have a budget of running tokens.

A tenant that is at its limit may have thousands waiting, none of whom can run before one of its own has ended. Of each
tenant only those stand in the order who fit its budget one after the other, and the first who does not; so a step does
not look at the rest, and no request of a tenant passes another one that waits for the tenant's tokens.

Who waits for something else, as no worker could take it whatever its tenant has left, stands in the order too, but
counts nothing: else the rest of its tenant would wait with it, and perhaps what it waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from sortedcontainers import SortedList

from scheduler_svc.core.requests.request import Request

Entry = tuple[Any, int]  # where the order puts it; arrival_index


@dataclass(slots=True)
class TenantLine:
    """What waits of a tenant. The first ones are shown."""

    entries: SortedList[Entry] = field(default_factory=SortedList)
    num_shown: int = 0
    shown_tokens: int = 0  # that these may grow to, but for those that are
    aside: set[int] = field(default_factory=set)  # by arrival_index

    def show(self, request: Request) -> None:
        self.num_shown += 1
        self.shown_tokens += request.max_total_tokens

    def hide(self, request: Request) -> None:
        """Or it is gone."""
        self.num_shown -= 1
        self.shown_tokens -= self.tokens_of(request)
        self.aside.discard(request.arrival_index)

    def tokens_of(self, request: Request) -> int:
        """What it counts while it is shown."""
        return 0 if request.arrival_index in self.aside else request.max_total_tokens


class TenantLines:
    def __init__(self, free_tokens: Callable[[str], int]) -> None:
        """`free_tokens`: what a tenant may still have running beside what it has."""
        self._free_tokens = free_tokens
        self._lines: dict[str, TenantLine] = {}
        self._entries: dict[int, tuple[Entry, Request]] = {}  # by arrival_index

    def add(self, request: Request, rank: Any) -> list[Request]:
        """Requests of the tenant that are shown from now on, or no more: each call turns it round."""
        entry = (rank, request.arrival_index)
        self._entries[request.arrival_index] = entry, request
        line = self._lines.setdefault(request.tenant, TenantLine())
        turned = []
        if line.entries.bisect_left(entry) < line.num_shown:
            line.show(request)
            turned.append(request)
        line.entries.add(entry)
        return turned + self.balance(request.tenant)

    def remove(self, request: Request) -> list[Request]:
        """As add()."""
        entry, _ = self._entries.pop(request.arrival_index)
        line = self._lines[request.tenant]
        index = line.entries.bisect_left(entry)
        del line.entries[index]
        turned = []
        if index < line.num_shown:
            line.hide(request)
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
            line.show(turned[-1])
        while line.num_shown > 1:
            last = self._at(line, line.num_shown - 1)
            if line.shown_tokens - line.tokens_of(last) <= free_tokens:
                break
            turned.append(last)
            line.hide(last)
        return turned

    def is_aside(self, request: Request) -> bool:
        line = self._lines.get(request.tenant)
        return line is not None and request.arrival_index in line.aside

    def reconsider(self, requests: Iterable[Request], is_stuck: Callable[[Request], bool]) -> list[Request]:
        """Whether these, and what is shown in their turn, could run if their tenants had tokens left. As add()."""
        looked_at, turned = list(requests), list[Request]()
        for request in looked_at:
            line, (entry, _) = self._lines[request.tenant], self._entries[request.arrival_index]
            stuck = is_stuck(request)
            if stuck == (request.arrival_index in line.aside) or line.entries.bisect_left(entry) >= line.num_shown:
                continue
            line.shown_tokens -= line.tokens_of(request)
            (line.aside.add if stuck else line.aside.discard)(request.arrival_index)
            line.shown_tokens += line.tokens_of(request)
            more = self.balance(request.tenant)
            turned += more
            looked_at += more
        return turned

    def _at(self, line: TenantLine, index: int) -> Request:
        return self._entries[line.entries[index][1]][1]
