"""The scheduler's Prometheus series, read from the core at each scrape, so that a step costs nothing for them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler_svc.core.types import STEP_TOKENS, StepTokens
from scheduler_svc.links import SchedulerServer

PREFIX = "paceline_scheduler_"


class SchedulerMetrics(Collector):
    """The collector of the series paceline_scheduler_*."""

    def __init__(self, server: SchedulerServer) -> None:
        self._server = server
        REGISTRY.register(self)

    def close(self) -> None:
        REGISTRY.unregister(self)

    def collect(self) -> Iterator[Metric]:
        core, election = self._server.core, self._server.election
        counters, workers = core.counters, list(core.workers.values())
        gauges = (
            ("is_master", "1: leader, 0: standby", election is None or election.epoch > 0),
            ("epoch", "This leader's epoch, higher than all earlier ones; 0 on a standby", core.epoch),
            ("num_workers", "Workers attached", len(workers)),
            ("num_draining_workers", "Attached workers that take no requests", sum(w.draining for w in workers)),
        )
        yield from _families(GaugeMetricFamily, gauges, {})
        totals = (
            ("step_failures", "Failed steps reported, and workers lost with steps in flight", counters.failures),
            ("retried_rows", "Rows of failed steps that were retried", counters.retried),
            ("quarantined_requests", "Requests that were failed because they make steps fail", counters.poisoned),
            ("restored_requests", "Requests that survived a cache loss", counters.restored),
            ("refused_claims", "Restore entries that a new cache refused", counters.refused_restores),
            ("steps", "Plans sent to workers", counters.steps),
            ("policy_errors", "Errors of policies", counters.policy_errors),
            ("core_seconds", "Time spent in the scheduler's core", self._server.core_seconds),
        )
        yield from _families(CounterMetricFamily, totals, {})
        model = {"model_name": self._server.model_name}
        total = sum(w.num_blocks for w in workers)
        available = sum(w.available_blocks for w in workers)
        load = core.load(time.monotonic())
        gauges_of_model = (
            ("num_requests_waiting", "Requests in the queue, without offline ones", len(core.queue.online)),
            ("num_tokens_waiting", "Known tokens of waiting online requests", core.queue.online.num_tokens),
            (
                "work_waiting_seconds",
                "Until the queue is empty; with no rate yet, how long the oldest waited",
                load.waiting_s,
            ),
            ("num_requests_running", "Requests that hold a slot, without offline ones", load.num_running),
            ("num_offline_requests_waiting", "Offline requests in their queue", len(core.queue.offline)),
            ("num_offline_tokens_waiting", "Known tokens of waiting offline requests", core.queue.offline.num_tokens),
            (
                "num_offline_requests_running",
                "Offline requests that hold a slot",
                sum(len(w.batch.offline) for w in workers),
            ),
            ("kv_cache_usage_ratio", "KV blocks in use, of all", (total - available) / total if total else 0.0),
        )
        yield from _families(GaugeMetricFamily, gauges_of_model, model)
        labels = [*model, "finish_reason"]
        finished = CounterMetricFamily(PREFIX + "requests_finished", "Requests that ended", labels=labels)
        for reason, count in list(counters.finished.items()):
            finished.add_metric([*model.values(), reason], count)
        yield finished
        totals_of_model = (
            ("requests_accepted", "Requests that entered the queue", counters.accepted),
            ("requests_rejected", "Requests refused at submission", counters.rejected),
            ("generated_tokens", "Tokens delivered to sessions", counters.tokens),
            ("preemptions", "Requests that were preempted", counters.preempted),
            ("swapped_out", "Preempted requests that moved to host memory", counters.swapped_out),
            ("swapped_in", "Requests that came back from host memory", counters.swapped_in),
            ("requeued_requests", "Requests that lost their worker, or their blocks", counters.requeued),
            ("spec_decode_num_drafts", "Rows with draft tokens", counters.num_drafts),
            ("spec_decode_num_draft_tokens", "Draft tokens", counters.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Accepted draft tokens", counters.num_accepted_tokens),
        )
        yield from _families(CounterMetricFamily, totals_of_model, model)
        yield _step_tokens(counters.step_tokens, model)


def _step_tokens(steps: StepTokens, labels: dict[str, str]) -> Metric:
    family = HistogramMetricFamily(
        PREFIX + "step_tokens",
        "Tokens of a step: prompt tokens computed, tokens sampled, draft tokens",
        labels=list(labels),
    )
    edges = [*map(str, map(float, STEP_TOKENS)), "+Inf"]
    family.add_metric(list(labels.values()), list(zip(edges, accumulate(steps.counts), strict=True)), steps.total)
    return family


def _families(
    family: type[GaugeMetricFamily | CounterMetricFamily],
    rows: Iterable[tuple[str, str, float]],
    labels: dict[str, str],
) -> Iterator[Metric]:
    for name, documentation, value in rows:
        metric = family(PREFIX + name, documentation, labels=list(labels))
        metric.add_metric(list(labels.values()), value)
        yield metric
