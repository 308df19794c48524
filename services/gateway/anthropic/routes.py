"""The paths of Anthropic's Messages API."""

from __future__ import annotations

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.gateway.access.headers import HEADERS
from services.gateway.anthropic.answers import MessageStream, WholeMessage
from services.gateway.anthropic.conversion import CountedChat, MessageChat
from services.gateway.anthropic.errors import write_error
from services.gateway.anthropic.retention import retained
from services.gateway.anthropic.schema import MessagesRequest
from services.gateway.engine.idempotency import IDEMPOTENCY_KEY
from services.gateway.engine.request import GenerateJob
from services.gateway.http.connection import CONNECTION
from services.gateway.openai.answers import JsonResponse
from services.gateway.openai.event_ids import LAST_EVENT_ID, cannot_resume
from services.gateway.openai.format import Envelope
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.jobs import CHAT, Asked, chat_jobs
from services.gateway.openai.middleware import OtherApi, caller_of
from services.gateway.openai.routes import BODY_ERRORS, GENERATION_ERRORS, entered
from services.gateway.openapi.answers import CountedTokens, MessageAnswer, MessageError
from services.gateway.openapi.description import EVENT_STREAM, described

_PATH = "/v1/messages"


def anthropic_api(gateway: Gateway) -> OtherApi:
    """The API of a gateway."""

    @described(
        body=MessagesRequest,
        answer=MessageAnswer,
        text=EVENT_STREAM,
        error=MessageError,
        errors=GENERATION_ERRORS,
        headers=HEADERS | {IDEMPOTENCY_KEY: "the client's name for the request; the same request is not run twice"},
    )
    async def messages(request: Request) -> Response:
        """Answer a conversation."""
        async with entered(gateway, request, "message", MessageChat, _message_jobs) as admitted:
            if LAST_EVENT_ID in request.headers:
                raise cannot_resume("events of /v1/messages have no ids")
            reading = gateway.open(admitted.jobs, admitted.asked.key, caller_of(request))
        body = admitted.body
        assert body.max_tokens is not None
        envelope = Envelope("message", body.model or gateway.model_name, reading.created_s, admitted.asked.answer_id)
        cls = MessageStream if body.stream else WholeMessage
        request_id = request.scope["state"]["request_id"]
        return cls(reading, envelope, max_tokens=body.max_tokens, request_id=request_id)

    @described(body=MessagesRequest, answer=CountedTokens, error=MessageError, errors=BODY_ERRORS)
    async def count_tokens(request: Request) -> Response:
        """How many tokens the prompt of a conversation has."""
        gone = request.scope[CONNECTION].has_gone
        with gateway.access.quotas.entering(caller_of(request).key, new=True), gateway.held_body() as held:
            body, _ = await gateway.read_request(CountedChat, request, held)
            gateway.check_model(body.model)
            chat = body.for_template()
            ids = await gateway.builder.encode_chat(
                chat.messages,
                CHAT,
                add_generation_prompt=chat.add_generation_prompt,
                variables=chat.variables,
                extras=chat.extras,
                gone=gone,
            )
        return JsonResponse(orjson.dumps({"input_tokens": len(ids)}))

    routes = [Route(_PATH, messages, methods=["POST"]), Route(f"{_PATH}/count_tokens", count_tokens, methods=["POST"])]
    return OtherApi(_PATH, routes, {_PATH: "message"}, write_error, b"request-id")


async def _message_jobs(gateway: Gateway, body: MessageChat, asked: Asked) -> list[GenerateJob]:
    jobs = await chat_jobs(gateway, body, asked)
    for job in jobs:
        job.endpoint = "message"
    # The jobs share this metadata object.
    asked.metadata.cache_retention.extend(await retained(gateway, body, jobs[0].prompt_ids, asked))
    return jobs
