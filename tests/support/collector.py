"""An OpenTelemetry collector: takes spans by OTLP over gRPC, and keeps them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True, slots=True)
class SentSpan:
    """A span as it arrived. Ids are hexadecimal digits; times are Unix times in nanoseconds."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    is_error: bool
    is_server: bool
    state: str


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """A server on a free port of loopback; a context manager."""

    def __init__(self) -> None:
        self.spans: list[SentSpan] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(0).wait()

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for of_resource in request.resource_spans:
            service = _attributes(of_resource.resource.attributes)["service.name"]
            for of_scope in of_resource.scope_spans:
                self.spans += [_sent(service, span) for span in of_scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait(self, enough: Callable[[list[SentSpan]], bool], timeout_s: float = 30.0) -> list[SentSpan]:
        """All spans, as soon as they are enough. Raises TimeoutError."""
        end_s = time.monotonic() + timeout_s
        while not enough(self.spans):
            if time.monotonic() > end_s:
                raise TimeoutError(f"only these spans came: {[(span.service, span.name) for span in self.spans]}")
            time.sleep(0.05)
        return list(self.spans)


def _sent(service: str, span: trace_pb2.Span) -> SentSpan:
    return SentSpan(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _attributes(span.attributes),
        span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
        span.kind == trace_pb2.Span.SPAN_KIND_SERVER,
        span.trace_state,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: common_pb2.AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind) if kind else None
