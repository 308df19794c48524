"""The gateway's Prometheus series.

Counting happens on the token path, so it only adds to plain integers and lists. prometheus_client's objects exist only
at scrape time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.gateway.errors import ApiError, QueueFull, QueueLimit
from services.gateway.outcome import SequenceOutcome
from services.gateway.telemetry.histogram import NUM_TOKENS, SMALL_NUMBERS, FastHistogram, histogram_family
from services.gateway.telemetry.tenant_metrics import TenantMetrics
from services.gateway.telemetry.trace_log import GatewayTraceLog

_PREFIX = "paceline_gateway_"


class GatewayMetrics(Collector):
    """All series of one gateway. Other modules increment the plain attributes."""

    def __init__(
        self, model_name: str = "", tenants: TenantMetrics | None = None, trace: GatewayTraceLog | None = None
    ) -> None:
        self._labels = {"model_name": model_name}
        self._tenants = tenants or TenantMetrics()
        self._trace = trace or GatewayTraceLog()
        self.requests: Counter[tuple[str, str]] = Counter()
        self.queue_refusals: dict[QueueLimit, int] = {"requests": 0, "tokens": 0}
        self.prompt_tokens = self.cached_tokens = 0
        self.generation_tokens = 0
        self.live_requests = 0
        self.scheduler_ready = False
        # For requests with idempotency keys.
        self.detached_requests = self.kept_answers = self.taken_up = 0
        self.gone_requests = 0
        self.unauthenticated = 0
        self.beyond_quota: Mapping[str, int] = {}  # refused requests by quota
        self.time_to_first_token_s = FastHistogram()
        self.inter_token_latency_s = FastHistogram()
        self.e2e_latency_s = FastHistogram()
        self.queue_s, self.prefill_s, self.decode_s = FastHistogram(), FastHistogram(), FastHistogram()
        self.inference_s, self.num_preemptions = FastHistogram(), FastHistogram(SMALL_NUMBERS)
        self.time_per_output_token_s = FastHistogram()
        self.prompt_length, self.generation_length = FastHistogram(NUM_TOKENS), FastHistogram(NUM_TOKENS)
        self.computed_length = FastHistogram(NUM_TOKENS)
        # One observation for all samples of a prompt.
        self.num_samples, self.max_tokens = FastHistogram(SMALL_NUMBERS), FastHistogram(NUM_TOKENS)
        self.longest_generation = FastHistogram(NUM_TOKENS)
        self.event_loop_lag_s = FastHistogram()
        # A registry per gateway, because tests run several gateways in one process.
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def tokens(self, num_tokens: int, waited_s: float, *, first: bool) -> None:
        """`num_tokens` output tokens of a sequence arrived together, `waited_s` after the request (`first`) or after
        the sequence's previous tokens."""
        self.generation_tokens += num_tokens
        if self._trace.recording:
            self._trace.tokens(num_tokens)
        if not first:
            self.inter_token_latency_s.observe(waited_s / num_tokens, num_tokens)
            return
        self.time_to_first_token_s.observe(waited_s)
        if num_tokens > 1:
            self.inter_token_latency_s.observe(0.0, num_tokens - 1)

    def finished(self, outcome: SequenceOutcome) -> None:
        """A sequence ended."""
        if self._trace.recording:
            self._trace.ended(outcome)
        self.requests[outcome.endpoint, outcome.finish_reason] += 1
        if outcome.queue_limit is not None:
            self.queue_refusals[outcome.queue_limit] += 1
        self.cached_tokens += outcome.cached_tokens or 0
        self.e2e_latency_s.observe(outcome.latency_s)
        self.prompt_length.observe(outcome.prompt_tokens)
        self.generation_length.observe(outcome.output_tokens)
        if outcome.cached_tokens is not None:
            self.computed_length.observe(outcome.prompt_tokens - outcome.cached_tokens)
        if outcome.tpot_s is not None:
            self.time_per_output_token_s.observe(outcome.tpot_s)
        if (timing := outcome.timing) is not None:
            self.queue_s.observe(timing.queue_s)
            self.prefill_s.observe(timing.prefill_s)
            self.decode_s.observe(timing.decode_s)
            self.inference_s.observe(timing.prefill_s + timing.decode_s)
            self.num_preemptions.observe(timing.num_preemptions)
        self._tenants.finished(outcome)

    def all_finished(self, num_samples: int, max_tokens: int, longest: int) -> None:
        """The last sample of a prompt ended. `longest`: output tokens of its longest sample."""
        self.num_samples.observe(num_samples)
        self.max_tokens.observe(max_tokens)
        self.longest_generation.observe(longest)

    def refused(self, endpoint: str, error: ApiError) -> None:
        """Count a request that got an error before it reached the scheduler."""
        self.requests[endpoint, "rejected"] += 1
        if isinstance(error, QueueFull):
            self.queue_refusals[error.limit] += 1

    def collect(self) -> Iterable[Metric]:
        """All series, for prometheus_client."""
        yield from self._requests()
        yield from self.histograms(_PREFIX, self._labels)
        yield from self._tenants.collect(_PREFIX, self._labels)
        yield from self._process()

    def _requests(self) -> Iterable[Metric]:
        labels, values = list(self._labels), list(self._labels.values())
        requests = CounterMetricFamily(
            _PREFIX + "requests", "Ended sequences by finish reason.", labels=[*labels, "endpoint", "finish_reason"]
        )
        for of_requests, count in sorted(self.requests.items()):
            requests.add_metric([*values, *of_requests], count)
        yield requests
        refusals = CounterMetricFamily(
            _PREFIX + "queue_refusals", "Requests refused by a limit of the queue.", labels=[*labels, "limit"]
        )
        for limit, count in self.queue_refusals.items():
            refusals.add_metric([*values, limit], count)
        yield refusals
        yield from self.token_counters(_PREFIX, self._labels)

    def token_counters(self, prefix: str, labels: Mapping[str, str]) -> Iterable[Metric]:
        """Series of tokens, under names with this prefix."""
        for name, documentation, value in (
            ("prompt_tokens", "Prompt tokens submitted.", self.prompt_tokens),
            ("prompt_tokens_cached", "Prompt tokens with reused KV.", self.cached_tokens),
            ("generation_tokens", "Output tokens received.", self.generation_tokens),
        ):
            family = CounterMetricFamily(prefix + name, documentation, labels=list(labels))
            family.add_metric(list(labels.values()), value)
            yield family

    def histograms(self, prefix: str, labels: Mapping[str, str]) -> Iterable[Metric]:
        """Series of requests' times and lengths, under names with this prefix. The names after it are vLLM's."""
        for name, documentation, histogram in (
            ("time_to_first_token_seconds", "From a request's arrival to its first token.", self.time_to_first_token_s),
            (
                "inter_token_latency_seconds",
                "Between two tokens of a sequence as they arrive from the scheduler.",
                self.inter_token_latency_s,
            ),
            (
                "request_time_per_output_token_seconds",
                "Between a sequence's first and last token, for each token after the first.",
                self.time_per_output_token_s,
            ),
            ("e2e_request_latency_seconds", "From a request's arrival to a sequence's end.", self.e2e_latency_s),
            ("request_queue_time_seconds", "In the scheduler's queue, until the sequence first ran.", self.queue_s),
            ("request_prefill_time_seconds", "From when a sequence first ran to its first token.", self.prefill_s),
            ("request_decode_time_seconds", "From a sequence's first token to its end.", self.decode_s),
            ("request_inference_time_seconds", "From when a sequence first ran to its end.", self.inference_s),
            ("request_num_preemptions", "Times that a sequence was preempted.", self.num_preemptions),
            ("request_prompt_tokens", "Prompt tokens of a sequence.", self.prompt_length),
            (
                "request_prefill_kv_computed_tokens",
                "Prompt tokens of a sequence without reused KV.",
                self.computed_length,
            ),
            ("request_generation_tokens", "Output tokens of a sequence.", self.generation_length),
            (
                "request_max_num_generation_tokens",
                "Output tokens of the longest sample of a prompt.",
                self.longest_generation,
            ),
            ("request_params_n", "Samples of a prompt.", self.num_samples),
            ("request_params_max_tokens", "The max_tokens of each sample of a prompt.", self.max_tokens),
        ):
            yield histogram_family(prefix + name, documentation, histogram, labels)

    def _process(self) -> Iterable[Metric]:
        """Series of the gateway itself, without a model label."""
        for name, documentation, value in (
            ("live_requests", "Sequences being served.", self.live_requests),
            (
                "detached_requests",
                "Requests with an idempotency key that run while their client is away.",
                self.detached_requests,
            ),
            ("kept_answers", "Finished answers kept for their idempotency keys.", self.kept_answers),
            ("scheduler_ready", "1 while the scheduler takes work.", int(self.scheduler_ready)),
        ):
            yield GaugeMetricFamily(_PREFIX + name, documentation, value=value)
        for name, documentation, value in (
            (
                "taken_up_requests",
                "Connections that got a live request or a kept answer by its idempotency key.",
                self.taken_up,
            ),
            (
                "gone_requests",
                "Requests that were dropped when it was their turn, as their clients had gone.",
                self.gone_requests,
            ),
            ("unauthenticated_requests", "Calls refused without a valid API key.", self.unauthenticated),
        ):
            yield CounterMetricFamily(_PREFIX + name, documentation, value=value)
        refusals = CounterMetricFamily(
            _PREFIX + "quota_refusals", "Requests refused beyond a quota of their API key.", labels=["quota"]
        )
        for quota, count in self.beyond_quota.items():
            refusals.add_metric([quota], count)
        yield refusals
        yield histogram_family(
            _PREFIX + "event_loop_lag_seconds",
            "How late a timer comes that runs fifty times a second.",
            self.event_loop_lag_s,
            {},
        )

    def exposition(self) -> bytes:
        """The text format of these series and of the process's (gRPC, memory, CPU)."""
        return bytes(generate_latest(REGISTRY)) + bytes(generate_latest(self.registry))
