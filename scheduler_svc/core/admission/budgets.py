"""Budgets outside the policies: tokens of a tenant, adapters in a batch; and the time after which a refused client
should retry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.types import SchedulerConfig
from scheduler_svc.core.workers.decision import Admitted
from scheduler_svc.core.workers.state import WorkerState

# Shortest and longest wait that a client is told, in seconds.
RETRY_AFTER_S = (0.1, 600.0)
# Refused requests are told to retry one after the other, spread over at most this many seconds. Not all of them retry,
# and then another request uses their room: a longer spread makes clients wait for nothing.
MAX_SPREAD_S = 30.0
# Share of a new measurement in the average.
RATE_SMOOTHING = 0.3
# Tenants with a stored rate: those that were active last.
MAX_RATES = 1024


@dataclass(slots=True)
class Budgets:
    """Tokens of bound and running requests, by tenant."""

    config: SchedulerConfig
    tenant_tokens: Counter[str] = field(default_factory=Counter)  # tokens that the requests may grow to
    _taken_tokens: Counter[str | None] = field(default_factory=Counter)  # taken from the queue, by tenant; None: in all
    _tokens_per_s: dict[str | None, float] = field(default_factory=dict)
    _measured_s: float | None = None
    # Tenants that had waiting tokens at every measurement since then. None: any tenant.
    _waited: set[str | None] = field(default_factory=set)
    # When there is room for all requests that were refused so far, by tenant. None: refused because of the queue's
    # limits.
    _room_s: dict[str | None, float] = field(default_factory=dict)

    def bind(self, request: Request) -> None:
        tenant, taken = request.tenant, self._taken_tokens
        self.tenant_tokens[tenant] = self.tenant_tokens.get(tenant, 0) + request.max_total_tokens
        if request.history.started_s is None:  # a request that ran before does not shrink the queue
            num_tokens = request.num_tokens
            taken[tenant] = taken.get(tenant, 0) + num_tokens
            taken[None] = taken.get(None, 0) + num_tokens

    def unbind(self, request: Request) -> None:
        if left := self.tenant_tokens[request.tenant] - request.max_total_tokens:
            self.tenant_tokens[request.tenant] = left
        else:
            self.tenant_tokens.pop(request.tenant)

    def free_tokens(self, tenant: str) -> int:
        """Tokens that the tenant may still have running, if there is a limit. Negative if it has more than the
        limit."""
        return self.config.tenant_max_running_tokens - self.tenant_tokens[tenant]

    @property
    def limits_tenants(self) -> bool:
        """Whether tenants have a limit of running tokens."""
        return self.config.tenant_max_running_tokens > 0

    def waits_for_tenant(self, request: Request) -> bool:
        """Whether other requests of its tenant have to end before it may run. A request that is larger than its
        tenant's budget still runs, alone."""
        running = self.tenant_tokens[request.tenant]
        return running > 0 and 0 < self.config.tenant_max_running_tokens < running + request.max_total_tokens

    def exceeded(self, worker: WorkerState, request: Request, admitted: Admitted) -> str | None:
        """The budget that the request does not fit, on top of what is bound and `admitted` on the worker, as "name:
        numbers". None if it fits."""
        if (limit := self.config.tenant_max_running_tokens) > 0:
            running = self.tenant_tokens[request.tenant] + admitted.tenant_tokens[request.tenant]
            if running and running + request.max_total_tokens > limit:
                return f"tenant: {running} tokens of tenant {request.tenant!r} run, its limit is {limit}"
        if request.lora:
            limit = worker.adapters.limit
            loras = worker.adapters.num_bound.keys() | admitted.loras
            if request.lora not in loras and len(loras) >= limit:
                return f"lora: {len(loras)} adapters are in the batch, worker {worker.id} serves {limit} at once"
        return None

    def measure(self, now_s: float, waiting: Collection[str] = ()) -> None:
        """Measure the rates. Call it a few times a second, with the tenants that have waiting requests.

        The rate of a tenant that always had waiting requests is averaged, with seconds in which nothing left the queue.
        For another tenant, the rate is only known to be at least what the tenant took.
        """
        names: set[str | None] = {*waiting, *([None] if waiting else [])}
        if self._measured_s is None:
            self._measured_s, self._waited = now_s, names
            self._taken_tokens.clear()
        elapsed_s = now_s - self._measured_s
        self._waited &= names
        if elapsed_s < 1.0:
            return
        taken = self._taken_tokens
        for name in [*taken, *(name for name in self._tokens_per_s if name in self._waited and name not in taken)]:
            rate = taken[name] / elapsed_s
            before = self._tokens_per_s.pop(name, rate)
            change = rate - before if name in self._waited else max(rate - before, 0.0)
            self._tokens_per_s[name] = before + RATE_SMOOTHING * change
        while len(self._tokens_per_s) > MAX_RATES:
            del self._tokens_per_s[next(iter(self._tokens_per_s))]
        self._room_s = {tenant: room_s for tenant, room_s in self._room_s.items() if room_s > now_s}
        self._measured_s, self._waited = now_s, names
        self._taken_tokens.clear()

    def retry_after_s(self, excess_tokens: int, num_tokens: int, now_s: float, tenant: str | None = None) -> float:
        """Seconds until this many tokens will have left the queue, at the recent rate: the tenant's own rate, or that
        of all tenants. 1 s if no rate is known.

        Other requests were refused before and will retry too. So the request's own `num_tokens` count after theirs:
        otherwise all would retry at the same moment, and all but one for nothing.
        """
        rate = self._tokens_per_s.get(tenant, 0.0)
        low, high = RETRY_AFTER_S
        if not rate:
            return 1.0
        first_s = now_s + excess_tokens / rate
        room_s = max(first_s, min(self._room_s.get(tenant, 0.0) + num_tokens / rate, first_s + MAX_SPREAD_S))
        self._room_s[tenant] = room_s
        return min(max(room_s - now_s, low), high)
