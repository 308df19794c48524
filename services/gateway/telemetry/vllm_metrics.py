"""The series that dashboards and routers made for vLLM read, under vLLM's names (vLLM 0.32, `v1/metrics/loggers.py`).

The gateway with all workers is one engine, "0". Series of the scheduler are those of its last heartbeat. Without a
scheduler they are absent: an unknown load is not 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.v1.inference_pb2 import SchedulerLoad, StepTokens
from services.gateway.errors import QueueLimit
from services.gateway.telemetry.metrics import GatewayMetrics

PREFIX = "vllm:"
_ENGINE = "0"
_FINISH_REASONS = ("stop", "length", "abort", "error")
_REJECTIONS: dict[QueueLimit, str] = {"requests": "max_num_queued_reqs", "tokens": "max_num_queued_tokens"}


class VllmMetrics(Collector):
    """Second names for series of the gateway and of the scheduler. Counts nothing itself."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        model_name: str,
        load: Callable[[], SchedulerLoad | None],
        max_model_len: Callable[[], int],
    ) -> None:
        """`load`: the scheduler's, None while it is unknown. `max_model_len`: tokens of the longest request."""
        self._metrics, self._load, self._max_model_len = metrics, load, max_model_len
        self._labels = {"model_name": model_name, "engine": _ENGINE}

    def collect(self) -> Iterable[Metric]:
        """All series, for prometheus_client."""
        if (load := self._load()) is not None:
            yield from _of_scheduler(load, self._labels)
            if load.num_blocks:  # otherwise no worker is attached
                yield _cache_config(load, self._max_model_len())
            if load.HasField("step_tokens"):
                yield _iteration_tokens(load.step_tokens, self._labels)
        yield self._request_success()
        yield self._admission_rejections()
        yield from self._metrics.token_counters(PREFIX, self._labels)
        yield from self._metrics.histograms(PREFIX, self._labels)

    def _request_success(self) -> Metric:
        """vLLM counts aborted and failed requests, too, despite the name."""
        counts = dict.fromkeys(_FINISH_REASONS, 0)
        for (_, reason), count in self._metrics.requests.items():
            if reason in counts:  # not: rejected
                counts[reason] += count
        names = [*self._labels, "finished_reason"]
        family = CounterMetricFamily(PREFIX + "request_success", "Ended sequences by finish reason.", labels=names)
        for reason, count in counts.items():
            family.add_metric([*self._labels.values(), reason], count)
        return family

    def _admission_rejections(self) -> Metric:
        """vLLM's series has no label `engine`."""
        family = CounterMetricFamily(
            PREFIX + "admission_rejections",
            "Requests refused by a limit of the queue.",
            labels=["model_name", "reason"],
        )
        for limit, reason in _REJECTIONS.items():
            family.add_metric([self._labels["model_name"], reason], self._metrics.queue_refusals[limit])
        return family


def _cache_config(load: SchedulerLoad, max_model_len: int) -> Metric:
    labels = {
        "block_size": load.block_size,
        "num_gpu_blocks": load.num_blocks,
        "kv_cache_size_tokens": load.num_blocks * load.block_size,
        "kv_cache_max_concurrency": load.num_blocks / -(-max_model_len // load.block_size),
        "engine": _ENGINE,
    }
    info = GaugeMetricFamily(
        PREFIX + "cache_config_info",
        "KV blocks of all workers, tokens of a block and of all blocks, and how many of the longest requests fit.",
        labels=list(labels),
    )
    info.add_metric([str(value) for value in labels.values()], 1)
    return info


def _iteration_tokens(steps: StepTokens, labels: Mapping[str, str]) -> Metric:
    family = HistogramMetricFamily(
        PREFIX + "iteration_tokens_total",
        "Tokens of a step: prompt tokens computed and tokens sampled.",
        labels=list(labels),
    )
    edges = [*(str(float(bound)) for bound in steps.bounds), "+Inf"]
    family.add_metric(list(labels.values()), list(zip(edges, accumulate(steps.counts), strict=True)), steps.total)
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
    for name, documentation, value in (
        ("num_preemptions", "Preempted requests.", load.num_preemptions),
        ("prefix_cache_queries", "Tokens looked up in the prefix cache.", load.prefix_query_tokens),
        ("prefix_cache_hits", "Tokens found in the prefix cache.", load.prefix_hit_tokens),
        ("spec_decode_num_drafts", "Rows with draft tokens.", load.num_drafts),
        ("spec_decode_num_draft_tokens", "Draft tokens.", load.num_draft_tokens),
        ("spec_decode_num_accepted_tokens", "Accepted draft tokens.", load.num_accepted_tokens),
    ):
        counter = CounterMetricFamily(PREFIX + name, documentation, labels=names)
        counter.add_metric(values, value)
        yield counter
