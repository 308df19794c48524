"""Sends spans to an OpenTelemetry collector by OTLP, in a thread of its own.

The event loop only appends to queues, and never waits. With a full queue or an absent collector, spans are lost, and
are counted. OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_*, OTEL_TRACES_SAMPLER, OTEL_BSP_*, OTEL_SERVICE_NAME,
OTEL_RESOURCE_ATTRIBUTES) apply.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version

from opentelemetry.sdk.environment_variables import (
    OTEL_BSP_MAX_QUEUE_SIZE,
    OTEL_EXPORTER_OTLP_PROTOCOL,
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL,
)
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, TraceFlags, set_span_in_context
from opentelemetry.trace.span import TraceState
from opentelemetry.trace.status import Status, StatusCode
from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from services.runtime.logs import get_logger
from services.runtime.tracing.context import TraceContext

SPANS_METRIC = "paceline_trace_spans"
_log = get_logger(__name__)
MAX_WORK = 1024  # calls of later() that wait
_CLOSE_S = 2.0  # for the last spans at the end of the process
_QUEUE_SIZE, _MAX_BATCH = 2048, 512  # spans; the SDK's defaults
AttributeValue = str | bool | int | float | Sequence[str]


class SpanExport(Collector):
    """Makes spans of one service and sends them. `endpoint`: where to; empty: where OpenTelemetry's variables say."""

    def __init__(self, service: str, endpoint: str = "") -> None:
        self._exporter = _CountingExporter(_make_exporter(endpoint))
        self._processor = _CountingProcessor(self._exporter)
        given = OTELResourceDetector().detect().attributes
        own = {
            "service.name": f"paceline-{service}",
            "service.version": version("paceline"),
            "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
        }
        # No shutdown at the exit of the process: it would wait 30 s for an absent collector.
        self._provider = TracerProvider(resource=Resource.create({**own, **given}), shutdown_on_exit=False)
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("paceline", version("paceline"))
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_WORK)
        self._worker = threading.Thread(target=self._run, name="spans", daemon=True)
        self._worker.start()
        self._num_given_up = 0
        REGISTRY.register(self)

    def later(self, make: Callable[[], None], num_spans: int) -> None:
        """Call `make`, which makes about `num_spans` spans, in another thread, because a span takes tens of
        microseconds. Does not wait: if MAX_WORK calls are waiting, the spans count as dropped."""
        try:
            self._work.put_nowait(make)
        except queue.Full:
            self._num_given_up += num_spans

    def _run(self) -> None:
        while (make := self._work.get()) is not None:
            try:
                make()
            except Exception:
                _log.exception("spans cannot be made")

    def start(
        self,
        name: str,
        parent: TraceContext | Span | None,
        start_ns: int,
        attributes: Mapping[str, AttributeValue],
        *,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        """Begin a span, by Unix time in nanoseconds. It must be ended by `Span.end`. Without a parent it begins a
        trace. It records nothing if the sampler is against it; by default the parent decides."""
        context = None
        if parent is not None:
            context = set_span_in_context(_as_span(parent) if isinstance(parent, TraceContext) else parent)
        return self._tracer.start_span(name, context, kind, dict(attributes), start_time=start_ns)

    def add(
        self, name: str, parent: Span, start_ns: int, end_ns: int, attributes: Mapping[str, AttributeValue]
    ) -> None:
        """A span that has ended."""
        self.start(name, parent, start_ns, attributes).end(end_ns)

    def collect(self) -> Iterator[Metric]:
        """For prometheus_client."""
        family = CounterMetricFamily(SPANS_METRIC, "Spans by what became of them.", labels=["outcome"])
        family.add_metric(["exported"], self._exporter.num_exported)
        family.add_metric(["failed"], self._exporter.num_failed)
        family.add_metric(["dropped"], self._processor.num_dropped + self._num_given_up)
        yield family

    def close(self) -> None:
        """Send the last spans, for at most 2 s. Blocks."""
        REGISTRY.unregister(self)
        closing = threading.Thread(target=self._finish, daemon=True)
        closing.start()
        closing.join(_CLOSE_S)

    def _finish(self) -> None:
        self._work.put(None)
        self._worker.join()
        self._provider.shutdown()


def context_of_span(span: Span) -> TraceContext:
    """The context that makes this span the parent of another process's spans."""
    context = span.get_span_context()
    sampled = bool(context.trace_flags & TraceFlags.SAMPLED)
    return TraceContext(f"{context.trace_id:032x}", f"{context.span_id:016x}", sampled, context.trace_state.to_header())


def mark_failed(span: Span, error_type: str, message: str = "") -> None:
    """The span has the status Error, and `error.type` (OpenTelemetry's semantic conventions)."""
    span.set_attribute("error.type", error_type)
    span.set_status(Status(StatusCode.ERROR, message or None))


class UnixClock:
    """Converts times of a monotonic clock to Unix time in nanoseconds. Their difference is measured once."""

    def __init__(self, now_s: float) -> None:
        """`now_s`: the present time of that clock."""
        self._offset_ns = time.time_ns() - int(now_s * 1e9)

    def unix_ns(self, at_s: float) -> int:
        """Unix time of a time of the clock."""
        return self._offset_ns + int(at_s * 1e9)


class _CountingExporter(SpanExporter):
    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self.num_taken = self.num_exported = self.num_failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_taken += len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
        finally:
            if result is SpanExportResult.SUCCESS:
                self.num_exported += len(spans)
            else:
                self.num_failed += len(spans)
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._inner.force_flush(timeout_millis)


class _CountingProcessor(BatchSpanProcessor):
    """Also counts the spans that a full queue drops, which the SDK only logs."""

    def __init__(self, exporter: _CountingExporter) -> None:
        self._capacity = _queue_size()
        super().__init__(exporter, max_queue_size=self._capacity, max_export_batch_size=min(_MAX_BATCH, self._capacity))
        self._counts = exporter
        self._num_ended = self.num_dropped = 0

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            self._num_ended += 1
            if self._num_ended - self._counts.num_taken - self.num_dropped > self._capacity:
                self.num_dropped += 1
        super().on_end(span)


def _queue_size() -> int:
    """Raises ValueError."""
    given = os.environ.get(OTEL_BSP_MAX_QUEUE_SIZE) or str(_QUEUE_SIZE)
    if not given.isdecimal() or int(given) < 1:
        raise ValueError(f"{OTEL_BSP_MAX_QUEUE_SIZE} is {given!r}; a positive number is needed")
    return int(given)


def _as_span(context: TraceContext) -> Span:
    flags = TraceFlags(TraceFlags.SAMPLED if context.sampled else TraceFlags.DEFAULT)
    state = TraceState.from_header([context.state]) if context.state else None
    return NonRecordingSpan(SpanContext(int(context.trace_id, 16), int(context.span_id, 16), True, flags, state))


def _make_exporter(endpoint: str) -> SpanExporter:
    """The exporter for OTEL_EXPORTER_OTLP_TRACES_PROTOCOL or OTEL_EXPORTER_OTLP_PROTOCOL: grpc (the default, as in
    vLLM) or http/protobuf. Raises ValueError for another protocol."""
    protocol = os.environ.get(OTEL_EXPORTER_OTLP_TRACES_PROTOCOL) or os.environ.get(OTEL_EXPORTER_OTLP_PROTOCOL)
    match protocol or "grpc":
        case "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

            return GrpcExporter(endpoint=endpoint or None)
        case "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

            return HttpExporter(endpoint=endpoint or None)
    raise ValueError(f"{OTEL_EXPORTER_OTLP_PROTOCOL} is {protocol!r}; grpc and http/protobuf are possible")
