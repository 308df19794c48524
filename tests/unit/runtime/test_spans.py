"""When spans are sent, where to, and what happens to a wrong setting."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from structlog.testing import capture_logs

from scheduler_svc.settings import SchedulerSettings
from services.runtime.service import CannotStart
from services.runtime.settings import ConfigError, load_settings
from services.runtime.tracing.context import TraceContext
from services.runtime.tracing.settings import open_spans
from services.runtime.tracing.spans import MAX_WORK, SpanExport, context_of_span

PARENT = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", True, "vendor=1")
FLAG = ["--otlp-traces-endpoint", "http://127.0.0.1:1"]


def settings(*flags: str) -> SchedulerSettings:
    return load_settings(SchedulerSettings, list(flags), prog="test")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINT", "TRACES_ENDPOINT", "PROTOCOL", "TRACES_PROTOCOL"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)


def test_no_spans_unless_an_endpoint_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not settings().sends_spans
    assert open_spans(settings()) is None
    assert settings(*FLAG).sends_spans
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "")  # as compose files pass unset variables
    assert not settings().sends_spans
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    assert settings().sends_spans


@pytest.mark.parametrize(("name", "value"), [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")])
def test_opentelemetrys_variables_turn_spans_off(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert not settings(*FLAG).sends_spans


@pytest.mark.parametrize("value", ["127.0.0.1:4317", "ftp://127.0.0.1", "http://"])
def test_an_endpoint_that_is_no_url_is_refused_by_name(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((ConfigError, SystemExit)):
        settings("--otlp-traces-endpoint", value)
    assert "--otlp-traces-endpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"), ("OTEL_BSP_MAX_QUEUE_SIZE", "many")]
)
def test_a_variable_that_cannot_be_used_stops_the_start(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(CannotStart, match=f"{name} is '{value}'"):
        open_spans(settings(*FLAG))


def test_without_the_packages_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "services.runtime.tracing.spans")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(CannotStart, match=r"install paceline\[otel\]"):
        open_spans(settings(*FLAG))


class HttpCollector(HTTPServer):
    """A collector that speaks OTLP over HTTP."""

    got: list[trace_service_pb2.ExportTraceServiceRequest]


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, HttpCollector)
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.got.append(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
        self.send_response(200 if self.path == "/v1/traces" else 404)
        self.end_headers()


@pytest.fixture
def http_collector() -> Iterator[HttpCollector]:
    server = HttpCollector(("127.0.0.1", 0), _Handler)
    server.got = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_spans_go_over_http_with_parent_and_state(
    monkeypatch: pytest.MonkeyPatch, http_collector: HttpCollector
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{http_collector.server_port}")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    export = SpanExport("scheduler")
    parent = export.start("outer", PARENT, 1_000, {"a": 1})
    export.add("inner", parent, 2_000, 3_000, {"b": "x"})
    parent.end(4_000)
    unsampled = export.start("unseen", TraceContext(PARENT.trace_id, PARENT.span_id, False), 1, {})
    assert not context_of_span(unsampled).sampled
    unsampled.end()
    export.close()
    [of_resource] = [one for request in http_collector.got for one in request.resource_spans]
    names = [pair.value.string_value for pair in of_resource.resource.attributes if pair.key == "service.name"]
    assert names == ["mine"]
    inner, outer = of_resource.scope_spans[0].spans
    assert (outer.name, outer.start_time_unix_nano, outer.end_time_unix_nano) == ("outer", 1_000, 4_000)
    assert (outer.trace_id.hex(), outer.parent_span_id.hex()) == (PARENT.trace_id, PARENT.span_id)
    assert (outer.trace_state, inner.parent_span_id) == ("vendor=1", outer.span_id)
    assert context_of_span(parent) == TraceContext(PARENT.trace_id, outer.span_id.hex(), True, "vendor=1")


def test_work_that_fails_is_logged_and_work_beyond_the_limit_counts_as_dropped_spans() -> None:
    export = SpanExport("scheduler", "http://127.0.0.1:1")
    began, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def wait() -> None:
        began.set()
        go_on.wait()

    def fail() -> None:
        raise ValueError("no span")

    with capture_logs() as lines:
        export.later(wait, 1)
        assert began.wait(10)
        export.later(fail, 1)
        export.later(done.set, 1)
        for _ in range(MAX_WORK):  # two of them do not fit
            export.later(lambda: None, 3)
        go_on.set()
        assert done.wait(10)
    [family] = export.collect()
    assert {sample.labels["outcome"]: sample.value for sample in family.samples if sample.value} == {"dropped": 6}
    assert [line["event"] for line in lines] == ["spans cannot be made"]
    export.close()
