"""The HTTP application: completions, chat, models, tokens, health and metrics, and the routes of the other APIs."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, Generic, TypeVar

import orjson
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from paceline.v1.inference_pb2 import SchedulerLoad
from services.gateway.access.caller import Caller
from services.gateway.access.control import METRICS_PATH, OPEN_PATHS
from services.gateway.access.headers import HEADERS, apply_headers, conversation_name
from services.gateway.engine.idempotency import IDEMPOTENCY_KEY, RequestKey, check_key
from services.gateway.engine.request import GenerateJob
from services.gateway.errors import ApiError, Gone, invalid
from services.gateway.http.connection import CONNECTION
from services.gateway.http.hosts import AllowedHosts
from services.gateway.http.origins import AllowedOrigins
from services.gateway.openai import schema
from services.gateway.openai.answers import JsonResponse, StreamAnswer, WholeAnswer
from services.gateway.openai.event_ids import LAST_EVENT_ID, EventId, cannot_resume, parse_event_id
from services.gateway.openai.format import Envelope, Kind, new_answer_id
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.jobs import CHAT, PROMPT, Asked, chat_jobs, completion_jobs
from services.gateway.openai.middleware import (
    ERROR_HANDLERS,
    OtherApi,
    RequestMiddleware,
    caller_of,
    sanitised_request_id,
)
from services.gateway.openai.values import NOT_FOR_CHATS
from services.gateway.openai.vllm_routes import vllm_routes
from services.gateway.openapi import answers
from services.gateway.openapi.description import described
from services.gateway.openapi.route import openapi_route

_KINDS: dict[str, str] = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}
BODY_ERRORS = (400, 401, 404, 408, 413, 415, 429)
GENERATION_ERRORS = (400, 401, 403, 404, 408, 409, 413, 415, 422, 429, 500, 503, 504)
_NOTHING_LEFT = {204: "The client has the whole stream already (Last-Event-ID)"}
_GENERATION_HEADERS = HEADERS | {
    IDEMPOTENCY_KEY: "the client's name for the request; a gateway does not run the request again while it runs or its "
    "answer is kept",
    LAST_EVENT_ID: "the last event of the stream that the client has",
}
# While the queue is full, requests are refused before their bodies are read, except those with one of these headers: a
# request with a key may already run, and then it needs no position in the queue.
_MAY_RUN = frozenset({IDEMPOTENCY_KEY.lower().encode(), LAST_EVENT_ID.lower().encode()})


def create_app(
    gateway: Gateway, hosts: AllowedHosts, origins: AllowedOrigins, root_path: str = "", apis: Sequence[OtherApi] = ()
) -> RequestMiddleware:
    """The ASGI application. It answers only requests to these hosts; probes (OPEN_PATHS) may address any host, and
    /metrics any IP address. It refuses requests of web pages of other origins, except those that change nothing.
    `root_path`: a prefix that paths may have, because a proxy leaves it there. `apis`: those with routes in other
    packages: Responses, embeddings, batches, Anthropic's Messages, the live view, the page."""
    # The most frequent first: each route costs some µs.
    routes = [*generation_routes(gateway), *_state_routes(gateway), *_model_routes(gateway), *_token_routes(gateway)]
    routes += [*(route for api in apis for route in api.routes), *vllm_routes(gateway), *_session_routes(gateway)]
    routes.append(openapi_route(routes, with_keys=gateway.access.has_keys))
    kinds = {**_KINDS, **{path: kind for api in apis for path, kind in api.kinds.items()}}
    app = Starlette(routes=routes, exception_handlers=ERROR_HANDLERS)
    app.router.redirect_slashes = False

    def refusal(scope: Scope) -> ApiError | None:
        path = scope["path"].removeprefix(root_path)
        # Probes and Prometheus address a container by its IP address.
        by_address = path == METRICS_PATH
        if path not in OPEN_PATHS and (misdirected := hosts.refusal(scope["headers"], by_address=by_address)):
            return misdirected
        if (foreign := origins.refusal(scope["method"], scope["headers"])) is not None:
            return foreign
        kind = kinds.get(path)
        if kind is None or scope["method"] != "POST" or any(name in _MAY_RUN for name, _ in scope["headers"]):
            return None
        if (error := gateway.refusal_if_full()) is not None:
            gateway.metrics.refused(kind, error)
        return error

    def admit(scope: Scope) -> Caller:
        return gateway.access.admit(scope["path"].removeprefix(root_path), scope["headers"])

    def load(caller: Caller) -> SchedulerLoad | None:
        return gateway.session.load if gateway.access.may_know_load(caller) else None

    return RequestMiddleware(app, refusal, admit, root_path, apis, load)


def _json(value: Any, status: int = 200) -> JsonResponse:
    return JsonResponse(orjson.dumps(value), status)


def _state_routes(gateway: Gateway) -> list[Route]:
    @described(answer=answers.HealthStatus, errors=())
    async def health(_: Request) -> Response:
        """200 as long as the process serves, with or without a scheduler."""
        return _json({"status": "ok"})

    @described(answer=answers.Readiness, statuses={503: "Not ready"}, errors=())
    async def ready(_: Request) -> Response:
        """200 if a request would be served now, else 503 with the reason."""
        status = gateway.session.status
        workers = status.num_workers if status is not None else 0
        if gateway.ready:
            return _json({"status": "ready", "workers": workers, "model": gateway.model_name})
        if gateway.draining:
            reason = "draining"
        elif not gateway.session.connected:
            reason = "no connection to the scheduler"
        elif gateway.session.mismatch:
            reason = gateway.session.mismatch
        elif workers == 0:
            reason = "no worker is attached, or all are draining"
        else:
            reason = "the queue is full" if status is not None and status.full else "the scheduler has no cache"
        said = {"status": "not ready", "reason": reason, "workers": workers, "model": gateway.model_name}
        return _json(said, 503)

    @described(text=CONTENT_TYPE_LATEST, errors=(401, 403))
    async def exposition(_: Request) -> Response:
        """Metrics for Prometheus."""
        metrics, requests = gateway.metrics, gateway.requests
        metrics.scheduler_ready = gateway.session.ready
        metrics.detached_requests, metrics.kept_answers = requests.num_waiting, requests.num_finished
        metrics.taken_up = requests.num_taken_up
        metrics.unauthenticated = gateway.access.num_refused
        metrics.beyond_quota = gateway.access.quotas.num_refused
        return Response(metrics.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})

    @described(answer=answers.ServerVersion, errors=(401,))
    async def server_version(_: Request) -> Response:
        """This server's version."""
        return _json({"version": version("paceline")})

    return [
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", exposition),
        Route("/version", server_version),
    ]


def _model_routes(gateway: Gateway) -> list[Route]:
    created = int(time.time())

    def card() -> dict[str, Any]:
        return {
            "id": gateway.model_name,
            "object": "model",
            "created": created,
            "owned_by": "paceline",
            "root": gateway.model_root,  # from which clients load the tokenizer
            "parent": None,
            "max_model_len": gateway.builder.max_model_len,
        }

    @described(answer=answers.ModelList, errors=(401,))
    async def models(_: Request) -> Response:
        """The one model that is served."""
        return _json({"object": "list", "data": [card()]})

    @described(answer=answers.ModelCard, errors=(401, 404))
    async def model(request: Request) -> Response:
        """One model."""
        gateway.check_model(request.path_params["model_id"] or "(no name)")
        return _json(card())

    return [Route("/v1/models", models), Route("/v1/models/{model_id:path}", model)]


def _token_routes(gateway: Gateway) -> list[Route]:
    builder = gateway.builder

    @described(body=schema.TokenizeRequest, answer=answers.Tokenized, errors=BODY_ERRORS)
    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt or a chat."""
        entering = gateway.access.quotas.entering(caller_of(request).key, new=True)
        with entering, gateway.held_body() as held:
            body, _ = await gateway.read_request(schema.TokenizeRequest, request, held)
            ids = await token_ids(body, request.scope[CONNECTION].has_gone)
        names = builder.tokenizer.token_names(ids) if body.return_token_strs else None
        shown = {"count": len(ids), "max_model_len": builder.max_model_len, "tokens": ids, "token_strs": names}
        return _json(shown)

    async def token_ids(body: schema.TokenizeRequest, gone: Callable[[], bool]) -> list[int]:
        gateway.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "give either prompt or messages")
        if body.prompt is not None:
            refuse_chat_fields(body)
            add = body.add_special_tokens is not False
            return await builder.encode_text(body.prompt, PROMPT, add_special_tokens=add, gone=gone)
        if body.add_special_tokens:
            raise invalid("add_special_tokens", f"add_special_tokens: {NOT_FOR_CHATS}")
        chat = body.for_template()
        gateway.check_template(body.chat_template)
        return await builder.encode_chat(
            chat.messages,
            CHAT,
            add_generation_prompt=chat.add_generation_prompt,
            variables=chat.variables,
            extras=chat.extras,
            gone=gone,
        )

    def refuse_chat_fields(body: schema.TokenizeRequest) -> None:
        for name in ("tools", "chat_template", "chat_template_kwargs", "continue_final_message"):
            if getattr(body, name):
                raise invalid(name, f"{name} is only possible with messages")

    @described(body=schema.DetokenizeRequest, answer=answers.Detokenized, errors=BODY_ERRORS)
    async def detokenize(request: Request) -> Response:
        """Text of token ids."""
        entering = gateway.access.quotas.entering(caller_of(request).key, new=True)
        with entering, gateway.held_body() as held:
            body, _ = await gateway.read_request(schema.DetokenizeRequest, request, held)
            gateway.check_model(body.model)
            ids = builder.check_token_ids(body.tokens, "tokens")
            text = await builder.decode(ids, skip_special_tokens=False, gone=request.scope[CONNECTION].has_gone)
        return _json({"prompt": text})

    return [Route("/tokenize", tokenize, methods=["POST"]), Route("/detokenize", detokenize, methods=["POST"])]


def _session_routes(gateway: Gateway) -> list[Route]:
    @described(statuses={204: "Released"}, errors=(400, 401, 404, 429, 503))
    async def release_session(request: Request) -> Response:
        """End a session (x-session-id) of this caller: its blocks lose their retention, and its next request goes to
        the end of the queue."""
        session_id, caller = request.path_params["session_id"], caller_of(request)
        with gateway.access.quotas.entering(caller.key, new=True):
            known = await gateway.session.release_conversation(conversation_name(session_id, caller.owner))
        if not known:
            raise ApiError(404, f"the session {session_id[:128]!r} is not known", param="session_id", code="not_found")
        return Response(status_code=204)

    return [Route("/v1/sessions/{session_id:path}", release_session, methods=["DELETE"])]


def generation_routes(gateway: Gateway) -> list[Route]:
    """The routes of completions and chat completions. A batch may call them, too."""

    @described(
        body=schema.CompletionRequest,
        answer=answers.Completion,
        event=answers.CompletionEvent,
        statuses=_NOTHING_LEFT,
        errors=GENERATION_ERRORS,
        headers=_GENERATION_HEADERS,
    )
    async def completions(request: Request) -> Response:
        """Continue a prompt, or several."""
        return await _answer(gateway, request, "completion", schema.CompletionRequest, completion_jobs)

    @described(
        body=schema.ChatRequest,
        answer=answers.ChatCompletion,
        event=answers.ChatCompletionEvent,
        statuses=_NOTHING_LEFT,
        errors=GENERATION_ERRORS,
        headers=_GENERATION_HEADERS,
    )
    async def chat_completions(request: Request) -> Response:
        """Answer a chat."""
        return await _answer(gateway, request, "chat", schema.ChatRequest, chat_jobs)

    return [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    ]


R = TypeVar("R", bound=schema.SharedFields)
S = TypeVar("S", bound=schema.SamplingFields)
MakeJobs = Callable[[Gateway, R, Asked], Awaitable[list[GenerateJob]]]


@dataclass(frozen=True, slots=True)
class Entered(Generic[R]):
    """A request that may be submitted now."""

    body: R
    jobs: list[GenerateJob]
    asked: Asked


@asynccontextmanager
async def entered(
    gateway: Gateway, request: Request, kind: Kind, cls: type[R], make_jobs: MakeJobs[R], *, max_bytes: int = 0
) -> AsyncIterator[Entered[R]]:
    """The context in which a request is submitted: it has been admitted, read, checked, and turned into jobs.
    `max_bytes`: as in Gateway.read_request.

    Counts a request that is refused here or inside the context. Raises ApiError and Gone.
    """
    arrival_s, gone, caller = time.perf_counter(), request.scope[CONNECTION].has_gone, caller_of(request)
    try:
        name = check_key(request.headers.getlist(IDEMPOTENCY_KEY), IDEMPOTENCY_KEY)
        resumed = bool(request.headers.get(LAST_EVENT_ID))
        new = name is None and not resumed  # a request with a key may already run; a resumed one must not be refused
        entering = gateway.access.quotas.entering(caller.key, new=new)
        with entering, gateway.entering(new=new), gateway.held_body() as held:
            keyed_kind = kind if name is not None else ""
            parsed, fingerprint = await gateway.read_request(
                cls, request, held, new=new, kind=keyed_kind, max_bytes=max_bytes
            )
            gateway.check_model(parsed.model)
            metadata = parsed.metadata()
            tenant = apply_headers(
                request.headers, metadata, parsed.named_tenant, owner=caller.owner, objectives=gateway.objectives
            )
            metadata = caller.permit(metadata, tenant)
            key = None
            if name is not None:
                key = RequestKey(metadata.tenant, name, fingerprint, IDEMPOTENCY_KEY, caller.owner)
                if not resumed:
                    gateway.check_capacity(key)
            request_id = _request_id(request, parsed.request_id)
            answer_id = new_answer_id(kind, key.answer_id if key is not None else request_id)
            metadata.answer_id = answer_id
            asked = Asked(request_id, answer_id, arrival_s, key, gone, metadata)
            yield Entered(parsed, await make_jobs(gateway, parsed, asked), asked)
    except ApiError as error:
        gateway.refused(kind, request.scope["state"]["request_id"], error)
        raise
    except Gone:
        gateway.count_gone()
        raise


async def _answer(gateway: Gateway, request: Request, kind: Kind, cls: type[S], make_jobs: MakeJobs[S]) -> Response:
    async with entered(gateway, request, kind, cls, make_jobs) as admitted:
        parsed, asked = admitted.body, admitted.asked
        has_usage = gateway.force_include_usage or bool(parsed.stream_options and parsed.stream_options.include_usage)
        after = _last_event(request, parsed, admitted.jobs, asked.key, has_usage=has_usage)
        if after is not None and after.after == "d":
            return Response(status_code=204)  # an EventSource stops reconnecting at 204
        shown = parsed.shown(tokens_as_ids=gateway.return_tokens_as_token_ids)
        if isinstance(parsed, schema.ChatRequest) and parsed.return_prompt_text:
            shown = replace(shown, prompt_text=await _prompt_text(gateway, parsed, asked.gone))
        # The last step: an error after it would leave the request running, and its quotas used.
        reading = gateway.open(admitted.jobs, asked.key, caller_of(request))
    created_s = after.created_s if after is not None else reading.created_s
    envelope = Envelope(kind, parsed.model or gateway.model_name, created_s, asked.answer_id, shown)
    if not parsed.stream:
        return WholeAnswer(reading, envelope, keep=parsed.n or 1)
    options = parsed.stream_options or schema.StreamOptions()
    return StreamAnswer(
        reading,
        envelope,
        include_usage=has_usage,
        continuous_usage=gateway.force_include_usage or bool(has_usage and options.continuous_usage_stats),
        after=after,
        interval=parsed.stream_interval or 1,
        event_ids=asked.key is not None or LAST_EVENT_ID in request.headers or bool(options.include_event_ids),
    )


def _request_id(request: Request, given: str | None) -> str:
    """The request's id: the client's header, else the body's `request_id`, else a new one."""
    own: str = request.scope["state"]["request_id"]
    return own if given is None or "x-request-id" in request.headers else sanitised_request_id(given)


async def _prompt_text(gateway: Gateway, body: schema.ChatRequest, gone: Callable[[], bool]) -> str:
    chat = body.for_template()
    return await gateway.builder.chat_text(
        chat.messages,
        add_generation_prompt=chat.add_generation_prompt,
        variables=chat.variables,
        extras=chat.extras,
        gone=gone,
    )


def _last_event(
    request: Request,
    body: schema.SamplingFields,
    jobs: Sequence[GenerateJob],
    key: RequestKey | None,
    *,
    has_usage: bool,
) -> EventId | None:
    """The last event that a reconnecting client has. None for a new client. Raises ApiError 400."""
    text = request.headers.get(LAST_EVENT_ID)
    if not text:
        return None
    if not body.stream:
        raise cannot_resume("only a stream has events, and this request has no stream: true")
    # With `echo` and `max_tokens: 0`, one token is sampled, and none is shown.
    shown = [0 if job.echo is not None and job.echo.alone else job.sampling.max_tokens for job in jobs]
    draws = any(job.sampling.temperature > 0 and limit for job, limit in zip(jobs, shown, strict=True))
    if key is None and body.seed is None and draws:
        raise cannot_resume(
            f"without an {IDEMPOTENCY_KEY} from the first request on, only a request that is greedy or has a seed can "
            "be resumed"
        )
    return parse_event_id(text, shown, has_usage=has_usage)
