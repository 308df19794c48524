"""Makes the spans of a traced request when it ends, from its timeline and its chunks. A step makes no spans."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from grpc import StatusCode

from scheduler_svc.core.output.timeline import Event
from scheduler_svc.core.output.trace_phases import TracedPhase, phases
from scheduler_svc.core.rejection import Rejection
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.requests.trace import RequestTrace
from scheduler_svc.generate import STATUS_BY_CODE
from services.runtime.tracing.context import TraceContext
from services.runtime.tracing.spans import AttributeValue, SpanExport, UnixClock, mark_failed

REQUEST_SPAN = "llm_request"  # vLLM's name
_MAX_DETAIL_CHARS = 300


class SequenceSpans:
    """Sends one span per sequence, and below it one for each phase."""

    def __init__(self, export: SpanExport) -> None:
        self._export = export

    def ended(self, request: Request, events: Sequence[Event], how: str, error: Rejection | None, now_s: float) -> None:
        """As EndedRequests says. `now_s`: on the monotonic clock. Another thread makes the spans, from data that no
        longer changes."""
        trace = request.trace
        assert trace is not None
        num_spans = 1 + len(events) + len(trace.chunks)  # about
        self._export.later(partial(self._make, request, trace, events, how, error, now_s), num_spans)

    def _make(
        self,
        request: Request,
        trace: RequestTrace,
        events: Sequence[Event],
        how: str,
        error: Rejection | None,
        now_s: float,
    ) -> None:
        clock = UnixClock(time.monotonic())
        parent = TraceContext(trace.trace_id, trace.parent_id, sampled=True)
        span = self._export.start(
            REQUEST_SPAN, parent, clock.unix_ns(request.arrival_s), _attributes(request, how, now_s)
        )
        for phase in phases(events, trace.chunks, resubmitted=request.metadata.accepted_before):
            begin_ns, end_ns = clock.unix_ns(phase.from_s), clock.unix_ns(phase.to_s)
            self._export.add(phase.name, span, begin_ns, end_ns, _attributes_of_phase(phase))
        if error is not None:
            mark_failed(span, STATUS_BY_CODE.get(error.code, StatusCode.UNKNOWN).name, error.message)
        span.end(clock.unix_ns(now_s))


def _attributes(request: Request, how: str, now_s: float) -> dict[str, AttributeValue]:
    """vLLM's names where vLLM has one."""
    timing, sampling, trace = request.history.timing(request.arrival_s, now_s), request.sampling, request.trace
    attributes: dict[str, AttributeValue] = {
        "gen_ai.request.id": request.request_id,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.response.finish_reasons": [how],
        "gen_ai.usage.prompt_tokens": request.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": request.num_output_tokens,
        "gen_ai.latency.e2e": now_s - request.arrival_s,
        "gen_ai.latency.time_in_queue": timing.queue_s,
        "gen_ai.latency.time_in_model_prefill": timing.prefill_s,
        "gen_ai.latency.time_in_model_decode": timing.decode_s,
        "gen_ai.latency.time_in_model_inference": timing.prefill_s + timing.decode_s,
        "paceline.cached_tokens": request.history.cached_tokens or 0,
        "paceline.prefill_chunks": trace.num_chunks if trace is not None else 0,
        "paceline.preemptions": timing.num_preemptions,
        "paceline.losses": timing.num_losses,
        "paceline.tenant": request.metadata.tenant,
    }
    if request.history.first_token_s is not None:
        attributes["gen_ai.latency.time_to_first_token"] = request.history.first_token_s - request.arrival_s
    return attributes


def _attributes_of_phase(phase: TracedPhase) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {}
    if phase.detail:
        detail = phase.detail[:_MAX_DETAIL_CHARS]
        attributes["paceline.detail"] = detail.encode("utf-8", "backslashreplace").decode()
    if (chunk := phase.chunk) is not None:
        attributes["paceline.worker"], attributes["paceline.step"] = chunk.worker, chunk.step
        attributes["paceline.tokens"] = chunk.num_tokens
    return attributes
