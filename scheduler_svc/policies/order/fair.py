"""Fair among tenants, and among the requests of a tenant.

Among tenants, the tenant that was served least is next (virtual token counter, Sheng et al., OSDI 2024). A tenant's
counter grows by its computed prompt tokens and, weighted, by its generated tokens, divided by the tenant's weight. A
prompt is charged when its request first runs, and never again: recomputation after a preemption is not the preempted
tenant's fault. When a tenant without waiting requests gets one, its counter is raised to the lowest counter of the
tenants that wait, or, if none waits, to that of the tenant that waited last. So a tenant gains no credit while it has
no waiting request, even if its requests run all the time.

Within a tenant, the client's request with the fewest running sequences is next (max-min fairness in slots); of equal
requests, the one that came first. Without `n`, `best_of` and beam search this is first come, first served. No request
starves: its first sequence waits only for requests that came earlier. The beams of a search run for one token at a
time; all but the first rank like a request that runs one sequence.

Clients choose tenant names, so there may be any number of tenants. A pass looks at the tenants with running sequences
and at the first of the waiting tenants. Idle tenants cost nothing. Only the last MAX_IDLE of them are remembered; a
forgotten tenant begins like a new one.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from sortedcontainers import SortedDict, SortedList

from scheduler_svc.policies.api import OrderPolicy, RequestView
from scheduler_svc.policies.options import Amount, PositiveAmount

MAX_IDLE = 1024
# A tenant's generated tokens are charged at an interval: CHARGE_INTERVAL_S, plus CHARGE_INTERVAL_S_PER_SEQUENCE for
# each of its running sequences. Reading one sequence takes 1.5 us, so charging takes at most 1.5 % of a core for each
# tenant.
CHARGE_INTERVAL_S, CHARGE_INTERVAL_S_PER_SEQUENCE = 0.1, 1e-4

# Running sequences of the client's request; queue position and arrival index of its next waiting sequence.
Key = tuple[int, int, int]


@dataclass(slots=True)
class ClientRequestQueue:
    """The waiting sequences of one client request, by queue position; mostly one."""

    key: Key = (0, 0, 0)  # its key in its tenant's `waiting`
    sequences: list[tuple[int, int, RequestView]] = field(default_factory=list)  # queue position, arrival index; sorted


@dataclass(slots=True)
class Tenant:
    """A tenant with requests: its counter, in weighted tokens, and its waiting and running sequences."""

    name: str
    weight: float
    counter: float
    waiting: SortedDict[Key, ClientRequestQueue] = field(default_factory=SortedDict)
    lines: dict[int, ClientRequestQueue] = field(default_factory=dict)  # the same queues, by client request
    # by arrival index; output tokens charged so far
    running: dict[int, tuple[RequestView, int]] = field(default_factory=dict)
    charged_s: float = -math.inf  # when running sequences were charged last

    def add(self, request: RequestView) -> None:
        """Add a waiting sequence to the queue of its client's request."""
        line = self.lines.setdefault(request.client_request, ClientRequestQueue())
        insort(line.sequences, (request.queue_position, request.arrival_index, request))
        self._place(line)

    def remove(self, request: RequestView) -> None:
        """Remove a waiting sequence. Raises KeyError if its request has none."""
        line = self.lines[request.client_request]
        del line.sequences[bisect_left(line.sequences, (request.queue_position, request.arrival_index))]
        self._place(line)
        if not line.sequences:
            del self.lines[request.client_request]

    def siblings_changed(self, request: RequestView) -> None:
        """A sequence of the same client's request has started or stopped."""
        if line := self.lines.get(request.client_request):
            self._place(line)

    def _place(self, line: ClientRequestQueue) -> None:
        """Update the queue's key."""
        if self.waiting.get(line.key) is line:
            del self.waiting[line.key]
        if line.sequences:
            first = line.sequences[0][2]
            line.key = _standing(first, first.num_running_siblings)
            self.waiting[line.key] = line

    def ordered(self) -> Iterator[RequestView]:
        """Each sequence yielded counts as running for the later sequences of its request."""
        lines = iter(self.waiting.values())
        following = next(lines, None)
        heap: list[tuple[Key, Iterator[RequestView], RequestView]] = []
        rest: Iterator[RequestView]
        while following or heap:
            if following and not (heap and heap[0][0] < following.key):
                num_running, rest = following.key[0], (request for _, _, request in following.sequences)
                request = next(rest)
                following = next(lines, None)
            else:
                (num_running, _, _), rest, request = heapq.heappop(heap)
            yield request
            if (sibling := next(rest, None)) is not None:
                heapq.heappush(heap, (_standing(sibling, num_running + 1), rest, sibling))


def _standing(request: RequestView, num_running: int) -> Key:
    """All beams of a search rank together, because the search goes on when all of them have run."""
    return min(num_running, 1) if request.is_beam else num_running, request.queue_position, request.arrival_index


class FairAmongTenants(OrderPolicy):
    """Orders by tenants' served tokens, then by running sequences of the client's request, then by queue position."""

    def __init__(
        self, tenant_weights: dict[str, PositiveAmount] | None = None, output_token_weight: Amount = 2.0
    ) -> None:
        """A tenant of weight 2 gets twice the tokens of a tenant of weight 1. An unnamed tenant has weight 1."""
        self._weights = tenant_weights or {}
        self._output_weight = output_token_weight
        self.busy: dict[str, Tenant] = {}
        self._running: dict[str, Tenant] = {}  # tenants with running sequences
        self._waiting: SortedList[tuple[float, str]] = SortedList()  # counters of tenants with waiting requests
        self.idle: dict[str, float] = {}  # counters of the last busy tenants
        self._last_waited = ""  # the last tenant that stopped waiting

    def _busy(self, name: str) -> Tenant:
        if name not in self.busy:
            self.busy[name] = Tenant(name, self._weights.get(name, 1.0), self.idle.pop(name, 0.0))
        return self.busy[name]

    def _left(self, name: str) -> None:
        """A request of the tenant is gone: the tenant may be idle now."""
        tenant = self.busy[name]
        if not (tenant.waiting or tenant.running):
            self.idle[name] = self.busy.pop(name).counter
            if len(self.idle) > MAX_IDLE:
                del self.idle[next(iter(self.idle))]

    def add(self, request: RequestView) -> None:
        """Add a request. A tenant that begins to wait gets at least the lowest counter of the others."""
        tenant = self._busy(request.tenant)
        if not tenant.waiting:
            was_last = not self._waiting and self._last_waited == tenant.name  # it would be compared with itself
            if not (request.has_run or was_last):  # a preempted request is not a new one
                self._charge_output(tenant, request.arrival_s)
                tenant.counter = max(tenant.counter, self._lowest(request.arrival_s))
            self._waiting.add((tenant.counter, tenant.name))
        tenant.add(request)

    def _lowest(self, now_s: float) -> float:
        """The counter of a tenant that begins to wait now."""
        while self._waiting:
            first = self._waiting[0]
            tenant = self.busy[first[1]]
            self._charge_output(tenant, now_s)
            if self._waiting[0] == first:
                return tenant.counter
        if last := self.busy.get(self._last_waited):
            self._charge_output(last, now_s)
            return last.counter
        return self.idle.get(self._last_waited, 0.0)

    def remove(self, request: RequestView) -> None:
        """Remove a request. A tenant without requests becomes idle."""
        tenant = self.busy[request.tenant]
        tenant.remove(request)
        if not tenant.waiting:
            self._waiting.remove((tenant.counter, tenant.name))
            self._last_waited = tenant.name
        self._left(tenant.name)

    def started(self, request: RequestView) -> None:
        """Charge the tenant for the prompt, if the request runs for the first time."""
        tenant = self._busy(request.tenant)
        self._charge(tenant, self._prompt_cost(request, tenant))
        tenant.running[request.arrival_index] = (request, request.num_output_tokens)
        tenant.siblings_changed(request)
        self._running[tenant.name] = tenant

    def stopped(self, request: RequestView) -> None:
        """Charge the tenant for the generated tokens that it was not charged for yet."""
        tenant = self._busy(request.tenant)
        if (entry := tenant.running.pop(request.arrival_index, None)) is not None:
            self._charge(tenant, self._output_cost(tenant, request.num_output_tokens - entry[1]))
        tenant.siblings_changed(request)
        if not tenant.running:
            self._running.pop(tenant.name, None)
        self._left(tenant.name)

    def ordered(self, now_s: float) -> Iterator[RequestView]:
        """Each request yielded counts against its tenant for the later ones, as if it were admitted."""
        if not self._waiting:
            return iter(())
        if len(self._waiting) == 1:
            return self.busy[self._waiting[0][1]].ordered()
        return self._ordered(now_s)

    def _ordered(self, now_s: float) -> Iterator[RequestView]:
        for tenant in self._running.values():
            self._charge_output(tenant, now_s)
        tenants = iter(self._waiting)
        following = next(tenants, None)
        heap: list[tuple[float, str, Iterator[RequestView]]] = []
        while following or heap:
            if following and not (heap and heap[0] < following):
                counter, name = following
                requests = self.busy[name].ordered()
                following = next(tenants, None)
            else:
                counter, name, requests = heapq.heappop(heap)
            if (request := next(requests, None)) is not None:
                yield request
                heapq.heappush(heap, (counter + self._prompt_cost(request, self.busy[name]), name, requests))

    def goes_before(self, waiting: RequestView, running: RequestView, now_s: float) -> bool:
        """Compare the tenants' counters; within a tenant, the requests' running sequences."""
        if waiting.tenant == running.tenant:
            standing = _standing(running, running.num_running_siblings - 1)
            return _standing(waiting, waiting.num_running_siblings) < standing
        return self._position(waiting.tenant, now_s) < self._position(running.tenant, now_s)

    def _position(self, name: str, now_s: float) -> tuple[float, str]:
        if (tenant := self.busy.get(name)) is None:  # the fallback order is told of no request
            return self.idle.get(name, 0.0), name
        self._charge_output(tenant, now_s)
        return tenant.counter, name

    def _prompt_cost(self, request: RequestView, tenant: Tenant) -> float:
        if request.has_run:  # its prompt was charged before
            return 0.0
        return (request.num_tokens - request.best_matched_tokens) / tenant.weight

    def _output_cost(self, tenant: Tenant, num_tokens: int) -> float:
        return self._output_weight * num_tokens / tenant.weight

    def _charge_output(self, tenant: Tenant, now_s: float) -> None:
        if now_s - tenant.charged_s < CHARGE_INTERVAL_S + CHARGE_INTERVAL_S_PER_SEQUENCE * len(tenant.running):
            return
        tenant.charged_s = now_s
        num_tokens = 0
        for arrival_index, (request, charged) in tenant.running.items():
            now = request.num_output_tokens
            if now != charged:
                num_tokens += now - charged
                tenant.running[arrival_index] = (request, now)
        if num_tokens:
            self._charge(tenant, self._output_cost(tenant, num_tokens))

    def _charge(self, tenant: Tenant, cost: float) -> None:
        if tenant.waiting:
            self._waiting.remove((tenant.counter, tenant.name))
            self._waiting.add((tenant.counter + cost, tenant.name))
        tenant.counter += cost
