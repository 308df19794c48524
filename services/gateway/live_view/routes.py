"""GET /v1/live, GET /v1/live/trace, GET /v1/requests/{id}/timeline, and the policies."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paceline.v1.admin_pb2 import ExplainRequest, ExplainResponse, Explanation, PrefixReuse
from services.gateway.errors import invalid
from services.gateway.live_view.admins import check_admin, is_admin
from services.gateway.live_view.event_stream import EventStream
from services.gateway.live_view.feed import LiveFeed
from services.gateway.live_view.policies import policies_api
from services.gateway.live_view.schema import LiveSnapshot, PrefixShown, SequenceTimeline, TimelineAnswer, TimelineSpan
from services.gateway.live_view.trace_schema import TraceRecord
from services.gateway.live_view.traces import MAX_BEHIND_S, LiveTraces, check_seconds
from services.gateway.openai.answers import JsonResponse
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.middleware import OtherApi, caller_of
from services.gateway.openapi.description import described

_STREAM = {"stream": "true: server-sent events without end"}
_SECONDS = {"seconds": "how long to record, at most 60"}
_OWNER = {"tenant": "of the request, if several tenants have requests of this id"}
_MAX_ID_CHARS = 256


def live_api(gateway: Gateway, feed: LiveFeed, traces: LiveTraces) -> list[OtherApi]:
    """The paths, each an API of its own."""

    @described(answer=LiveSnapshot, event=LiveSnapshot, query=_STREAM, errors=(400, 401, 403, 429, 503))
    async def live(request: Request) -> Response:
        """What the scheduler and its workers do now, or a stream of it, once a second. With API keys, only an admin
        key may read it, since it names all tenants."""
        check_admin(caller_of(request), "the live view names all tenants")
        streamed = request.query_params.get("stream", "false")
        if streamed not in ("true", "false"):
            raise invalid("stream", "stream must be true or false")
        viewer = feed.join()
        if streamed == "true":
            return EventStream(viewer)
        try:
            return JsonResponse(await viewer.snapshot())
        finally:
            viewer.close()

    @described(answer=TraceRecord, event=TraceRecord, query=_SECONDS, errors=(400, 401, 403, 429, 503))
    async def trace(request: Request) -> Response:
        """A stream of trace records of all services, for `seconds`. Each service uses its own clock. `paceline trace`
        turns the stream into a file for Perfetto. With API keys, only an admin key may read it, since it names all
        tenants and requests. Only one trace at a time."""
        check_admin(caller_of(request), "a trace names all tenants")
        seconds = check_seconds(request.query_params.get("seconds"))
        return EventStream(traces.begin(seconds), max_s=seconds + MAX_BEHIND_S)

    @described(answer=TimelineAnswer, query=_OWNER, errors=(400, 401, 404, 409, 429, 503))
    async def timeline(request: Request) -> Response:
        """Why a request waited, and what happened to it, by its X-Request-ID or the id of its answer. A key sees its
        own requests, an admin key all."""
        caller, name = caller_of(request), request.path_params["request_id"][:_MAX_ID_CHARS]
        wanted = ExplainRequest(request_id=name)
        if (tenant := request.query_params.get("tenant")) is not None:
            wanted.tenant = tenant
        if not is_admin(caller):
            wanted.key = caller.owner
        with gateway.access.quotas.entering(caller.key, new=True):
            found = await gateway.session.explain(wanted)
        shown = _timeline(name, found, shows_others=is_admin(caller))
        return JsonResponse(shown.model_dump_json())

    return [
        OtherApi("/v1/live", [Route("/v1/live", live), Route("/v1/live/trace", trace)], {}),
        OtherApi("/v1/requests", [Route("/v1/requests/{request_id}/timeline", timeline)], {}),
        policies_api(gateway),
    ]


def _timeline(name: str, found: ExplainResponse, *, shows_others: bool) -> TimelineAnswer:
    sequences: dict[str, list[TimelineSpan]] = {}
    prefixes = {one.request_id: _prefix(one) for one in found.prefixes}
    for span in found.explanations:
        sequences.setdefault(span.request_id, []).append(_span(span, shows_others=shows_others))
    return TimelineAnswer(
        id=name,
        num_sequences=found.num_sequences,
        sequences=[
            SequenceTimeline(request_id=request_id, spans=spans, prefix=prefixes.get(request_id))
            for request_id, spans in sequences.items()
        ],
    )


def _prefix(found: PrefixReuse) -> PrefixShown:
    missed = [{"reason": one.reason, "num_tokens": one.num_tokens, "detail": one.detail} for one in found.missed]
    return PrefixShown.model_validate(
        {"prompt_tokens": found.num_tokens, "cached_tokens": found.num_cached_tokens, "missed": missed}
    )


def _span(span: Explanation, *, shows_others: bool) -> TimelineSpan:
    """`shows_others`: whether the ids of other requests are shown, which may be other tenants'."""
    detail, behind = span.detail, span.behind or None
    if behind is not None and not shows_others:
        detail, behind = detail.replace(f"behind {behind}", "behind another request", 1), None
    return TimelineSpan(
        reason=span.reason,
        detail=detail,
        behind=behind,
        worker=span.worker or None,
        from_s=span.from_s,
        to_s=span.to_s,
        first_decision=span.first_decision,
        last_decision=span.last_decision,
    )
