"""The gRPC API InferenceService: Generate takes a text, a chat or token ids; Embed takes a text or token ids."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence

import grpc
import grpc.aio

from paceline.request_fields import METADATA, SAMPLING
from paceline.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from services.gateway.access.caller import Caller
from services.gateway.embeddings.calls import EmbedCall, embed
from services.gateway.engine.generation import EndedEarlier, Generation
from services.gateway.engine.idempotency import RequestKey, check_key, message_fingerprint
from services.gateway.engine.list_limits import check_length, check_messages, long_bad_word
from services.gateway.engine.logprobs import ScoredToken
from services.gateway.engine.request import MAX_SAMPLES, GenerateJob, check_beam, check_metadata, make_search, too_long
from services.gateway.engine.sampling import MAX_BAD_WORD_TOKENS, FieldNames, SamplingChoices
from services.gateway.errors import ApiError, invalid
from services.gateway.grammars.structure import Structure, from_choices, from_schema
from services.gateway.grpc.status import abort
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.middleware import sanitised_request_id

SERVICE_NAME = "paceline.v1.InferenceService"
_ROLES = frozenset({"system", "developer", "user", "assistant"})
EARLY_STOPPING: dict[int, bool | str] = {
    inference_pb2.EARLY_STOPPING_UNSPECIFIED: False,
    inference_pb2.EARLY_STOPPING_FIRST: True,
    inference_pb2.EARLY_STOPPING_NEVER: "never",
}
_LISTS = ("stop", "stop_token_ids", "logit_bias", "bad_words", "allowed_token_ids")
_FORMS = ("json_schema", "regex", "grammar")
# Options that are passed on unchanged.
_PLAIN = {field.name for field in inference_pb2.SamplingOptions.DESCRIPTOR.fields if field.has_presence} - {*_FORMS}
_Context = grpc.aio.ServicerContext[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]
_EmbedContext = grpc.aio.ServicerContext[inference_pb2.EmbedRequest, inference_pb2.EmbedResponse]
_ReleaseContext = grpc.aio.ServicerContext[
    inference_pb2.ReleaseConversationRequest, inference_pb2.ReleaseConversationResponse
]
_SessionContext = grpc.aio.ServicerContext[inference_pb2.SessionRequest, inference_pb2.SessionResponse]


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Serves Generate and Embed. The other calls belong to the scheduler, and are UNIMPLEMENTED here."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: _Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """One message per batch of tokens. The last message has the finish reason and the usage."""
        request_id = sanitised_request_id(request.request_id)
        access = self._gateway.access
        try:
            # KeyGate has checked the key before the request was received. The key may have been revoked meanwhile.
            caller = access.identify(context.invocation_metadata() or ())
            entering = access.quotas.entering(caller.key, new=not request.idempotency_key)
            with entering, self._gateway.held_body() as held:
                held.add(num_bytes := request.ByteSize())
                _check_lengths(request, self._gateway.builder.max_model_len)
                metadata = caller.permit(_metadata(request), request.tenant)
                key = _key(request, metadata.tenant, caller)
                if not request.resume_after:
                    self._gateway.check_capacity(key)
                # gRPC cancels this call if the client leaves meanwhile.
                await self._gateway.wait_to_parse(num_bytes=num_bytes, new=key is None)
                job = await self._job(request, request_id, time.perf_counter(), key, metadata)
            reading = self._gateway.open([job], key, caller)
        except ApiError as error:
            self._gateway.refused("grpc", request_id, error)
            del request  # otherwise the error that ends the call keeps the request until the next garbage collection
            await abort(context, error)
        [generation] = reading.generations
        resume_after, resume_token_ids = request.resume_after, list(request.resume_token_ids)
        del request  # otherwise the prompt stays in memory until the end of the answer
        try:
            await _skip(generation, resume_after, resume_token_ids)
            first = not resume_after
            while generation.finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED:
                response = _response(generation, await generation.next(), request_id)
                if first:
                    response.prompt_logprobs.extend(map(_token_logprob, generation.prompt_scored))
                    first = False
                yield response
        except ApiError as error:
            await abort(context, error)
        finally:
            # However the call ends (also by a cancel or a lost client), this tells the scheduler. A callback of the
            # context would not do: it keeps the prompt in memory until the next garbage collection.
            reading.close()

    async def Embed(self, request: inference_pb2.EmbedRequest, context: _EmbedContext) -> inference_pb2.EmbedResponse:
        """The vector of one input. INVALID_ARGUMENT if the model generates text."""
        request_id = sanitised_request_id(request.request_id)
        try:
            kind = request.WhichOneof("input")
            if kind is None:
                raise invalid("input", "input: one of text and token_ids is required")
            call = EmbedCall(
                self._gateway.access.identify(context.invocation_metadata() or ()),
                request_id,
                "grpc",
                request.ByteSize(),
                request.text if kind == "text" else request.token_ids.ids,
                kind,
                request.model,
                request.dimensions,
                check_metadata({name: getattr(request, name) or None for name in METADATA}),
                request.tenant,
            )
            embedded = await embed(self._gateway, call)
        except ApiError as error:
            await abort(context, error)
        return inference_pb2.EmbedResponse(
            request_id=request_id,
            embedding=embedded.vector.tolist(),
            usage=inference_pb2.Usage(prompt_tokens=embedded.prompt_tokens, cached_tokens=embedded.cached_tokens),
        )

    async def Session(
        self, request_iterator: AsyncIterator[inference_pb2.SessionRequest], context: _SessionContext
    ) -> AsyncIterator[inference_pb2.SessionResponse]:
        """Not served by a gateway."""
        await context.abort(
            grpc.StatusCode.UNIMPLEMENTED, "only the scheduler serves Session; a gateway serves Generate and Embed"
        )
        yield inference_pb2.SessionResponse()

    async def ReleaseConversation(
        self, request: inference_pb2.ReleaseConversationRequest, context: _ReleaseContext
    ) -> inference_pb2.ReleaseConversationResponse:
        """Not served by a gateway."""
        message = "only the scheduler serves ReleaseConversation; over HTTP, DELETE /v1/sessions/{id} ends a session"
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, message)

    async def _job(
        self,
        request: inference_pb2.GenerateRequest,
        request_id: str,
        arrival_s: float,
        key: RequestKey | None,
        metadata: inference_pb2.Submission,
    ) -> GenerateJob:
        self._gateway.check_model(request.model)
        self._gateway.check_generates()
        builder = self._gateway.builder
        kind = request.WhichOneof("prompt")
        names = FieldNames(prompt=kind or "prompt", prefix="sampling.")
        ids: Sequence[int]
        match kind:
            case "text":
                if not request.text:
                    raise invalid("text", "text: the prompt is empty")
                ids = await builder.encode_text(request.text, names)
            case "messages":
                ids = await builder.encode_chat(_messages(request.messages), names)
            case "token_ids":
                ids = builder.check_token_ids(request.token_ids.ids, "token_ids")
            case _:
                raise invalid("prompt", "prompt: one of text, messages and token_ids is required")
        choices = _choices(request.sampling)
        choices.grammar = await builder.grammar(_structure(request.sampling), metadata.tenant)
        if choices.max_tokens is None:
            await self._gateway.session.know_model()  # gRPC cancels this call if the client leaves meanwhile
        if key is not None and choices.seed is None:
            choices.seed = key.seed(0)
        job = builder.job(
            ids, choices, request_id=request_id, endpoint="grpc", names=names, arrival_s=arrival_s, metadata=metadata
        )
        if request.HasField("beam"):
            make_search(job, _beam(request.beam, choices))
        _check_resume(request, job)
        job.delivered = tuple(builder.check_token_ids(request.resume_token_ids, "resume_token_ids"))
        return job


def _check_lengths(request: inference_pb2.GenerateRequest, max_model_len: int) -> None:
    """Check all lists before any loop over their entries: 16 MiB can hold millions of entries, and no other request
    would be served meanwhile (list_limits.py). Raises ApiError 400."""
    check_messages(len(request.messages.messages), max_model_len)
    if (count := len(request.token_ids.ids)) > max_model_len:
        raise too_long("token_ids", str(count), max_model_len)
    if (count := len(request.resume_token_ids)) > max_model_len:
        name = "resume_token_ids"
        raise invalid(name, f"{name} has {count} tokens; this model's context is {max_model_len}")
    check_length("cache_retention", len(request.cache_retention))
    options = request.sampling
    for name in _LISTS:
        check_length(name, len(getattr(options, name)), "sampling.")
    check_length("bad_words", len(options.bad_word_ids), "sampling.", "bad_word_ids")
    for word in options.bad_word_ids:
        if len(word.ids) > MAX_BAD_WORD_TOKENS:
            raise long_bad_word("sampling.bad_word_ids", len(word.ids))


def _metadata(request: inference_pb2.GenerateRequest) -> inference_pb2.Submission:
    values = {name: getattr(request, name) or None for name in METADATA}  # 0 and "": not given
    return check_metadata(values, request.cache_retention)


def _key(request: inference_pb2.GenerateRequest, tenant: str, caller: Caller) -> RequestKey | None:
    field = "idempotency_key"
    name = check_key([request.idempotency_key] if request.idempotency_key else [], field)
    if name is not None:
        return RequestKey(tenant, name, message_fingerprint(request), field, caller.owner)
    if request.resume_after and not request.resume_token_ids:
        raise invalid(
            "resume_after", "resume_after needs the idempotency_key of the first request, or resume_token_ids"
        )
    return None


def _check_resume(request: inference_pb2.GenerateRequest, job: GenerateJob) -> None:
    limit = 0 if job.beam is not None else job.sampling.max_tokens
    if request.resume_after > limit:
        raise invalid("resume_after", f"resume_after must be at most {limit}, not {request.resume_after}")
    num_tokens = len(request.resume_token_ids)
    if not num_tokens:
        return
    if num_tokens != request.resume_after:
        raise invalid(
            "resume_after", f"resume_after is {request.resume_after}, but resume_token_ids has {num_tokens} tokens"
        )
    has_seed = request.sampling.HasField("seed") or request.idempotency_key
    if job.sampling.temperature and not has_seed:
        raise invalid("resume_token_ids", "resume_token_ids need the seed or the idempotency_key of the first request")


async def _skip(generation: Generation, resume_after: int, resume_token_ids: list[int]) -> None:
    """Skip the tokens that the client has."""
    try:
        tokens = await generation.skip(resume_after)
    except EndedEarlier:
        message = f"resume_after: this answer has ended within its first {resume_after} tokens"
        raise invalid("resume_after", message) from None
    if resume_token_ids and tokens != resume_token_ids:
        raise invalid(
            "resume_token_ids", "resume_token_ids: this answer begins with other tokens", code="cannot_resume"
        )


def _response(generation: Generation, text: str, request_id: str) -> inference_pb2.GenerateResponse:
    response = inference_pb2.GenerateResponse(
        request_id=request_id,
        token_ids=generation.token_ids,
        text=text,
        logprobs=map(_token_logprob, generation.scored),
        position=generation.text_stream.num_tokens - len(generation.token_ids),
    )
    if generation.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED:
        response.finish_reason = generation.finish_reason
        response.usage.prompt_tokens = len(generation.job.prompt_ids)
        response.usage.completion_tokens = generation.num_tokens
        response.usage.cached_tokens = generation.cached_tokens or 0
    for i, found in enumerate(generation.hypotheses):
        if not i:
            response.token_ids[:], response.text = found.token_ids, found.text
        response.hypotheses.add(
            token_ids=found.token_ids, text=found.text, score=found.score, finish_reason=found.finish_reason
        )
    return response


def _token_logprob(token: ScoredToken) -> inference_pb2.TokenLogprob:
    return inference_pb2.TokenLogprob(
        logprob=token.logprob,
        top_token_ids=[other for other, _ in token.top],
        top_logprobs=[logprob for _, logprob in token.top],
        rank=token.rank,
    )


def _messages(chat: inference_pb2.ChatMessages) -> list[dict[str, str]]:
    if not chat.messages:
        raise invalid("messages", "messages: must not be empty")
    for index, message in enumerate(chat.messages):
        if message.role not in _ROLES:
            role = message.role[:40]
            roles = "system, developer, user or assistant"
            raise invalid(f"messages.{index}.role", f"role must be {roles}, not {role!r}")
    # `developer` is OpenAI's newer name for `system`, and templates know only `system`.
    roles_of = [("system" if message.role == "developer" else message.role, message) for message in chat.messages]
    return [{"role": role, "content": message.content} for role, message in roles_of]


def _choices(options: inference_pb2.SamplingOptions) -> SamplingChoices:
    given = {field.name: value for field, value in options.ListFields() if field.name in _PLAIN}
    numbers = {name: given.pop(name) for name in SAMPLING if name in given}
    return SamplingChoices(
        **given,
        numbers=numbers,
        ignore_eos=options.ignore_eos,
        stop=list(options.stop),
        stop_token_ids=list(options.stop_token_ids),
        logit_bias=dict(options.logit_bias) or None,
        bad_words=[*options.bad_words, *(list(word.ids) for word in options.bad_word_ids)],
        allowed_token_ids=list(options.allowed_token_ids) or None,
    )


def _structure(options: inference_pb2.SamplingOptions) -> Structure | None:
    given = [field.name for field, _ in options.ListFields() if field.name in (*_FORMS, "choice")]
    field = f"sampling.{given[-1]}" if given else ""
    match given:
        case []:
            return None
        case ["json_schema"]:
            return from_schema(field, options.json_schema)
        case ["choice"]:
            return from_choices(field, options.choice)
        case ["regex"]:
            return Structure(field, "regex", options.regex)
        case ["grammar"]:
            return Structure(field, "grammar", options.grammar)
    raise invalid(field, f"{' and '.join(given)} exclude each other")


def _beam(options: inference_pb2.BeamOptions, choices: SamplingChoices) -> inference_pb2.BeamOptions:
    width, num_return = options.width, options.num_return or 1
    if not 1 <= num_return <= width <= MAX_SAMPLES:
        name, limit = ("num_return", width) if 1 <= width <= MAX_SAMPLES else ("width", MAX_SAMPLES)
        raise invalid(f"beam.{name}", f"beam.{name} must be between 1 and {limit}, not {getattr(options, name)}")
    penalty = options.length_penalty if options.HasField("length_penalty") else 1.0
    early_stopping = EARLY_STOPPING.get(options.early_stopping, "unknown")
    return check_beam(choices, width, num_return, penalty, early_stopping)
