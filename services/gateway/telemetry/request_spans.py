"""Makes one span per client request, over all its sequences. The scheduler's spans are its children.

Names are those of OpenTelemetry's semantic conventions for generative AI and HTTP. No text of a request is in a span.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from opentelemetry.trace import SpanKind

from paceline.v1 import common_pb2
from services.gateway.errors import ApiError
from services.gateway.outcome import SequenceOutcome
from services.gateway.telemetry.request_log import request_fields
from services.runtime.tracing.context import TraceContext
from services.runtime.tracing.spans import AttributeValue, SpanExport, UnixClock, context_of_span, mark_failed

# gen_ai.operation.name by endpoint. Chat is a conversation, in any API.
_OPERATIONS = {"chat": "chat", "response": "chat", "message": "chat", "embedding": "embeddings"}
_LEAST_ERROR, _LEAST_SERVER_ERROR = 400, 500  # HTTP status


class RequestSpan:
    """The span of one request, from its arrival to the end of its last sequence."""

    def __init__(
        self,
        export: SpanExport,
        model_name: str,
        parent: TraceContext | None,
        *,
        endpoint: str,
        num_sequences: int,
        arrival_s: float,
        sampling: common_pb2.SamplingParams,
    ) -> None:
        """`parent`: of the client. `arrival_s`: on the clock of perf_counter."""
        operation = _OPERATIONS.get(endpoint, "text_completion")
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "paceline",
            "gen_ai.request.model": model_name,
            "paceline.endpoint": endpoint,
            **(_sampling_attributes(sampling) if operation != "embeddings" else {}),
        }
        if num_sequences > 1:
            attributes["gen_ai.usage.num_sequences"] = num_sequences  # vLLM's name
        start_ns = UnixClock(time.perf_counter()).unix_ns(arrival_s)
        name = f"{operation} {model_name}"
        self._span = export.start(name, parent, start_ns, attributes, kind=SpanKind.SERVER)
        self._model_name = model_name
        self._num_sequences = num_sequences
        self._outcomes: list[SequenceOutcome] = []

    @property
    def context(self) -> TraceContext:
        """The parent of the scheduler's spans."""
        return context_of_span(self._span)

    def ended(self, outcome: SequenceOutcome) -> None:
        """A sequence has ended. The last one ends the span."""
        self._outcomes.append(outcome)
        if len(self._outcomes) < self._num_sequences:
            return
        if self._span.is_recording():
            fields = request_fields(self._outcomes, self._model_name)
            self._span.set_attributes(_result_attributes(fields))
            self._set_status(fields["status"], fields.get("error", ""))
        self._span.end()

    def refused(self, error: ApiError) -> None:
        """The request did not get to the scheduler."""
        self._set_status(error.status, error.message)
        self._span.end()

    def _set_status(self, status: int, message: str) -> None:
        self._span.set_attribute("http.response.status_code", status)
        if status >= _LEAST_SERVER_ERROR:
            mark_failed(self._span, str(status), message)
        elif status >= _LEAST_ERROR:  # the client's error, which is no error of the server (conventions for HTTP)
            self._span.set_attribute("error.type", str(status))


def _sampling_attributes(sampling: common_pb2.SamplingParams) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
    }
    for name in ("top_k", "presence_penalty", "frequency_penalty"):
        if value := getattr(sampling, name):
            attributes[f"gen_ai.request.{name}"] = value
    return attributes


def _result_attributes(fields: Mapping[str, Any]) -> dict[str, AttributeValue]:
    """`fields`: of the request log."""
    attributes: dict[str, AttributeValue] = {
        "gen_ai.response.id": fields["id"],
        "gen_ai.response.model": fields["model"],
        "gen_ai.response.finish_reasons": fields["finish_reason"].split(","),
        "gen_ai.request.id": fields["request_id"],  # vLLM's name
        "gen_ai.usage.input_tokens": fields["prompt_tokens"],
        "gen_ai.usage.output_tokens": fields["output_tokens"],
        "gen_ai.usage.cache_read.input_tokens": fields["cached_tokens"],
        "paceline.tenant": fields["tenant"],
        "paceline.submissions": fields.get("submissions", 1),
    }
    if fields["ttft_s"] is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = fields["ttft_s"]
    return attributes
