"""Which requests the order policy sees, if tenants have a budget of running tokens.

A tenant at its limit may have thousands of waiting requests that cannot run before one of the tenant's running requests
has ended. Of each tenant, the order policy sees the first requests of the line that together fit the rest of the
budget, and the next request, which does not fit. So a step does not look at the requests behind these, and no request
passes a request of the same tenant that waits for the budget.

A stuck request cannot run on any worker now, however large the rest of its tenant's budget is. The order policy sees
it, but its tokens do not count. Otherwise the tenant's other requests would wait behind the stuck request, perhaps also
the request that the stuck request waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from sortedcontainers import SortedList

from scheduler_svc.core.requests.request import Request

Entry = tuple[Any, int]  # sort key of the order policy, arrival index


@dataclass(slots=True)
class TenantLine:
    """The waiting requests of a tenant. The order policy sees the first `num_shown`."""

    entries: SortedList[Entry] = field(default_factory=SortedList)
    num_shown: int = 0
    shown_tokens: int = 0  # tokens that the shown requests may grow to, without the stuck requests
    stuck: set[int] = field(default_factory=set)  # arrival indexes of shown requests that are stuck

    def show(self, request: Request) -> None:
        self.num_shown += 1
        self.shown_tokens += request.max_total_tokens

    def hide(self, request: Request) -> None:
        """Hide the request, or note that it is gone."""
        self.num_shown -= 1
        self.shown_tokens -= self.tokens_of(request)
        self.stuck.discard(request.arrival_index)

    def tokens_of(self, request: Request) -> int:
        """Tokens that count for the request while it is shown."""
        return 0 if request.arrival_index in self.stuck else request.max_total_tokens


class TenantLines:
    """The lines of all tenants. The methods that change them return the requests that the order policy begins or stops
    seeing."""

    def __init__(self, free_tokens: Callable[[str], int]) -> None:
        """`free_tokens`: a tenant's budget minus the tokens to which its running requests may grow."""
        self._free_tokens = free_tokens
        self._lines: dict[str, TenantLine] = {}
        self._entries: dict[int, tuple[Entry, Request]] = {}  # by arrival index

    def add(self, request: Request, key: Any) -> list[Request]:
        """Add a waiting request. `key`: its sort key, smaller first. Returns the tenant's requests to toggle: hidden
        requests become shown, and shown ones hidden."""
        entry = (key, request.arrival_index)
        self._entries[request.arrival_index] = entry, request
        line = self._lines.setdefault(request.metadata.tenant, TenantLine())
        turned = []
        if line.entries.bisect_left(entry) < line.num_shown:
            line.show(request)
            turned.append(request)
        line.entries.add(entry)
        return turned + self.balance(request.metadata.tenant)

    def remove(self, request: Request) -> list[Request]:
        """Remove a request. Returns as add()."""
        entry, _ = self._entries.pop(request.arrival_index)
        line = self._lines[request.metadata.tenant]
        index = line.entries.bisect_left(entry)
        del line.entries[index]
        turned = []
        if index < line.num_shown:
            line.hide(request)
            turned.append(request)
        return turned + self.balance(request.metadata.tenant)

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

    def is_stuck(self, request: Request) -> bool:
        line = self._lines.get(request.metadata.tenant)
        return line is not None and request.arrival_index in line.stuck

    def reconsider(self, requests: Iterable[Request], is_stuck: Callable[[Request], bool]) -> list[Request]:
        """Check whether these requests, and those that become shown, are stuck. Returns as add()."""
        looked_at, turned = list(requests), list[Request]()
        for request in looked_at:
            line, (entry, _) = self._lines[request.metadata.tenant], self._entries[request.arrival_index]
            stuck = is_stuck(request)
            if stuck == (request.arrival_index in line.stuck) or line.entries.bisect_left(entry) >= line.num_shown:
                continue
            line.shown_tokens -= line.tokens_of(request)
            (line.stuck.add if stuck else line.stuck.discard)(request.arrival_index)
            line.shown_tokens += line.tokens_of(request)
            more = self.balance(request.metadata.tenant)
            turned += more
            looked_at += more
        return turned

    def _at(self, line: TenantLine, index: int) -> Request:
        return self._entries[line.entries[index][1]][1]
