"""Fair among tenants: the one that was served least goes next (virtual token counter, Sheng et al., OSDI 2024).

A tenant's counter grows by the prompt tokens it gets computed and, weighted, by the tokens it gets generated, over its
weight. A prompt is charged when its request first runs, and never again: what is computed anew after a preemption is
not the doing of the tenant that was pushed out. A tenant of which nothing waited is lifted, when something does, to the
lowest counter of those of which something waits, or if there are none to that of the last one that was: what it did not
ask for it cannot claim later, however much of it runs.

Within a tenant, first come, first served.

Tenants are named by clients, so there may be any number of them. A pass looks at those of which something runs and at
the first of those that wait. Those that are idle cost nothing, and only the last MAX_IDLE of them are remembered: one
that is forgotten begins like one under a new name.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from sortedcontainers import SortedDict, SortedList

from scheduler_svc.core.policy import OrderPolicy
from scheduler_svc.core.view import RequestView
from scheduler_svc.policies.options import Amount, PositiveAmount

MAX_IDLE = 1024


@dataclass(slots=True)
class Tenant:
    name: str
    weight: float
    counter: float
    waiting: SortedDict[tuple[int, int], RequestView] = field(default_factory=SortedDict)
    running: dict[int, tuple[RequestView, int]] = field(
        default_factory=dict
    )  # by seniority; output tokens charged so far

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.running)


class FairAmongTenants(OrderPolicy):
    def __init__(
        self, tenant_weights: dict[str, PositiveAmount] | None = None, output_token_weight: Amount = 2.0
    ) -> None:
        """A tenant of weight 2 gets twice the tokens of one of weight 1, which is what an unnamed one has."""
        self._weights = tenant_weights or {}
        self._output_weight = output_token_weight
        self.busy: dict[str, Tenant] = {}
        self._running: dict[str, Tenant] = {}  # those of which something runs
        self._waiting: SortedList[tuple[float, str]] = SortedList()  # counters, of those of which something waits
        self.idle: dict[str, float] = {}  # counters, of those that were busy last
        self._last_waited = ""  # the last one of which nothing waits any more

    def _busy(self, name: str) -> Tenant:
        if name not in self.busy:
            self.busy[name] = Tenant(name, self._weights.get(name, 1.0), self.idle.pop(name, 0.0))
        return self.busy[name]

    def _left(self, name: str) -> None:
        """Something of the tenant is gone: it may be idle now."""
        if self.busy[name].is_idle:
            self.idle[name] = self.busy.pop(name).counter
            if len(self.idle) > MAX_IDLE:
                del self.idle[next(iter(self.idle))]

    def add(self, request: RequestView) -> None:
        tenant = self._busy(request.tenant)
        if not tenant.waiting:
            if not request.has_run:  # who is pushed out has not just come
                self._charge_output(tenant)
                tenant.counter = max(tenant.counter, self._lowest())
            self._waiting.add((tenant.counter, tenant.name))
        tenant.waiting[request.place, request.seniority] = request

    def _lowest(self) -> float:
        """Where a tenant begins that comes now."""
        while self._waiting:
            first = self._waiting[0]
            tenant = self.busy[first[1]]
            self._charge_output(tenant)
            if self._waiting[0] == first:
                return tenant.counter
        if last := self.busy.get(self._last_waited):
            self._charge_output(last)
            return last.counter
        return self.idle.get(self._last_waited, 0.0)

    def remove(self, request: RequestView) -> None:
        tenant = self.busy[request.tenant]
        del tenant.waiting[request.place, request.seniority]
        if not tenant.waiting:
            self._waiting.remove((tenant.counter, tenant.name))
            self._last_waited = tenant.name
        self._left(tenant.name)

    def started(self, request: RequestView) -> None:
        tenant = self._busy(request.tenant)
        self._charge(tenant, self._prompt_cost(request, tenant))
        tenant.running[request.seniority] = (request, request.num_output_tokens)
        self._running[tenant.name] = tenant

    def stopped(self, request: RequestView) -> None:
        tenant = self._busy(request.tenant)
        self._charge_output(tenant)
        tenant.running.pop(request.seniority, None)
        if not tenant.running:
            self._running.pop(tenant.name, None)
        self._left(tenant.name)

    def ordered(self, now_s: float) -> Iterator[RequestView]:
        """Each request yielded counts against its tenant for those that follow, as if it were admitted."""
        for tenant in self._running.values():
            self._charge_output(tenant)
        tenants = iter(self._waiting)
        following = next(tenants, None)
        heap: list[tuple[float, str, Iterator[RequestView]]] = []
        while following or heap:
            if following and not (heap and heap[0] < following):
                counter, name = following
                requests = iter(self.busy[name].waiting.values())
                following = next(tenants, None)
            else:
                counter, name, requests = heapq.heappop(heap)
            if (request := next(requests, None)) is not None:
                yield request
                heapq.heappush(heap, (counter + self._prompt_cost(request, self.busy[name]), name, requests))

    def _prompt_cost(self, request: RequestView, tenant: Tenant) -> float:
        if request.has_run:  # and has been paid for then
            return 0.0
        return (request.num_tokens - request.best_matched_tokens) / tenant.weight

    def _charge_output(self, tenant: Tenant) -> None:
        num_tokens = 0
        for seniority, (request, charged) in tenant.running.items():
            now = request.num_output_tokens
            if now != charged:
                num_tokens += now - charged
                tenant.running[seniority] = (request, now)
        if num_tokens:
            self._charge(tenant, self._output_weight * num_tokens / tenant.weight)

    def _charge(self, tenant: Tenant, cost: float) -> None:
        if tenant.waiting:
            self._waiting.remove((tenant.counter, tenant.name))
            self._waiting.add((tenant.counter + cost, tenant.name))
        tenant.counter += cost
