"""InferenceService.Generate at the scheduler itself: token ids in, token ids out, over a session with one request."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Iterator

import grpc
import numpy as np

from paceline.request_fields import METADATA, SAMPLING, SamplingParam
from paceline.v1.common_pb2 import FinishReason, PromptLogprobs, SamplingParams
from paceline.v1.inference_pb2 import (
    Ending,
    GenerateRequest,
    GenerateResponse,
    SessionRequest,
    SessionResponse,
    Submission,
    TokenLogprob,
    TokenScore,
    Usage,
)
from scheduler_svc.core.admission.validation import Limits
from scheduler_svc.core.rejection import Rejection, invalid
from services.runtime.tracing.context import current_context

HANDLE = 1
STATUS_BY_CODE = {status.value[0]: status for status in grpc.StatusCode}
_FORMS = (("json_schema", ""), ("regex", ""), ("choice", ""), ("grammar", ""))


def _refuse_for_gateways(request: GenerateRequest) -> None:
    for name, instead in (("stop", "stop_token_ids, or "), ("bad_words", "bad_word_ids, or "), *_FORMS):
        if getattr(request.sampling, name):
            raise invalid(name, f"the scheduler does not handle text; use {instead}the gateway")
    if request.resume_after != len(request.resume_token_ids):
        raise invalid(
            "resume_after", "the scheduler stores no answers, so resume_token_ids must contain this many token ids"
        )
    is_random = request.sampling.temperature or not request.sampling.HasField("temperature")
    for name in ("idempotency_key", "resume_token_ids"):
        if getattr(request, name) and is_random and not request.sampling.HasField("seed"):
            raise invalid(name, "the scheduler stores no answers, so a seed is needed to get the same tokens again")


def _check_number(param: SamplingParam, value: float, is_search: bool) -> None:
    """Check only what the core cannot see, or takes for the default. Raises Rejection."""
    if param.zero_is_default and not value:
        raise invalid(param.name, "must be above 0")
    if is_search and param.processor != "penalty" and value != param.beam_value:
        raise invalid(param.name, "beam search does not sample; leave it out")


def to_submission(request: GenerateRequest, limits: Limits | None) -> Submission:
    """A submission with the defaults filled in. Raises Rejection."""
    if request.WhichOneof("prompt") != "token_ids":
        raise invalid("prompt", "the scheduler takes token_ids only; text and messages are for the gateway")
    if limits and request.model not in ("", limits.model.name):
        raise invalid("model", f"{request.model[:120]!r} is not served here, {limits.model.name!r} is")
    options = request.sampling
    _refuse_for_gateways(request)
    ids = np.array(request.token_ids.ids, np.int32)
    given = {field.name: value for field, value in options.ListFields()}
    for name in ("max_tokens", "min_tokens", "logprobs", "prompt_logprobs"):
        if (value := given.get(name, 0)) < 0:
            raise invalid(name, f"{value} is negative")
    for name, param in SAMPLING.items():
        if name in given:
            _check_number(param, given[name], request.HasField("beam"))
    for name in ("stop_token_ids", "logit_bias"):
        if any(token < 0 for token in getattr(options, name)):
            raise invalid(name, "a token id is negative")
    room = max(1, limits.max_total_tokens - len(ids)) if limits else 16
    submission = Submission(
        handle=HANDLE,
        request_id=request.request_id or f"gen-{secrets.token_hex(8)}",
        prompt_token_ids=ids.tobytes(),
        output_token_ids=np.array(request.resume_token_ids, np.int32).tobytes(),
        sampling=SamplingParams(
            seed=options.seed if options.HasField("seed") else secrets.randbits(63),
            max_tokens=options.max_tokens if options.HasField("max_tokens") else room,
            min_tokens=options.min_tokens,
            ignore_eos=options.ignore_eos,
            stop_token_ids=options.stop_token_ids,
            logprobs=options.HasField("logprobs"),
            num_top_logprobs=options.logprobs,
            logit_bias=options.logit_bias,
            bad_words=[np.array(word.ids, np.int32).tobytes() for word in options.bad_word_ids],
            allowed_token_ids=np.array(options.allowed_token_ids, np.int32).tobytes(),
            prompt_logprobs=options.HasField("prompt_logprobs") and not request.resume_after,
            num_top_prompt_logprobs=options.prompt_logprobs,
        ),
        beam=request.beam if request.HasField("beam") else None,
        **{name: getattr(request, name) for name in METADATA},
        cache_retention=request.cache_retention,
    )
    if (trace := current_context()) is not None:
        submission.trace_id, submission.span_id = trace.trace_id, trace.span_id if trace.sampled else ""
    for name, param in SAMPLING.items():
        setattr(submission.sampling, name, param.to_wire(given.get(name, param.default)))
    return submission


async def generate(
    request: GenerateRequest,
    responses: AsyncIterator[SessionResponse],
    send: Callable[[SessionRequest], None],
    limits: Limits | None,
    context: grpc.aio.ServicerContext[GenerateRequest, GenerateResponse],
) -> AsyncIterator[GenerateResponse]:
    """Submit the request and yield its responses. Aborts the call with the status of a failed request."""
    try:
        submission = to_submission(request, limits)
    except Rejection as rejection:
        await abort(context, rejection.code, rejection.message, rejection.retry_after_s)
    num_tokens, num_read = request.resume_after, 0
    if (reason := _ended_already(request, submission, limits)) is not None:
        usage = _usage(submission, num_tokens, Ending())
        yield GenerateResponse(request_id=submission.request_id, finish_reason=reason, usage=usage, position=num_tokens)
        return
    send(SessionRequest(submissions=[submission]))
    prompt: dict[int, TokenLogprob] = {}  # by position, until they are delivered with the first token
    async for response in responses:
        num_read += 1
        send(SessionRequest(responses_read=num_read))
        tokens = np.frombuffer(response.token_ids, np.int32).tolist()
        num_tokens += len(tokens)
        message = GenerateResponse(
            request_id=submission.request_id,
            token_ids=tokens,
            logprobs=map(_token_logprob, response.scores),
            position=num_tokens - len(tokens),
        )
        for part in response.prompt_scores:
            prompt.update(_prompt_logprobs(part.logprobs))
        if tokens:
            message.prompt_logprobs.extend(prompt[position] for position in sorted(prompt))
            prompt.clear()
        if response.endings:
            ending = response.endings[0]
            if ending.reason == FinishReason.FINISH_REASON_ERROR:
                await abort(context, ending.code, ending.message, ending.retry_after_s)
            message.finish_reason = ending.reason
            for i, found in enumerate(ending.hypotheses):
                ids = np.frombuffer(found.token_ids, np.int32).tolist()
                num_tokens += len(ids)
                if not i:
                    message.token_ids[:] = ids
                message.hypotheses.add(token_ids=ids, score=found.score, finish_reason=found.reason)
            message.usage.CopyFrom(_usage(submission, num_tokens, ending))
            yield message
            return
        if tokens:
            yield message


def _ended_already(
    request: GenerateRequest, submission: Submission, limits: Limits | None
) -> FinishReason.ValueType | None:
    """The finish reason if the client already has every token (only the last message was lost), else None."""
    tokens, sampling = request.resume_token_ids, submission.sampling
    eos = limits.model.eos_token_ids if limits and not sampling.ignore_eos else ()
    if tokens and (tokens[-1] in sampling.stop_token_ids or tokens[-1] in eos):
        return FinishReason.FINISH_REASON_STOP
    return FinishReason.FINISH_REASON_LENGTH if tokens and len(tokens) >= sampling.max_tokens else None


def _token_logprob(score: TokenScore) -> TokenLogprob:
    return TokenLogprob(
        logprob=score.logprob,
        top_token_ids=np.frombuffer(score.top_token_ids, np.int32).tolist(),
        top_logprobs=np.frombuffer(score.top_logprobs, np.float32).tolist(),
    )


def _prompt_logprobs(part: PromptLogprobs) -> Iterator[tuple[int, TokenLogprob]]:
    """By position. After a preemption the same values come again."""
    logprobs, ranks = np.frombuffer(part.logprobs, np.float32), np.frombuffer(part.ranks, np.int32).tolist()
    ids = np.frombuffer(part.top_token_ids, np.int32).reshape(len(ranks), -1).tolist()
    values = np.frombuffer(part.top_logprobs, np.float32).reshape(len(ranks), -1).tolist()
    for i, logprob in enumerate(logprobs.tolist()):
        yield part.start + i, TokenLogprob(logprob=logprob, top_token_ids=ids[i], top_logprobs=values[i], rank=ranks[i])


def _usage(submission: Submission, num_tokens: int, ending: Ending) -> Usage:
    prompt_tokens = len(submission.prompt_token_ids) // 4
    return Usage(prompt_tokens=prompt_tokens, completion_tokens=num_tokens, cached_tokens=ending.cached_tokens)


async def abort(
    context: grpc.aio.ServicerContext[GenerateRequest, GenerateResponse], code: int, message: str, retry_after_s: float
) -> None:
    trailers = (("retry-after-s", f"{retry_after_s:g}"),) if retry_after_s else ()
    await context.abort(STATUS_BY_CODE[code], message, trailers)
