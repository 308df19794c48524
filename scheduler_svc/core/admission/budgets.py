"""Budgets that are not a policy's: tenants' tokens, adapters in a batch; and when a refused client may come back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.types import SchedulerConfig
from scheduler_svc.core.workers.decision import Admitted
from scheduler_svc.core.workers.state import WorkerState

# What a client is told at the least and at the most to wait, in seconds.
RETRY_AFTER_S = (0.1, 600.0)
# Over how many seconds those who are refused are told to come back, one behind the other. Not all of them will, and the
# place of one who does not is free for somebody else: who is told more than this waits in vain.
MAX_SPREAD_S = 30.0
# Share of a new measurement in the average.
RATE_SMOOTHING = 0.3
# Tenants whose rates are kept: those that were there last.
MAX_RATES = 1024


@dataclass(slots=True)
class Budgets:
    """What is bound or running, by tenant."""

    config: SchedulerConfig
    tenant_tokens: Counter[str] = field(default_factory=Counter)  # that they may grow to
    _taken_tokens: Counter[str | None] = field(default_factory=Counter)  # out of the queue, by tenant; None: in all
    _tokens_per_s: dict[str | None, float] = field(default_factory=dict)
    _measured_s: float | None = None
    # Whose tokens waited all the time since then, as far as one looked.
    _waited: set[str | None] = field(default_factory=set)
    # When there is room for all who were refused up to now, by tenant; None: who was refused for the queue's sake.
    _room_s: dict[str | None, float] = field(default_factory=dict)

    def bind(self, request: Request) -> None:
        tenant, taken = request.tenant, self._taken_tokens
        self.tenant_tokens[tenant] = self.tenant_tokens.get(tenant, 0) + request.max_total_tokens
        if request.started_s is None:  # else it is not the queue that shrinks
            num_tokens = request.num_tokens
            taken[tenant] = taken.get(tenant, 0) + num_tokens
            taken[None] = taken.get(None, 0) + num_tokens

    def unbind(self, request: Request) -> None:
        if left := self.tenant_tokens[request.tenant] - request.max_total_tokens:
            self.tenant_tokens[request.tenant] = left
        else:
            self.tenant_tokens.pop(request.tenant)

    def free_tokens(self, tenant: str) -> int:
        """What the tenant may still have running, if that has a limit; less than nothing if it has more."""
        return self.config.tenant_max_running_tokens - self.tenant_tokens[tenant]

    @property
    def limits_tenants(self) -> bool:
        """Whether they may have only so much running."""
        return self.config.tenant_max_running_tokens > 0

    def waits_for_tenant(self, request: Request) -> bool:
        """Whether others of its tenant have to end before it may run. A tenant whose one request is larger than its
        budget still gets it served, alone."""
        running = self.tenant_tokens[request.tenant]
        return running > 0 and 0 < self.config.tenant_max_running_tokens < running + request.max_total_tokens

    def exceeded(self, worker: WorkerState, request: Request, admitted: Admitted) -> str | None:
        """Which budget the request does not fit in on the worker, beside what is bound and `admitted` there; "name:
        numbers"."""
        if (limit := self.config.tenant_max_running_tokens) > 0:
            running = self.tenant_tokens[request.tenant] + admitted.tenant_tokens[request.tenant]
            if running and running + request.max_total_tokens > limit:
                return f"tenant: {running} tokens of tenant {request.tenant!r} run, its limit is {limit}"
        if request.lora:
            limit = worker.registration.max_loras
            loras = worker.loras.keys() | admitted.loras
            if request.lora not in loras and len(loras) >= limit:
                return f"lora: {len(loras)} adapters are in the batch, worker {worker.id} serves {limit} at once"
        return None

    def measure(self, now_s: float, waiting: Collection[str] = ()) -> None:
        """To be called a few times a second, with the tenants of whom something waits.

        The rate of one who always had something waiting is averaged, seconds in which nothing left the queue included.
        Of others it is known only that it is no lower than what they took.
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
        """When so many tokens will have left the queue, at the rate at which they left it lately: the tenant's own, or
        those of all. A second, if nothing is known.

        Others were refused before and will come back, too: the request's own `num_tokens` come behind theirs, else all
        would come at the same moment, and all but one in vain.
        """
        rate = self._tokens_per_s.get(tenant, 0.0)
        low, high = RETRY_AFTER_S
        if not rate:
            return 1.0
        first_s = now_s + excess_tokens / rate
        room_s = max(first_s, min(self._room_s.get(tenant, 0.0) + num_tokens / rate, first_s + MAX_SPREAD_S))
        self._room_s[tenant] = room_s
        return min(max(room_s - now_s, low), high)
