"""The scheduler's Prometheus series, read off the core when they are scraped: a step pays nothing for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from scheduler_svc.server import SchedulerServer


class SchedulerMetrics(Collector):
    def __init__(self, server: SchedulerServer) -> None:
        self._server = server
        REGISTRY.register(self)

    def close(self) -> None:
        REGISTRY.unregister(self)

    def collect(self) -> Iterator[Metric]:
        core = self._server.core
        counters, workers = core.counters, list(core.workers.values())
        election = self._server.election
        yield gauge("is_master", "Whether it schedules (1), or stands by (0)", election is None or election.epoch > 0)
        yield gauge("epoch", "Of this scheduler, higher than those before it; 0 while it stands by", core.epoch)
        yield gauge("num_workers", "Workers attached", len(workers))
        yield gauge("num_requests_waiting", "Requests in the queue", len(core.queue))
        yield gauge("num_tokens_waiting", "Known tokens of the requests in the queue", core.queue.num_tokens)
        yield gauge("num_requests_running", "Requests that hold a slot", sum(len(w.running) for w in workers))
        total = sum(w.num_blocks for w in workers)
        available = sum(w.available_blocks for w in workers)
        yield gauge("kv_cache_usage_ratio", "KV blocks in use, of all", (total - available) / total if total else 0.0)
        yield counter("requests_accepted", "Requests that entered the queue", counters.accepted)
        yield counter("requests_rejected", "Requests refused at intake", counters.rejected)
        finished = CounterMetricFamily(
            "paceline_scheduler_requests_finished", "Requests that ended", labels=["finish_reason"]
        )
        for reason, count in list(counters.finished.items()):
            finished.add_metric([reason], count)
        yield finished
        yield counter("generated_tokens", "Tokens delivered to sessions", counters.tokens)
        yield counter("preemptions", "Requests that gave their blocks back", counters.preempted)
        yield counter("swapped_out", "Preempted requests that moved to host memory", counters.swapped_out)
        yield counter("swapped_in", "Requests that came back from host memory", counters.swapped_in)
        yield counter("requeued_requests", "Requests that lost their worker, or their blocks", counters.requeued)
        yield counter("step_failures", "Steps that failed, or took their worker down", counters.failures)
        yield counter("retried_rows", "Rows of such steps that were retried", counters.retried)
        yield counter("quarantined_requests", "Requests failed because they make steps fail", counters.quarantined)
        yield counter("restored_requests", "Requests that went on when the cache was lost", counters.restored)
        yield counter("refused_claims", "Of these, those whose blocks a new cache refused", counters.refused_claims)
        yield counter("steps", "Plans sent to workers", counters.steps)
        yield counter("policy_errors", "Steps that fell back to the default policies", counters.policy_errors)
        yield counter("core_seconds", "Processor time spent in the scheduler's core", self._server.core_seconds)


def gauge(name: str, documentation: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"paceline_scheduler_{name}", documentation, value=value)


def counter(name: str, documentation: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"paceline_scheduler_{name}", documentation, value=value)
