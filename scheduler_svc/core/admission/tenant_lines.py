"""Which requests the order sees, if tenants have a budget of running tokens.

A tenant at its limit may have thousands of waiting requests that cannot run before one of its own has ended. Of each
tenant, the order sees the requests that fit its budget one after the other, and the first that does not fit. So a step
does not look at the rest, and no request of a tenant passes another one that waits for the tenant's tokens.

The order also sees a stuck request, which no worker could take whatever its tenant has left. But it does not count:
otherwise the rest of its tenant would wait with it, and perhaps the request that it waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from sortedcontainers import SortedList

from scheduler_svc.core.requests.request import Request

Entry = tuple[Any, int]  # rank in the order, arrival index


@dataclass(slots=True)
class TenantLine:
    """The waiting requests of a tenant. The order sees the first `num_shown`."""

    entries: SortedList[Entry] = field(default_factory=SortedList)
    num_shown: int = 0
    shown_tokens: int = 0  # tokens that the shown requests may grow to, without requests in `aside`
    aside: set[int] = field(default_factory=set)  # by arrival index

    def show(self, request: Request) -> None:
        self.num_shown += 1
        self.shown_tokens += request.max_total_tokens

    def hide(self, request: Request) -> None:
        """Hide the request, or note that it is gone."""
        self.num_shown -= 1
        self.shown_tokens -= self.tokens_of(request)
        self.aside.discard(request.arrival_index)

    def tokens_of(self, request: Request) -> int:
        """Tokens that the request counts while it is shown."""
        return 0 if request.arrival_index in self.aside else request.max_total_tokens


class TenantLines:
    def __init__(self, free_tokens: Callable[[str], int]) -> None:
        """`free_tokens`: tokens that a tenant may still have running on top of what runs."""
        self._free_tokens = free_tokens
        self._lines: dict[str, TenantLine] = {}
        self._entries: dict[int, tuple[Entry, Request]] = {}  # by arrival index

    def add(self, request: Request, rank: Any) -> list[Request]:
        """Add a waiting request. Returns the tenant's requests to toggle: they become shown, or are shown no more."""
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
        """Remove a request. Returns as add()."""
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
        """The tenant's free tokens have changed. Returns as add()."""
        line = self._lines.get(tenant)
        if line is None or not line.entries:
            self._lines.pop(tenant, None)
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
        """Check whether these requests, and those that become shown, are stuck. Returns as add()."""
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
