"""The central queue of waiting requests, one for each class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from operator import attrgetter
from typing import Any

from scheduler_svc.core.admission.tenant_lines import TenantLines
from scheduler_svc.core.policy.order import OrderPolicy, PolicyError, sortable
from scheduler_svc.core.requests.request import Request, RequestView, view_of


class WaitingQueue:
    """Waiting requests of one class, by arrival index. Counts their tokens, in total and by tenant. An order policy
    decides their order.

    Entering and leaving, at any position in the queue, cost what the policy's index costs: mostly O(log n).
    """

    def __init__(
        self,
        order: OrderPolicy,
        fallback: Callable[[Exception], OrderPolicy],
        free_tokens: Callable[[str], int] | None = None,
    ) -> None:
        """`fallback` is called with the error of an order that raises, and returns the order that replaces it.
        `free_tokens` returns the tokens that a tenant may still have running, if tenants have a limit."""
        self._by_arrival_index: dict[int, Request] = {}
        self._free_tokens = free_tokens
        self._fallback = fallback
        self.reorder(order)
        # Without the beams of a search that has begun: they come and go in every step.
        self.num_requests = self.num_tokens = 0
        self.tenant_tokens: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._by_arrival_index)

    def __contains__(self, request: Request) -> bool:
        return self._by_arrival_index.get(request.arrival_index) is request

    def __iter__(self) -> Iterator[Request]:
        """Oldest first. Sorts all waiting requests, so not for every step."""
        return iter([self._by_arrival_index[arrival_index] for arrival_index in sorted(self._by_arrival_index)])

    @property
    def oldest_arrival_s(self) -> float:
        """When the oldest waiting request arrived. The queue must not be empty."""
        return self._by_arrival_index[min(self._by_arrival_index)].arrival_s

    def add(self, request: Request) -> None:
        assert request.arrival_index not in self._by_arrival_index, "a request stands in the queue once"
        self._by_arrival_index[request.arrival_index] = request
        self._count(request, 1)
        if self._lines is None:
            self._tell(self.order.add, request)
        else:
            self._change(lambda lines: lines.add(request, _rank(self.order, request)))
            # The order learns of a hidden request's arrival, too: some orders count its waiting time from now on.
            if request.arrival_index not in self._shown:
                order = self.order
                self._tell(order.add, request)
                if self.order is order:
                    self._tell(order.remove, request)

    def remove(self, request: Request) -> None:
        del self._by_arrival_index[request.arrival_index]
        self._count(request, -1)
        if self._lines is None:
            self._tell(self.order.remove, request)
        else:
            self._change(lambda lines: lines.remove(request))

    def free_tokens_changed(self, tenant: str) -> None:
        """The rest of the tenant's budget of running tokens has changed."""
        if self._lines is not None:
            self._change(lambda lines: lines.balance(tenant))

    def is_stuck(self, request: Request) -> bool:
        """Whether the request is stuck, so its tokens do not count for its tenant (tenant_lines.py)."""
        return self._lines is not None and self._lines.is_stuck(request)

    def reconsider(self, requests: Iterable[Request], is_stuck: Callable[[Request], bool]) -> bool:
        """Check which of these requests are stuck (tenant_lines.py): no worker could run them now, even if their tenant
        were below its limit. Returns whether the order sees more requests than before."""
        shown = len(self._shown)
        there = [request for request in requests if request.arrival_index in self._shown]
        self._change(lambda lines: lines.reconsider(there, is_stuck))
        return len(self._shown) > shown

    def _change(self, change: Callable[[TenantLines], list[Request]]) -> None:
        """Apply the change, and tell the order which requests it now sees, and which it no longer sees. Removals come
        last, so that a tenant with waiting requests never seems to have none. The very last is the request that leaves
        the queue, because it may start now."""
        assert self._lines is not None
        order, turned = self.order, dict[int, Request]()
        try:
            for request in change(self._lines):
                if turned.pop(request.arrival_index, None) is None:
                    turned[request.arrival_index] = request
        except Exception as error:  # an error of the order: its sort keys cannot be compared
            self.reorder(self._fallback(error))
            return
        coming = [request for request in turned.values() if request.arrival_index not in self._shown]
        going = [request for request in turned.values() if request.arrival_index in self._shown]
        for request in [*coming, *reversed(going)]:
            shows = self._shown.pop(request.arrival_index, None) is None
            if shows:
                self._shown[request.arrival_index] = request
            self._tell(order.add if shows else order.remove, request)
            if self.order is not order:
                return  # the order has failed, and the one that replaced it knows all requests

    def rematched(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request.arrival_index in self._shown:
                self._tell(self.order.rematched, request)

    def started(self, request: Request) -> None:
        if self._follows_runs:
            self._tell(self.order.started, request)

    def stopped(self, request: Request) -> None:
        if self._follows_runs:
            self._tell(self.order.stopped, request)

    def reorder(self, order: OrderPolicy) -> None:
        """Another order takes over. Raises what that order raises; then nothing has changed."""
        lines: TenantLines | None = None
        shown = self._by_arrival_index  # requests that the order sees
        if self._free_tokens is not None:
            lines, shown = TenantLines(self._free_tokens), {}
            for request in self:
                for turned in lines.add(request, _rank(order, request)):
                    if shown.pop(turned.arrival_index, None) is None:
                        shown[turned.arrival_index] = turned
        for _, request in sorted(shown.items()):
            order.add(view_of(request))
        self._lines, self._shown = lines, shown
        self.order, kind = order, type(order)
        self._follows_runs = kind.started is not OrderPolicy.started or kind.stopped is not OrderPolicy.stopped

    def ordered(self, now_s: float) -> Iterator[Request]:
        """Every waiting request that the order sees (tenant_lines.py), in the policy's order. Raises what the policy
        raises, and PolicyError unless the policy names each of these requests exactly once."""
        waiting = self._shown
        named: set[int] = set()
        for view in self.order.ordered(now_s):
            request = view._request if isinstance(view, RequestView) else None
            if request is None or waiting.get(arrival_index := request.arrival_index) is not request:
                raise PolicyError(f"order: {view!r} does not wait")
            if arrival_index in named:
                raise PolicyError(f"order: {view!r} comes twice")
            named.add(arrival_index)
            yield request
        if len(named) < len(waiting):
            raise PolicyError(f"order: {len(waiting) - len(named)} of {len(waiting)} waiting requests are left out")

    def hopeless(self, now_s: float) -> list[Request]:
        """Requests that the order gives up. Empty if the order fails, or names a request that it does not see: then
        another order replaces it."""
        named: dict[int, Request] = {}
        try:
            for view in self.order.hopeless(now_s):
                request = self._shown.get(view.arrival_index) if isinstance(view, RequestView) else None
                if request is None or view._request is not request or request.arrival_index in named:
                    raise PolicyError(f"order: hopeless names {view!r}, which does not wait, or comes twice")
                named[request.arrival_index] = request
        except Exception as error:
            self.reorder(self._fallback(error))
            return []
        return list(named.values())

    def _tell(self, event: Callable[[RequestView], None], request: Request) -> None:
        try:
            event(view_of(request))
        except Exception as error:  # a policy's error must not fail a request
            self.reorder(self._fallback(error))

    def _count(self, request: Request, sign: int) -> None:
        if request.family.group is not None and request.history.started_s is not None:
            return
        self.num_requests += sign
        self.num_tokens += sign * request.num_tokens
        self.tenant_tokens[request.metadata.tenant] += sign * request.num_tokens
        if not self.tenant_tokens[request.metadata.tenant]:
            del self.tenant_tokens[request.metadata.tenant]


@dataclass(frozen=True, slots=True)
class ClassQueues:
    """The queues of online and of offline requests. Each request waits in the queue of its class."""

    online: WaitingQueue
    offline: WaitingQueue

    def of(self, request: Request) -> WaitingQueue:
        """The queue of the request's class."""
        return self.offline if request.metadata.offline else self.online

    def __len__(self) -> int:
        return len(self.online._by_arrival_index) + len(self.offline._by_arrival_index)

    def __contains__(self, request: Request) -> bool:
        return request in self.of(request)

    def __iter__(self) -> Iterator[Request]:
        """Oldest first. Sorts all waiting requests, so not for every step."""
        return merge(self.online, self.offline, key=attrgetter("arrival_index"))

    def rematched(self, requests: Sequence[Request]) -> None:
        """The cache holds more or fewer tokens of these waiting requests than before."""
        self.online.rematched(requests)  # a queue ignores the requests of the other class
        self.offline.rematched(requests)


def _rank(order: OrderPolicy, request: Request) -> Any:
    """The request's sort key in its tenant's line. If the order has none, the queue position decides. Raises
    PolicyError."""
    view = view_of(request)
    return sortable(order.rank(view), view), request.queue_position
