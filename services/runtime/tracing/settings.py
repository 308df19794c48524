"""The settings of the services that send spans: gateway and scheduler."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from services.runtime.service import CannotStart
from services.runtime.settings import ServiceSettings

if TYPE_CHECKING:
    from services.runtime.tracing.spans import SpanExport

ENDPOINT_ENVS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def _check_endpoint(value: str) -> str:
    parts = urlsplit(value)
    if value and (parts.scheme not in ("http", "https") or not parts.hostname):
        raise ValueError("must be a URL, like http://127.0.0.1:4317")
    return value


class TracingSettings(ServiceSettings):
    """Where spans go."""

    otlp_traces_endpoint: Annotated[str, AfterValidator(_check_endpoint)] = Field(
        "",
        description="URL of an OpenTelemetry collector that gets a trace of each request, like http://127.0.0.1:4317 "
        f"(default: {ENDPOINT_ENVS[0]}, else {ENDPOINT_ENVS[1]}; if none is set: no traces)",
    )

    @property
    def sends_spans(self) -> bool:
        """Whether an endpoint is set here, or by OpenTelemetry's own variables, and these do not turn tracing off."""
        if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
            return False
        if os.environ.get("OTEL_TRACES_EXPORTER", "otlp") == "none":
            return False
        return bool(self.otlp_traces_endpoint or any(os.environ.get(name) for name in ENDPOINT_ENVS))


def open_spans(settings: TracingSettings) -> SpanExport | None:
    """Start to send spans, if the settings say so. Raises CannotStart without OpenTelemetry's packages, or if its
    variables cannot be used."""
    if not settings.sends_spans:
        return None
    try:
        from services.runtime.tracing.spans import SpanExport
    except ImportError as error:
        message = f"an endpoint for traces is set, but OpenTelemetry is not installed ({error}): install paceline[otel]"
        raise CannotStart(message) from error
    try:
        return SpanExport(settings.section, settings.otlp_traces_endpoint)
    except ValueError as error:
        raise CannotStart(f"traces: {error}") from error
