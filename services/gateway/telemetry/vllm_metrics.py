"""The series that dashboards and routers made for vLLM read, under vLLM's names (vLLM 0.32, `v1/metrics/loggers.py`).

The gateway with all workers is one engine, "0". Series of the scheduler are those of its last heartbeat. Without a
scheduler they are absent: an unknown load is not 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.v1.inference_pb2 import SchedulerLoad
from services.gateway.telemetry.metrics import GatewayMetrics

PREFIX = "vllm:"
_ENGINE = "0"
_FINISH_REASONS = ("stop", "length", "abort", "error")


class VllmMetrics(Collector):
    """Second names for series of the gateway and of the scheduler. Counts nothing itself."""

    def __init__(self, metrics: GatewayMetrics, model_name: str, load: Callable[[], SchedulerLoad | None]) -> None:
        """`load`: the scheduler's, None while it is unknown."""
        self._metrics, self._load = metrics, load
        self._labels = {"model_name": model_name, "engine": _ENGINE}

    def collect(self) -> Iterable[Metric]:
        """All series, for prometheus_client."""
        if (load := self._load()) is not None:
            yield from _of_scheduler(load, self._labels)
        yield self._request_success()
        yield from self._metrics.token_counters(PREFIX, self._labels)
        yield from self._metrics.histograms(PREFIX, self._labels)

    def _request_success(self) -> Metric:
        """vLLM counts aborted and failed requests, too, despite the name."""
        counts = dict.fromkeys(_FINISH_REASONS, 0)
        for (_, reason), count in self._metrics.requests.items():
            if reason in counts:  # not: rejected
                counts[reason] += count
        names = [*self._labels, "finished_reason"]
        family = CounterMetricFamily(PREFIX + "request_success", "Sequences that ended, by how.", labels=names)
        for reason, count in counts.items():
            family.add_metric([*self._labels.values(), reason], count)
        return family


def _of_scheduler(load: SchedulerLoad, labels: Mapping[str, str]) -> Iterable[Metric]:
    names, values = list(labels), list(labels.values())
    usage = load.num_used_blocks / load.num_blocks if load.num_blocks else 0.0
    for name, documentation, value in (
        ("num_requests_running", "Requests that hold a slot, on all workers.", load.num_running),
        ("num_requests_waiting", "Requests in the scheduler's queue.", load.num_waiting),
        ("kv_cache_usage_perc", "KV blocks in use, of all; 1 means 100 percent.", usage),
    ):
        gauge = GaugeMetricFamily(PREFIX + name, documentation, labels=names)
        gauge.add_metric(values, value)
        yield gauge
    reasons = GaugeMetricFamily(
        PREFIX + "num_requests_waiting_by_reason", "Requests in the scheduler's queue.", labels=[*names, "reason"]
    )
    for reason, count in (("capacity", load.num_waiting), ("deferred", 0)):  # no request is deferred in our queue
        reasons.add_metric([*values, reason], count)
    yield reasons
    if load.num_blocks:  # otherwise no worker is attached
        info = GaugeMetricFamily(
            PREFIX + "cache_config_info",
            "KV blocks of all workers, and tokens of a block.",
            labels=["block_size", "num_gpu_blocks", "engine"],
        )
        info.add_metric([str(load.block_size), str(load.num_blocks), labels["engine"]], 1)
        yield info
    for name, documentation, value in (
        ("num_preemptions", "Preempted requests.", load.num_preemptions),
        ("prefix_cache_queries", "Tokens looked up in the prefix cache.", load.prefix_query_tokens),
        ("prefix_cache_hits", "Tokens found in the prefix cache.", load.prefix_hit_tokens),
    ):
        counter = CounterMetricFamily(PREFIX + name, documentation, labels=names)
        counter.add_metric(values, value)
        yield counter
