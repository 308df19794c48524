"""POST /v1/responses: from the request to the response that answers it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from paceline.v1 import inference_pb2
from services.gateway.access.caller import Caller
from services.gateway.access.headers import apply_headers
from services.gateway.engine.idempotency import IDEMPOTENCY_KEY, RequestKey, check_key
from services.gateway.engine.request import GenerateJob, tenant_of_user
from services.gateway.errors import ApiError, invalid
from services.gateway.http.connection import CONNECTION
from services.gateway.openai.answers import JsonResponse
from services.gateway.openai.middleware import caller_of
from services.gateway.responses_api.answers import ResponseEvents, WholeResponse
from services.gateway.responses_api.conversion import chat_body
from services.gateway.responses_api.events import EventWriter, whole_response
from services.gateway.responses_api.history import previous_items
from services.gateway.responses_api.items import Item
from services.gateway.responses_api.long_work import with_pieces
from services.gateway.responses_api.records import new_record, response_head
from services.gateway.responses_api.running import RunningResponse
from services.gateway.responses_api.schema import ResponsesRequest
from services.gateway.responses_api.service import ENDPOINT, Responses

# The limit of log probabilities in a stored response, which is read as a whole. Each takes about 70 bytes. The limit is
# enough for one per token of a context of 128 Ki tokens, or for 6,241 tokens with 20 alternatives each.
MAX_STORED_LOGPROBS = 2**17


async def create(responses: Responses, request: Request) -> Response:
    """The answer to a request. Raises ApiError and Gone.

    With an idempotency key, the id and the seed follow from the key. So a request that is sent again, to any gateway,
    gets the same response.
    """
    caller, gateway = caller_of(request), responses.gateway
    name = check_key(request.headers.getlist(IDEMPOTENCY_KEY), IDEMPOTENCY_KEY)
    new = name is None
    with gateway.access.quotas.entering(caller.key, new=new), gateway.entering(new=new), gateway.held_body() as held:
        parsed, fingerprint = await gateway.read_request(ResponsesRequest, request, held, new=new, kind=ENDPOINT)
        gateway.check_model(parsed.model)
        if parsed.background and not responses.has_store:
            raise invalid("background", "background: this server stores no responses (--response-store none)")
        tenant = str(getattr(parsed, "tenant", None) or tenant_of_user(parsed.user or ""))
        key = RequestKey(tenant, name or uuid.uuid4().hex, fingerprint, IDEMPOTENCY_KEY, caller.owner)
        creation = _Creation(responses, request, caller, parsed, key, is_named=name is not None)
        return await creation.known() or await creation.begin()


def _check_logprobs(job: GenerateJob) -> None:
    """Raises ApiError 400 if the output could have too many log probabilities to be stored."""
    if not job.logprobs:
        return
    max_tokens, each = job.sampling.max_tokens, 1 + job.sampling.num_top_logprobs
    if (count := max_tokens * each) > MAX_STORED_LOGPROBS:
        raise invalid(
            "top_logprobs",
            f"top_logprobs: {max_tokens} tokens with {each} log probabilities each are {count}; a stored response has "
            f"at most {MAX_STORED_LOGPROBS}: give a smaller max_output_tokens or top_logprobs, or store: false",
        )


class _Creation:
    """A parsed request. `is_named`: the client has named it with an idempotency key."""

    def __init__(
        self,
        responses: Responses,
        request: Request,
        caller: Caller,
        parsed: ResponsesRequest,
        key: RequestKey,
        *,
        is_named: bool,
    ) -> None:
        self._responses = responses
        self._request_id: str = request.scope["state"]["request_id"]
        self._headers = request.headers
        self._gone: Callable[[], bool] = request.scope[CONNECTION].has_gone
        self._caller = caller
        self._parsed = parsed
        self._key = key
        self._is_named = is_named
        self._id = f"resp_{key.answer_id}"

    async def known(self) -> Response | None:
        """The answer, if the request was sent before with its idempotency key. Raises ApiError 422 if the key belongs
        to another request."""
        if not self._is_named:
            return None
        responses, owner = self._responses, self._caller.owner
        if (live := responses.running(owner, self._id)) is not None:
            if live.fingerprint != self._key.fingerprint:
                raise self._key.other_request()
            return await self._answer(live)
        record = await responses.store.get(owner, self._id) if responses.has_store else None
        if record is None:
            return None
        if record.fingerprint != self._key.fingerprint:
            raise self._key.other_request()
        return await self._answer(await responses.readable(record, self._caller, self._gone))

    async def begin(self) -> Response:
        """Begin the response."""
        responses, parsed, caller, key = self._responses, self._parsed, self._caller, self._key
        gateway = responses.gateway
        chat = chat_body(parsed, await self._history())
        chat.setdefault("seed", key.seed(0))
        conversation = self._add_headers(chat)
        jobs = await responses.jobs(chat, self._id, self._request_id, caller, self._gone)
        for job in jobs:
            job.metadata.conversation = conversation
        is_stored = parsed.is_stored and responses.has_store
        if is_stored:
            _check_logprobs(jobs[0])
        # Whether the client can know the id before the end: from its key, or from the first event or answer.
        is_known = self._is_named or (is_stored and bool(parsed.stream or parsed.background))
        head = response_head(
            parsed,
            self._id,
            parsed.model or gateway.model_name,
            int(time.time()),
            is_stored=is_stored,
            temperature=jobs[0].sampling.temperature,
            top_p=jobs[0].sampling.top_p,
        )
        record = new_record(caller.owner, head, parsed.input, chat, key.fingerprint) if is_stored else None
        response = RunningResponse(
            (caller.owner, self._id),
            head,
            is_stored=is_stored and is_known,
            late_record=None if is_known else record,
            runs_alone=bool(parsed.background),
            grace_s=responses.grace_s if is_known else 0.0,
            fingerprint=key.fingerprint,
        )
        if await responses.begin(response, jobs, caller, record if is_known else None):
            return await self._answer(response)
        known = await self.known()  # another connection has begun it
        if known is None:
            raise ApiError(409, "the response was deleted while it was asked for", code="replaced")
        return known

    def _add_headers(self, chat: dict[str, Any]) -> str:
        """Adds to the chat's body what the request's headers say. Returns the conversation's name, if there is one: it
        is not stored, because it changes no token. Raises ApiError 400."""
        said = inference_pb2.Submission(priority=chat.get("priority") or 0.0, ttft_slo_s=chat.get("ttft_slo_s") or 0.0)
        gateway, owner = self._responses.gateway, self._caller.owner
        tenant = apply_headers(self._headers, said, chat.get("tenant"), owner=owner, objectives=gateway.objectives)
        given = {"priority": said.priority, "ttft_slo_s": said.ttft_slo_s, "tenant": tenant}
        chat |= {name: value for name, value in given.items() if value}
        return said.conversation

    async def _history(self) -> Sequence[Item]:
        previous = self._parsed.previous_response_id
        if previous is None:
            return ()
        responses = self._responses
        limit = responses.gateway.max_body_bytes
        return await previous_items(responses.store, self._caller.owner, previous, max_bytes=limit)

    async def _answer(self, response: RunningResponse) -> Response:
        parsed = self._parsed
        if parsed.stream:
            return ResponseEvents(response, at_once=bool(parsed.background))
        if not parsed.background:
            return WholeResponse(response)
        # The response as it is now. While it runs, it has no output; until its first token it is queued, which OpenAI's
        # clients expect of a new background response.
        head, pieces, outcome = response.head, response.pieces, response.outcome
        if outcome is None:
            return JsonResponse(orjson.dumps(EventWriter(head).response("in_progress" if pieces else "queued")))
        return JsonResponse(await with_pieces(pieces, lambda: orjson.dumps(whole_response(head, pieces, outcome))))
