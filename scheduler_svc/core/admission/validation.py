"""Checks of submissions and of worker registrations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.request_fields import METADATA
from paceline.v1.common_pb2 import (
    POOLING_LAST,
    POOLING_MEAN,
    FinishReason,
    ModelInfo,
    Pooling,
    RetentionRange,
    SamplingParams,
)
from paceline.v1.inference_pb2 import Ending, QueueLimit, Submission
from paceline.v1.worker_pb2 import WorkerRegistration
from scheduler_svc.core.admission.budgets import ClassBudgets
from scheduler_svc.core.admission.queue import ClassQueues, WaitingQueue
from scheduler_svc.core.admission.sampling_checks import (
    MAX_STOP_TOKEN_IDS,
    check_logit_tokens,
    check_prompt_logprobs,
    check_sampling,
    check_tokens,
    outside,
)
from scheduler_svc.core.rejection import CODE_RESOURCE_EXHAUSTED, Rejection, failed_precondition, invalid
from scheduler_svc.core.requests.request import TOKEN_BYTES, Request, SubmissionMetadata
from scheduler_svc.core.requests.trace import RequestTrace
from scheduler_svc.core.types import SchedulerConfig

_EMBEDDING_RULE = (
    "an embedding request must have max_tokens 1 and none of: output tokens, fork_of, beam, logprobs, prompt_logprobs, "
    "grammar"
)
MAX_CHARS = 256  # of each text of a request, because texts are kept, logged and named in answers
_TEXTS = (
    "answer_id",
    "lora",
    "conversation",
    "owner",
    "trace_id",
    *(name for name, field in METADATA.items() if field.kind is str),
)
# A submission has its deadline in seconds from now. A request has it as a time of the scheduler's clock.
_KEPT = tuple(name for name in METADATA if name != "deadline_s")
_NUMBERS = tuple(name for name, field in METADATA.items() if field.kind is float)
_HEX_DIGITS = set("0123456789abcdef")
MAX_GRAMMAR_CHARS = 2**16
MAX_RETENTION_RANGES = 64
MAX_RETENTION = 100
MAX_TOKEN_INDEX = 2**32 - 1
# Limits of the sizes in a worker's registration: the scheduler allocates tables for them. Block ids are int32.
MAX_WORKER_SIZES = {
    "block_size": 2**16,
    "num_blocks": 2**31 - 1,
    "max_num_seqs": 2**16,
    "max_batched_tokens": 2**31 - 1,
    "num_host_blocks": 2**31 - 1,
    "window": 8,
}
# For these sizes, 0 means none or the default.
OPTIONAL_SIZES = ("num_host_blocks", "window")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the attached workers can serve."""

    model: ModelInfo
    pool_tokens: int  # of the largest pool, and so of the longest sequence
    max_loras: int = 0

    @property
    def max_total_tokens(self) -> int:
        """Prompt and output tokens of one sequence together: every request may ask for this many. If the pool is the
        limit, check_limits accepts one token more."""
        return min(self.model.max_model_len, self.pool_tokens)


# The checks read the request, not the submission, for texts and tokens: each read of such a field of a message makes an
# object, and copies bytes.
def check_submission(request: Request, submission: Submission) -> bool:
    """Check what does not depend on the model. Returns whether the sampling changes the logits. Raises Rejection."""
    _check_sizes(request)
    if not request.prompt:
        raise invalid("prompt_token_ids", "at least one token is required")
    changes_logits = check_sampling(request.sampling)
    _check_pooling(request, submission)
    if request.sampling.prompt_logprobs:
        check_prompt_logprobs(request.sampling, request.num_prompt_tokens)
    for name in _NUMBERS:
        if not math.isfinite(value := getattr(submission, name)):
            raise invalid(name, f"{value} is not a finite number")
    if (deadline_s := submission.deadline_s) < 0:
        raise invalid("deadline_s", f"{deadline_s} is negative; 0 means no deadline")
    if (slo_s := submission.ttft_slo_s) < 0:
        raise invalid("ttft_slo_s", f"{slo_s} is negative; 0 means no goal")
    if not 0 <= (min_slo_s := submission.min_slo_s) < math.inf:  # NaN would break the order
        raise invalid("min_slo_s", f"{min_slo_s} is not a finite number of at least 0; 0 means none")
    if ranges := submission.cache_retention:
        _check_retention(ranges, request.num_prompt_tokens)
    return changes_logits


def _check_pooling(request: Request, submission: Submission) -> None:
    """Check that a request for a vector asks for nothing that only generated tokens have. Raises Rejection."""
    if not request.metadata.pooling:
        return
    if request.metadata.pooling not in (POOLING_LAST, POOLING_MEAN):
        raise invalid("pooling", f"{request.metadata.pooling} is unknown")
    sampling = request.sampling
    wrong = request.output or submission.fork_of or submission.HasField("beam") or sampling.max_tokens != 1
    if wrong or sampling.logprobs or sampling.prompt_logprobs or sampling.grammar:
        raise invalid("pooling", _EMBEDDING_RULE)


def _check_retention(ranges: Sequence[RetentionRange], num_prompt_tokens: int) -> None:
    if len(ranges) > MAX_RETENTION_RANGES:
        raise invalid("cache_retention", f"has {len(ranges)} ranges; at most {MAX_RETENTION_RANGES} are possible")
    for one in ranges:
        if one.priority > MAX_RETENTION:
            raise invalid("cache_retention", f"priority: {one.priority} is not within 0..{MAX_RETENTION}")
        if one.end and one.end <= one.start:
            raise invalid("cache_retention", f"end: {one.end} is not after start, {one.start}")
    reached = 0.0
    for one in sorted(_in_tokens(ranges, num_prompt_tokens), key=lambda r: r.start):
        if one.start < reached:
            other = "another range, which begins before it or at the same token"
            raise invalid("cache_retention", f"start: {one.start} lies within {other}")
        reached = one.end or math.inf


def _check_sizes(request: Request) -> None:
    if len(request.prompt) % TOKEN_BYTES:
        raise invalid("prompt_token_ids", "is not packed int32")
    if len(request.output) % TOKEN_BYTES:
        raise invalid("output_token_ids", "is not packed int32")
    texts = {"request_id": request.request_id, **{name: getattr(request.metadata, name) for name in _TEXTS}}
    for name, text in texts.items():
        if (count := len(text)) > MAX_CHARS:
            raise invalid(name, f"has {count} characters; at most {MAX_CHARS} are possible")
    if (count := len(request.sampling.grammar)) > MAX_GRAMMAR_CHARS:
        raise invalid("grammar", f"has {count} characters; at most {MAX_GRAMMAR_CHARS} are possible")
    if (count := len(request.sampling.stop_token_ids)) > MAX_STOP_TOKEN_IDS:
        raise invalid("stop_token_ids", f"has {count} tokens; at most {MAX_STOP_TOKEN_IDS} are possible")


def check_limits(request: Request, limits: Limits, changes_logits: bool = True) -> None:
    """Check the limits of the model and of the pools. `changes_logits`: as check_submission found. Raises Rejection."""
    vocab, longest = limits.model.vocab_size, limits.model.max_model_len
    _check_kind(request, limits.model)
    check_tokens("prompt_token_ids", request.prompt, vocab)
    if request.output:
        check_tokens("output_token_ids", bytes(request.output), vocab)
    for token in request.sampling.stop_token_ids if request.extra_stop_ids else ():
        if token >= vocab:
            raise outside("stop_token_ids", token, vocab)
    if changes_logits:
        check_logit_tokens(request.sampling, vocab)
    if request.metadata.lora and not limits.max_loras:
        raise invalid("lora", f"{request.metadata.lora!r}: no attached worker serves adapters")
    num_tokens, total = request.num_prompt_tokens, request.max_total_tokens
    if request.metadata.pooling:
        if num_tokens > longest:
            raise invalid("prompt_token_ids", f"{num_tokens} tokens exceed the model's length of {longest}")
        longest += 1  # an embedding has max_tokens 1, but generates no token
    if num_tokens >= longest:
        raise invalid("prompt_token_ids", f"{num_tokens} tokens leave no room for output in a length of {longest}")
    # A request that was accepted before may have been accepted for a larger pool. After a restart, the worker with that
    # pool may register last.
    pool = longest if request.metadata.accepted_before else limits.pool_tokens
    if num_tokens > pool:
        raise invalid("prompt_token_ids", f"a prompt of {num_tokens} tokens does not fit a pool of {pool} tokens")
    if total > longest:
        verdict = f"exceed the model's length of {longest}"
    elif total - 1 > pool:  # the KV of a sequence's last token is never computed, so it needs no room in the pool
        verdict = f"can never fit a pool of {pool} tokens"
    else:
        return
    raise invalid("max_tokens", f"prompt of {num_tokens} tokens and max_tokens of {total - num_tokens} {verdict}")


def _check_kind(request: Request, model: ModelInfo) -> None:
    """Check that the model does what the request asks for: tokens, or a vector that is pooled in one way."""
    pooling = model.embedding.pooling if model.HasField("embedding") else 0
    if request.metadata.pooling == pooling:
        return
    if not request.metadata.pooling:
        raise invalid("model", f"{model.name} is an embedding model, which generates no text")
    if not pooling:
        raise invalid("model", f"{model.name} generates text and makes no embeddings")
    raise invalid("pooling", f"{model.name} uses another pooling")


def new_request(session_id: str, submission: Submission, now_s: float) -> Request:
    """A request from a submission, unchecked. It has no arrival index yet."""
    own = SamplingParams()  # a field of the submission would keep the whole submission in memory, prompt included
    own.CopyFrom(submission.sampling)
    prompt, stops = submission.prompt_token_ids, own.stop_token_ids
    deadline_s, retention = submission.deadline_s, submission.cache_retention
    # check_submission refuses too many ranges. They are not converted here: millions would take half a minute.
    converts = 0 < len(retention) <= MAX_RETENTION_RANGES
    return Request(
        arrival_index=0,
        session_id=session_id,
        handle=submission.handle,
        request_id=submission.request_id,
        prompt=prompt,
        output=bytearray(submission.output_token_ids),
        sampling=own,
        arrival_s=now_s,
        metadata=SubmissionMetadata(
            lora=submission.lora,
            answer_id=submission.answer_id,
            cache_retention=tuple(_in_tokens(retention, len(prompt) // TOKEN_BYTES)) if converts else (),
            deadline_s=now_s + deadline_s if deadline_s else math.inf,
            conversation=submission.conversation,
            owner=submission.owner,
            min_slo_s=submission.min_slo_s,
            trace_id=submission.trace_id,
            accepted_before=submission.accepted_before,
            pooling=submission.pooling,
            **{name: getattr(submission, name) for name in _KEPT},
        ),
        extra_stop_ids=frozenset(stops) if 0 < len(stops) <= MAX_STOP_TOKEN_IDS else frozenset(),
    )


def trace_of(submission: Submission) -> RequestTrace:
    """The trace of a submission with a span. Raises Rejection."""
    for name, value, num_digits in (("trace_id", submission.trace_id, 32), ("span_id", submission.span_id, 16)):
        if len(value) != num_digits or not set(value) <= _HEX_DIGITS or not value.strip("0"):
            raise invalid(name, f"{value[:40]!r} is not {num_digits} lower-case hexadecimal digits, not all 0")
    return RequestTrace(submission.trace_id, submission.span_id)


def _in_tokens(ranges: Sequence[RetentionRange], num_prompt_tokens: int) -> Iterator[RetentionRange]:
    """The ranges, counted from the first token of the prompt. They are copies, because the submission's own ranges
    would keep the whole submission in memory. If there are ranges for generated tokens, the other ranges end with the
    prompt."""
    about_output = any(one.decode for one in ranges)
    for one in ranges:
        start, end = one.start, one.end
        if one.decode:
            start = min(start + num_prompt_tokens, MAX_TOKEN_INDEX)
            end = min(end + num_prompt_tokens, MAX_TOKEN_INDEX) if end else 0
        elif about_output:
            end = min(end or num_prompt_tokens, num_prompt_tokens)
            if start >= end:
                continue
        yield RetentionRange(start=start, end=end, priority=one.priority, duration_ms=one.duration_ms)


def queue_credit(queue: WaitingQueue, config: SchedulerConfig) -> int:
    """Online requests that the queue still takes, if their tokens fit. 0: it takes none."""
    return max(0, config.max_queued_requests - queue.num_requests) if queue.num_tokens < config.max_queued_tokens else 0


def limit_reached(queue: WaitingQueue, config: SchedulerConfig) -> QueueLimit.ValueType:
    """Why `queue_credit` is 0. Unspecified if it is not."""
    if queue.num_tokens >= config.max_queued_tokens:
        return QueueLimit.QUEUE_LIMIT_TOKENS
    full = queue.num_requests >= config.max_queued_requests
    return QueueLimit.QUEUE_LIMIT_REQUESTS if full else QueueLimit.QUEUE_LIMIT_UNSPECIFIED


def check_queue(queues: ClassQueues, request: Request, config: SchedulerConfig, all_budgets: ClassBudgets) -> None:
    """Check that the queue of the request's class has room for it, and note the request for the retry-after estimates.
    Raises Rejection. An empty queue accepts a request of any size; otherwise a request larger than the token limit
    could never enter."""
    queue, budgets = queues.of(request), all_budgets.of(request)
    queue_limit = QueueLimit.QUEUE_LIMIT_TOKENS
    name, max_requests, max_tokens = "queue", config.max_queued_requests, config.max_queued_tokens
    if request.metadata.offline:
        name = "offline queue"
        max_requests, max_tokens = config.max_queued_offline_requests, config.max_queued_offline_tokens
    tokens, tenant = request.num_tokens, None
    queued = queue.tenant_tokens.get(request.metadata.tenant, 0)
    if queue.num_requests >= max_requests:
        queue_limit = QueueLimit.QUEUE_LIMIT_REQUESTS
        why = f"{name}: full with {queue.num_requests} requests"
        # One request has to leave. How many tokens it has is not known, only the average.
        excess = tokens = queue.num_tokens // max(queue.num_requests, 1)
    elif queue.num_tokens and queue.num_tokens + tokens > max_tokens:
        why = f"{name}: {queue.num_tokens} tokens wait, the limit is {max_tokens}"
        excess = queue.num_tokens + tokens - max_tokens
    elif queued and 0 < (limit := config.tenant_max_queued_tokens) < queued + tokens:
        why = f"tenant: {queued} tokens of tenant {request.metadata.tenant!r} wait, its limit is {limit}"
        excess, tenant = queued + tokens - limit, request.metadata.tenant
    else:
        budgets.accept(request)
        return
    retry_after_s = budgets.retry_after_s(excess, tokens, request.arrival_s, tenant)
    raise Rejection(CODE_RESOURCE_EXHAUSTED, why, retry_after_s=retry_after_s, queue_limit=queue_limit)


def is_sample_of(parent: Request, request: Request) -> bool:
    """Whether both are samples of one client request, and share their blocks."""
    of_parent = parent.metadata.tenant, parent.namespace, parent.metadata.offline, parent.prompt
    return of_parent == (request.metadata.tenant, request.namespace, request.metadata.offline, request.prompt)


def _shown(model: ModelInfo) -> str:
    """The model with a part of its fingerprint, and its pooling: the same checkpoint may be served in several ways."""
    kind = ""
    if model.HasField("embedding"):
        kind = f", pooling {Pooling.Name(model.embedding.pooling).removeprefix('POOLING_').lower()}"
    return f"{model.name} ({model.fingerprint[:12]}{kind})"


def check_registration(
    new: WorkerRegistration, others: list[WorkerRegistration], promised: Limits | None, allow_mixed_dtypes: bool
) -> None:
    """Check the sizes of a worker. Check that its model and data type are those of the other workers, or without other
    workers those in `promised`, and that its block size is that of the other workers. Raises Rejection; for a
    difference, it names both sides."""
    for name, most in MAX_WORKER_SIZES.items():
        size, least = getattr(new, name), 0 if name in OPTIONAL_SIZES else 1
        if not least <= size <= most:
            raise invalid(name, f"must be between {least} and {most}, not {size}")
    expected = others[0].model if others else promised.model if promised else None
    if expected is not None and new.model.fingerprint != expected.fingerprint:
        served, offered = _shown(expected), _shown(new.model)
        raise failed_precondition("model", f"this scheduler serves {served}, not {offered}")
    if expected is not None and new.model.dtype != expected.dtype and not allow_mixed_dtypes:
        raise failed_precondition(
            "dtype",
            f"this scheduler serves {expected.name} in {expected.dtype}, not in {new.model.dtype} "
            "(--allow-mixed-dtypes of the scheduler takes both, which may change tokens)",
        )
    if others and new.block_size != others[0].block_size:
        raise failed_precondition("block_size", f"{new.block_size}, but the workers here use {others[0].block_size}")


def explain_rejection(ending: Ending, rejection: Rejection) -> None:
    """Write the rejection into the ending for the sender."""
    ending.reason = FinishReason.FINISH_REASON_ERROR
    ending.code = rejection.code
    ending.message = rejection.message
    ending.field = rejection.field
    ending.retry_after_s = rejection.retry_after_s
    ending.queue_limit = rejection.queue_limit
