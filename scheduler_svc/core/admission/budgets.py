"""Budgets outside the policies (tokens of a tenant, adapters in a batch), and when a refused client should retry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.types import SchedulerConfig
from scheduler_svc.core.workers.state import WorkerState
from scheduler_svc.core.workers.steps import Admitted
from services.runtime.retry_after import RetryAfter

MAX_RATES = 1024  # tenants with a stored rate: those that were active last


@dataclass(slots=True)
class Budgets:
    """Tokens of bound and running requests of one class, by tenant."""

    config: SchedulerConfig
    tenant_tokens: Counter[str] = field(default_factory=Counter)  # tokens that the requests may grow to
    # Retry-after estimates, in tokens: by tenant, the last active one at the end. Key None: all tenants together.
    _estimates: dict[str | None, RetryAfter] = field(default_factory=dict)
    _waited: set[str | None] = field(default_factory=set)  # had waiting tokens at the last measurement
    _touched: set[str | None] = field(default_factory=set)  # since the last measurement

    def bind(self, request: Request) -> None:
        self.tenant_tokens[request.metadata.tenant] += request.max_total_tokens
        if request.history.started_s is None:  # a preempted request was counted when it first left the queue
            for name in (request.metadata.tenant, None):
                self._estimate(name, request.arrival_s).finished(amount=request.num_tokens)

    def unbind(self, request: Request) -> None:
        self.tenant_tokens[request.metadata.tenant] -= request.max_total_tokens
        if not self.tenant_tokens[request.metadata.tenant]:
            del self.tenant_tokens[request.metadata.tenant]

    def free_tokens(self, tenant: str) -> int:
        """Tokens that the tenant may still have running, if there is a limit. Negative above the limit."""
        return self.config.tenant_max_running_tokens - self.tenant_tokens[tenant]

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens that left the queue per second while requests waited, over all tenants. None: not measured yet."""
        estimate = self._estimates.get(None)
        return estimate.per_s if estimate is not None else None

    @property
    def limits_tenants(self) -> bool:
        """Whether tenants have a limit of running tokens."""
        return self.config.tenant_max_running_tokens > 0

    def waits_for_tenant(self, request: Request) -> bool:
        """Whether the request waits for others of its tenant to end. A request larger than the budget runs alone."""
        running = self.tenant_tokens[request.metadata.tenant]
        return running > 0 and 0 < self.config.tenant_max_running_tokens < running + request.max_total_tokens

    def exceeded(self, worker: WorkerState, request: Request, admitted: Admitted) -> str | None:
        """The budget ("name: numbers") that the request exceeds on top of bound and `admitted` requests, or None."""
        if (limit := self.config.tenant_max_running_tokens) > 0:
            running = self.tenant_tokens[request.metadata.tenant] + admitted.tenant_tokens[request.metadata.tenant]
            if running and running + request.max_total_tokens > limit:
                return f"tenant: {running} tokens of tenant {request.metadata.tenant!r} run, its limit is {limit}"
        if request.metadata.lora:
            limit = worker.adapters.limit
            loras = worker.adapters_beside(request) | admitted.loras
            if request.metadata.lora not in loras and len(loras) >= limit:
                return f"lora: {len(loras)} adapters are in the batch, worker {worker.id} serves {limit} at once"
        return None

    def measure(self, now_s: float, waiting: Collection[str] = ()) -> None:
        """Measure the rates. Call it a few times a second, with the tenants that have waiting requests."""
        names: set[str | None] = {*waiting, None} if waiting else set()
        for name in names | self._waited | self._touched:
            estimate = self._estimates.get(name) or self._estimate(name, now_s)
            estimate.measure(now_s, waits=name in names)
        while len(self._estimates) > MAX_RATES:
            del self._estimates[next(iter(self._estimates))]
        self._waited = names
        self._touched.clear()

    def accept(self, request: Request) -> None:
        """The queue takes the request."""
        for name in (request.metadata.tenant, None):
            self._estimate(name, request.arrival_s).arrived(request.num_tokens)

    def retry_after_s(self, excess_tokens: int, num_tokens: int, now_s: float, tenant: str | None = None) -> float:
        """Seconds until `excess_tokens` tokens will have left the queue, at the recent rate: the tenant's own rate, or
        that of all tenants. Requests that were refused before come first."""
        return self._estimate(tenant, now_s).refuse(now_s, amount=num_tokens, excess=excess_tokens)

    def _estimate(self, name: str | None, now_s: float) -> RetryAfter:
        """The tenant's estimate. Moves it to the end of `_estimates`, where the last active tenants are."""
        self._touched.add(name)
        estimate = self._estimates.pop(name, None) or RetryAfter(assigned_share=1.0, began_s=now_s)
        self._estimates[name] = estimate
        return estimate


@dataclass(frozen=True, slots=True)
class ClassBudgets:
    """The budgets of online and of offline requests: a limit of the configuration holds for each class."""

    online: Budgets
    offline: Budgets

    def of(self, request: Request) -> Budgets:
        """The budgets of the request's class."""
        return self.offline if request.metadata.offline else self.online

    def exceeded(self, worker: WorkerState, request: Request, admitted: Admitted) -> str | None:
        """As Budgets.exceeded, for the request's class."""
        return self.of(request).exceeded(worker, request, admitted)
