"""Fair among tenants: the one that was served least goes next (virtual token counter, Sheng et al., OSDI 2024).

A tenant's counter grows by the prompt tokens it gets computed and, weighted, by the tokens it gets generated, over its
weight. A prompt is charged when its request first runs, and never again: what is computed anew after a preemption is
not the doing of the tenant that was pushed out. A tenant of which nothing waited is lifted, when something does, to the
lowest counter of those of which something waits, or if there are none to that of the last one that was: what it did not
ask for it cannot claim later, however much of it runs.

Within a tenant, first come, first served.

Tenants are named by clients, so there may be any number of them. Those that are idle cost nothing, and only the last
MAX_IDLE of them are remembered: one that is forgotten begins like one under a new name.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from sortedcontainers import SortedDict

from scheduler_svc.core.policy import OrderPolicy
from scheduler_svc.core.view import RequestView
from scheduler_svc.policies.options import Amount, PositiveAmount

MAX_IDLE = 1024


@dataclass(slots=True)
class Tenant:
    weight: float
    counter: float = 0.0
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
        self.idle: dict[str, float] = {}  # counters, of those that were busy last
        self._last_waited = ""  # the last one of which nothing waits any more

    def _busy(self, name: str) -> Tenant:
        if name not in self.busy:
            self.busy[name] = Tenant(self._weights.get(name, 1.0), self.idle.pop(name, 0.0))
        return self.busy[name]

    def _left(self, name: str) -> None:
        """Something of the tenant is gone: it may be idle now."""
        if self.busy[name].is_idle:
            self.idle[name] = self.busy.pop(name).counter
            if len(self.idle) > MAX_IDLE:
                del self.idle[next(iter(self.idle))]

    def add(self, request: RequestView) -> None:
        tenant = self._busy(request.tenant)
        if not (tenant.waiting or request.has_run):  # who is pushed out has not just come
            self._charge_output(tenant)
            tenant.counter = max(tenant.counter, self._lowest())
        tenant.waiting[request.place, request.seniority] = request

    def _lowest(self) -> float:
        """Where a tenant begins that comes now."""
        waiting = [tenant for tenant in self.busy.values() if tenant.waiting]
        if not waiting and (last := self.busy.get(self._last_waited)):
            waiting = [last]
        for tenant in waiting:
            self._charge_output(tenant)
        return min((tenant.counter for tenant in waiting), default=self.idle.get(self._last_waited, 0.0))

    def remove(self, request: RequestView) -> None:
        tenant = self.busy[request.tenant]
        del tenant.waiting[request.place, request.seniority]
        if not tenant.waiting:
            self._last_waited = request.tenant
        self._left(request.tenant)

    def started(self, request: RequestView) -> None:
        tenant = self._busy(request.tenant)
        tenant.counter += self._prompt_cost(request, tenant)
        tenant.running[request.seniority] = (request, request.num_output_tokens)

    def stopped(self, request: RequestView) -> None:
        tenant = self._busy(request.tenant)
        self._charge_output(tenant)
        tenant.running.pop(request.seniority, None)
        self._left(request.tenant)

    def ordered(self, now_s: float) -> Iterator[RequestView]:
        """Each request yielded counts against its tenant for those that follow, as if it were admitted."""
        heap: list[tuple[float, str, Iterator[RequestView]]] = []
        for name, tenant in self.busy.items():
            self._charge_output(tenant)
            if tenant.waiting:
                heap.append((tenant.counter, name, iter(tenant.waiting.values())))
        heapq.heapify(heap)
        while heap:
            counter, name, requests = heapq.heappop(heap)
            if (request := next(requests, None)) is not None:
                yield request
                heapq.heappush(heap, (counter + self._prompt_cost(request, self.busy[name]), name, requests))

    def _prompt_cost(self, request: RequestView, tenant: Tenant) -> float:
        if request.has_run:  # and has been paid for then
            return 0.0
        return (request.num_tokens - request.best_matched_tokens) / tenant.weight

    def _charge_output(self, tenant: Tenant) -> None:
        for seniority, (request, charged) in tenant.running.items():
            now = request.num_output_tokens
            if now != charged:
                tenant.counter += self._output_weight * (now - charged) / tenant.weight
                tenant.running[seniority] = (request, now)
