"""Fair among tenants: the one that was served least goes next (virtual token counter, Sheng et al., OSDI 2024).

A tenant's counter grows by the prompt tokens it gets computed and, weighted, by the tokens it gets generated, over its
weight. A tenant that comes back from idleness is lifted to the lowest counter of those that are busy, so that it cannot
claim what it did not use meanwhile. Within a tenant, first come, first served.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from sortedcontainers import SortedDict

from scheduler_svc.core.policy import OrderPolicy
from scheduler_svc.core.view import RequestView
from scheduler_svc.policies.options import Amount, PositiveAmount


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
        self._tenants: dict[str, Tenant] = {}

    def _tenant(self, name: str) -> Tenant:
        if name not in self._tenants:
            self._tenants[name] = Tenant(self._weights.get(name, 1.0))
        return self._tenants[name]

    def add(self, request: RequestView) -> None:
        tenant = self._tenant(request.tenant)
        if tenant.is_idle:
            busy = [other.counter for other in self._tenants.values() if not other.is_idle]
            tenant.counter = max(tenant.counter, min(busy, default=tenant.counter))
        tenant.waiting[request.place, request.seniority] = request

    def remove(self, request: RequestView) -> None:
        del self._tenants[request.tenant].waiting[request.place, request.seniority]

    def started(self, request: RequestView) -> None:
        tenant = self._tenant(request.tenant)
        tenant.counter += self._prompt_cost(request, tenant)
        tenant.running[request.seniority] = (request, request.num_output_tokens)

    def stopped(self, request: RequestView) -> None:
        tenant = self._tenants[request.tenant]
        self._charge_output(tenant)
        tenant.running.pop(request.seniority, None)

    def ordered(self, now_s: float) -> Iterator[RequestView]:
        """Each request yielded counts against its tenant for those that follow, as if it were admitted."""
        heap: list[tuple[float, str, Iterator[RequestView]]] = []
        for name, tenant in self._tenants.items():
            self._charge_output(tenant)
            if tenant.waiting:
                heap.append((tenant.counter, name, iter(tenant.waiting.values())))
        heapq.heapify(heap)
        while heap:
            counter, name, requests = heapq.heappop(heap)
            if (request := next(requests, None)) is not None:
                yield request
                heapq.heappush(heap, (counter + self._prompt_cost(request, self._tenants[name]), name, requests))

    def _prompt_cost(self, request: RequestView, tenant: Tenant) -> float:
        return (request.num_tokens - request.best_matched_tokens) / tenant.weight

    def _charge_output(self, tenant: Tenant) -> None:
        for seniority, (request, charged) in tenant.running.items():
            now = request.num_output_tokens
            if now != charged:
                tenant.counter += self._output_weight * (now - charged) / tenant.weight
                tenant.running[seniority] = (request, now)
