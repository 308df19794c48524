"""The gateway's Prometheus series.

Counting happens on the token path, so a sample is a list increment; prometheus_client's objects are made at scrape
time only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0)


class FastHistogram:
    """Bucket counts in a list. `bounds` are the inclusive upper edges, in seconds."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float] = _LATENCY_S) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, name: str, documentation: str) -> HistogramMetricFamily:
        """The state as a metric to scrape."""
        buckets, total = [], 0
        for edge, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            buckets.append((edge, float(total)))
        return HistogramMetricFamily(name, documentation, buckets=buckets, sum_value=self._sum)


class GatewayMetrics(Collector):
    """All series of one gateway. The plain attributes are counted by whoever does the thing."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.live_requests = 0
        self.scheduler_ready = False
        # Of requests with idempotency keys.
        self.waiting_requests = self.kept_answers = self.taken_up = 0
        self.gone_requests = 0
        self.time_to_first_token_s = FastHistogram()
        self.inter_token_latency_s = FastHistogram()
        self.e2e_latency_s = FastHistogram()
        self.event_loop_lag_s = FastHistogram()
        # Its own: a process may run several gateways (tests do).
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def tokens(self, num_tokens: int, waited_s: float, *, first: bool) -> None:
        """Output tokens came together, so long after the request (`first`) or after the tokens before."""
        self.generation_tokens += num_tokens
        if not first:
            self.inter_token_latency_s.observe(waited_s / num_tokens, num_tokens)
            return
        self.time_to_first_token_s.observe(waited_s)
        if num_tokens > 1:
            self.inter_token_latency_s.observe(0.0, num_tokens - 1)

    def finished(self, endpoint: str, reason: str, latency_s: float) -> None:
        """A choice ended: stop, length, abort (client gone) or error."""
        self.requests[endpoint, reason] += 1
        self.e2e_latency_s.observe(latency_s)

    def refused(self, endpoint: str) -> None:
        """A request was answered with an error before it reached the scheduler."""
        self.requests[endpoint, "rejected"] += 1

    def collect(self) -> Iterable[Metric]:
        """For prometheus_client."""
        prefix = "paceline_gateway_"
        requests = CounterMetricFamily(
            prefix + "requests", "Requests that ended, by how.", labels=["endpoint", "finish_reason"]
        )
        for labels, count in sorted(self.requests.items()):
            requests.add_metric(labels, count)
        yield requests
        yield CounterMetricFamily(prefix + "prompt_tokens", "Prompt tokens taken in.", value=self.prompt_tokens)
        yield CounterMetricFamily(prefix + "generation_tokens", "Output tokens received.", value=self.generation_tokens)
        yield GaugeMetricFamily(prefix + "live_requests", "Requests being served.", value=self.live_requests)
        yield GaugeMetricFamily(
            prefix + "waiting_requests",
            "Requests with an idempotency key that run while their client is away.",
            value=self.waiting_requests,
        )
        yield GaugeMetricFamily(
            prefix + "kept_answers", "Finished answers kept for their idempotency keys.", value=self.kept_answers
        )
        yield CounterMetricFamily(
            prefix + "taken_up_requests",
            "Connections that got a request which ran already, by its idempotency key.",
            value=self.taken_up,
        )
        yield CounterMetricFamily(
            prefix + "gone_requests",
            "Requests that were dropped when it was their turn, as their clients had gone.",
            value=self.gone_requests,
        )
        yield GaugeMetricFamily(
            prefix + "scheduler_ready", "1 while the scheduler takes work.", value=float(self.scheduler_ready)
        )
        yield self.time_to_first_token_s.family(
            prefix + "time_to_first_token_seconds", "From a request's arrival to its first token."
        )
        yield self.inter_token_latency_s.family(
            prefix + "inter_token_latency_seconds", "Between two tokens of a request as they arrive from the scheduler."
        )
        yield self.event_loop_lag_s.family(
            prefix + "event_loop_lag_seconds", "How much later than it should a timer came, fifty times a second."
        )
        yield self.e2e_latency_s.family(prefix + "e2e_request_latency_seconds", "From a request's arrival to its end.")

    def exposition(self) -> bytes:
        """The text format of these series and of the process's (gRPC, memory, CPU)."""
        return bytes(generate_latest(REGISTRY)) + bytes(generate_latest(self.registry))
