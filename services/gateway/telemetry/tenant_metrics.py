"""Series per tenant. Clients choose the names of tenants, so only a limited number of tenants has own series."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from services.gateway.outcome import SequenceOutcome
from services.gateway.telemetry.histogram import FastHistogram

NO_TENANT, OTHERS = "default", "other"


class _Tenant:
    __slots__ = ("cached_tokens", "generation_tokens", "prompt_tokens", "queue_s", "requests", "ttft_s")

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.prompt_tokens = self.cached_tokens = self.generation_tokens = 0
        self.ttft_s, self.queue_s = FastHistogram(), FastHistogram()


class TenantMetrics:
    """Series of the tenants in `names`, and of the first `limit` other tenants with a finished request. All further
    tenants share the name "other". Requests without a tenant count for "default"."""

    def __init__(self, names: Iterable[str] = (), limit: int = 32) -> None:
        self._tenants = {name: _Tenant() for name in names if name != OTHERS}
        self._limit = len(self._tenants) + limit
        self._others = _Tenant()

    def finished(self, outcome: SequenceOutcome) -> None:
        """A sequence ended."""
        tenant = self._tenant(outcome.tenant or NO_TENANT)
        tenant.requests[outcome.finish_reason] += 1
        tenant.prompt_tokens += outcome.prompt_tokens
        tenant.cached_tokens += outcome.cached_tokens or 0
        tenant.generation_tokens += outcome.output_tokens
        if outcome.ttft_s is not None:
            tenant.ttft_s.observe(outcome.ttft_s)
        if outcome.timing is not None:
            tenant.queue_s.observe(outcome.timing.queue_s)

    def _tenant(self, name: str) -> _Tenant:
        found = self._tenants.get(name)
        if found is None:
            if name == OTHERS or len(self._tenants) >= self._limit:
                return self._others
            found = self._tenants[name] = _Tenant()
        return found

    def collect(self, prefix: str, labels: Mapping[str, str]) -> Iterable[Metric]:
        """For prometheus_client; `labels` come before the tenant's."""
        names, values = [*labels, "tenant"], list(labels.values())
        tenants = [*self._tenants.items(), (OTHERS, self._others)]
        requests = CounterMetricFamily(
            prefix + "tenant_requests", "A tenant's ended sequences by finish reason.", labels=[*names, "finish_reason"]
        )
        prompt = CounterMetricFamily(
            prefix + "tenant_prompt_tokens", "Prompt tokens of a tenant's finished sequences.", labels=names
        )
        cached = CounterMetricFamily(
            prefix + "tenant_prompt_tokens_cached", "Prompt tokens of a tenant with reused KV.", labels=names
        )
        generation = CounterMetricFamily(
            prefix + "tenant_generation_tokens", "Output tokens of a tenant's finished sequences.", labels=names
        )
        ttft = HistogramMetricFamily(
            prefix + "tenant_time_to_first_token_seconds",
            "From the arrival of a tenant's request to its first token.",
            labels=names,
        )
        queue = HistogramMetricFamily(
            prefix + "tenant_request_queue_time_seconds",
            "Time of a tenant's sequences in the scheduler's queue before they first ran.",
            labels=names,
        )
        for name, tenant in tenants:
            of_tenant = [*values, name]
            for reason, count in sorted(tenant.requests.items()):
                requests.add_metric([*of_tenant, reason], count)
            prompt.add_metric(of_tenant, tenant.prompt_tokens)
            cached.add_metric(of_tenant, tenant.cached_tokens)
            generation.add_metric(of_tenant, tenant.generation_tokens)
            tenant.ttft_s.add_to(ttft, of_tenant)
            tenant.queue_s.add_to(queue, of_tenant)
        return [requests, prompt, cached, generation, ttft, queue]
