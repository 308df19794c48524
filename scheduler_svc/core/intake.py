"""What may enter the queue."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from paceline.v1.common_pb2 import FinishReason, ModelInfo, RetentionRange, SamplingParams
from paceline.v1.inference_pb2 import Ending, Submission
from paceline.v1.worker_pb2 import WorkerRegistration
from scheduler_svc.core.budgets import Budgets
from scheduler_svc.core.queue import WaitingQueue
from scheduler_svc.core.rejection import (
    CODE_FAILED_PRECONDITION,
    CODE_RESOURCE_EXHAUSTED,
    Rejection,
    invalid,
)
from scheduler_svc.core.request import NO_TOKENS, TOKEN_BYTES, Request
from scheduler_svc.core.sampling_checks import (
    check_logit_tokens,
    check_prompt_logprobs,
    check_sampling,
    check_tokens,
    outside,
)
from scheduler_svc.core.types import SchedulerConfig

# Of request_id, tenant and lora: they are kept, logged and named in answers.
MAX_CHARS = 256
MAX_RETENTION_RANGES = 64
MAX_RETENTION = 100
MAX_TOKEN_INDEX = 2**32 - 1
# What a worker may say of itself. Slots and the offsets in a block have tables here, which are made when it comes; ids
# of blocks are int32.
MAX_WORKER_SIZES = {
    "block_size": 2**16,
    "num_blocks": 2**31 - 1,
    "max_num_seqs": 2**16,
    "max_batched_tokens": 2**31 - 1,
    "num_host_blocks": 2**31 - 1,
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the attached workers can serve. `pool_tokens`: the largest pool, and so the longest sequence, of any."""

    model: ModelInfo
    pool_tokens: int
    max_loras: int = 0
    # As in the model's message, which is slow to read.
    vocab_size: int = field(init=False)
    max_model_len: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "vocab_size", self.model.vocab_size)
        object.__setattr__(self, "max_model_len", self.model.max_model_len)

    @property
    def max_total_tokens(self) -> int:
        """Prompt and output of one sequence together, at the most."""
        return min(self.max_model_len, self.pool_tokens)


# Prompt, output and sampling are handed on beside their submission: each reading of bytes copies them, and each of a
# submessage makes an object. The other fields are read once where they are looked at.


def check_submission(submission: Submission, sampling: SamplingParams, prompt: bytes, output: bytes) -> bool:
    """What can be told without knowing the model. Returns whether the sampling changes the logits. Raises Rejection."""
    _check_sizes(submission, prompt, output)
    if not prompt:
        raise invalid("prompt_token_ids", "at least one token is required")
    changes_logits = check_sampling(sampling)
    if sampling.prompt_logprobs:
        check_prompt_logprobs(sampling, len(prompt) // TOKEN_BYTES)
    if not math.isfinite(priority := submission.priority):
        raise invalid("priority", f"{priority} is not a finite number")
    if not math.isfinite(deadline_s := submission.deadline_s):
        raise invalid("deadline_s", f"{deadline_s} is not a finite number")
    if deadline_s < 0:
        raise invalid("deadline_s", f"{deadline_s} is negative; 0 means no deadline")
    if ranges := submission.cache_retention:
        _check_retention(ranges, len(prompt) // TOKEN_BYTES)
    return changes_logits


def _check_retention(ranges: Sequence[RetentionRange], num_prompt_tokens: int) -> None:
    if len(ranges) > MAX_RETENTION_RANGES:
        raise invalid("cache_retention", f"has {len(ranges)} ranges, {MAX_RETENTION_RANGES} are possible")
    for one in ranges:
        if one.priority > MAX_RETENTION:
            raise invalid("cache_retention", f"priority: {one.priority} is not within 0..{MAX_RETENTION}")
        if one.end and one.end <= one.start:
            raise invalid("cache_retention", f"end: {one.end} is not after start, {one.start}")
    reached = 0.0
    for one in sorted(_in_tokens(ranges, num_prompt_tokens), key=lambda r: r.start):
        if one.start < reached:
            raise invalid("cache_retention", f"start: {one.start} lies within the range before")
        reached = one.end or math.inf


def _check_sizes(submission: Submission, prompt: bytes, output: bytes) -> None:
    if len(prompt) % TOKEN_BYTES:
        raise invalid("prompt_token_ids", "is not packed int32")
    if len(output) % TOKEN_BYTES:
        raise invalid("output_token_ids", "is not packed int32")
    if len(submission.request_id) > MAX_CHARS:
        raise _too_long("request_id", submission.request_id)
    if len(submission.tenant) > MAX_CHARS:
        raise _too_long("tenant", submission.tenant)
    if len(submission.lora) > MAX_CHARS:
        raise _too_long("lora", submission.lora)
    if len(submission.cache_salt) > MAX_CHARS:
        raise _too_long("cache_salt", submission.cache_salt)


def _too_long(name: str, text: str) -> Rejection:
    return invalid(name, f"has {len(text)} characters, {MAX_CHARS} are possible")


def check_limits(
    prompt: bytes, output: bytes, sampling: SamplingParams, lora: str, limits: Limits, changes_logits: bool = True
) -> None:
    """What the model and the pools allow; `changes_logits`: as check_submission found. Raises Rejection."""
    vocab, longest, pool = limits.vocab_size, limits.max_model_len, limits.pool_tokens
    check_tokens("prompt_token_ids", prompt, vocab)
    if output:
        check_tokens("output_token_ids", output, vocab)
    for token in sampling.stop_token_ids or ():  # most have none, which is quicker to ask than to go through
        if token >= vocab:
            raise outside("stop_token_ids", token, vocab)
    if changes_logits:
        check_logit_tokens(sampling, vocab)
    if lora and not limits.max_loras:
        raise invalid("lora", f"{lora!r}: no attached worker serves adapters")
    num_tokens, max_tokens = len(prompt) // TOKEN_BYTES, sampling.max_tokens
    total = num_tokens + max_tokens
    # The last token of a sequence is never computed, so it needs no room in the pool.
    if num_tokens >= longest:
        raise invalid("prompt_token_ids", f"{num_tokens} tokens leave no room for output in a length of {longest}")
    if num_tokens > pool:
        raise invalid("prompt_token_ids", f"a prompt of {num_tokens} tokens does not fit a pool of {pool} tokens")
    if total > longest:
        verdict = f"exceed the model's length of {longest}"
    elif total - 1 > pool:
        verdict = f"can never fit a pool of {pool} tokens"
    else:
        return
    raise invalid("max_tokens", f"prompt of {num_tokens} tokens and max_tokens of {max_tokens} {verdict}")


def new_request(
    session_id: str,
    seniority: int,
    submission: Submission,
    sampling: SamplingParams,
    prompt: bytes,
    output: bytes,
    now_s: float,
) -> Request:
    own = SamplingParams()  # a part of the submission would keep all of it in memory, prompt and all
    own.CopyFrom(sampling)
    stops, deadline_s = own.stop_token_ids, submission.deadline_s
    return Request(
        seniority=seniority,
        session_id=session_id,
        handle=submission.handle,
        request_id=submission.request_id,
        prompt=prompt,
        output=bytearray(output),
        sampling=own,
        arrival_s=now_s,
        priority=submission.priority,
        tenant=submission.tenant,
        lora=submission.lora,
        deadline_s=now_s + deadline_s if deadline_s else math.inf,
        place=seniority,
        extra_stop_ids=frozenset(stops) if stops else NO_TOKENS,
        cache_salt=submission.cache_salt,
        cache_retention=tuple(_in_tokens(submission.cache_retention, len(prompt) // TOKEN_BYTES)),
    )


def _in_tokens(ranges: Sequence[RetentionRange], num_prompt_tokens: int) -> Iterator[RetentionRange]:
    """Copies (which do not keep the submission in memory) that count from the first token of the prompt. Where there
    are ranges of what is generated, the others end with the prompt."""
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


def check_queue(queue: WaitingQueue, request: Request, config: SchedulerConfig, budgets: Budgets) -> None:
    """Whether the queue takes one more. Raises Rejection."""
    tokens, tenant = request.num_tokens, None
    queued = queue.tenant_tokens.get(request.tenant, 0)
    if len(queue) >= config.max_queued_requests:
        why, excess = f"queue: full with {len(queue)} requests", tokens
    elif queue.num_tokens + tokens > config.max_queued_tokens:
        why = f"queue: {queue.num_tokens} tokens wait, the limit is {config.max_queued_tokens}"
        excess = queue.num_tokens + tokens - config.max_queued_tokens
    elif config.tenant_max_queued_tokens and queued + tokens > config.tenant_max_queued_tokens:
        limit = config.tenant_max_queued_tokens
        why = f"tenant: {queued} tokens of tenant {request.tenant!r} wait, its limit is {limit}"
        excess, tenant = queued + tokens - limit, request.tenant
    else:
        return
    retry_after_s = budgets.retry_after_s(excess, tokens, request.arrival_s, tenant)
    raise Rejection(CODE_RESOURCE_EXHAUSTED, why, retry_after_s=retry_after_s)


def recheck(request: Request, limits: Limits) -> Rejection | None:
    """The verdict on a request that was accepted before the limits were known."""
    try:
        check_limits(request.prompt, bytes(request.output), request.sampling, "", limits)
    except Rejection as rejection:
        return rejection
    return None


def check_registration(new: WorkerRegistration, others: list[WorkerRegistration], promised: Limits | None) -> None:
    """A worker serves the model of the others, or of the live requests, in blocks of their size. Raises Rejection."""
    for name, most in MAX_WORKER_SIZES.items():
        size, least = getattr(new, name), 0 if name == "num_host_blocks" else 1
        if not least <= size <= most:
            raise invalid(name, f"must be between {least} and {most}, not {size}")
    expected = others[0].model if others else promised.model if promised else None
    if expected is not None and new.model.fingerprint != expected.fingerprint:
        raise Rejection(
            CODE_FAILED_PRECONDITION,
            f"model: this scheduler serves {expected.name} ({expected.fingerprint[:12]}), "
            f"not {new.model.name} ({new.model.fingerprint[:12]})",
            "model",
        )
    if others and new.block_size != others[0].block_size:
        message = f"block_size: {new.block_size}, but the workers here use {others[0].block_size}"
        raise Rejection(CODE_FAILED_PRECONDITION, message, "block_size")


def explain_rejection(ending: Ending, rejection: Rejection) -> None:
    """What the sender of a failed request is told."""
    ending.reason = FinishReason.FINISH_REASON_ERROR
    ending.code = rejection.code
    ending.message = rejection.message
    ending.field = rejection.field
    ending.retry_after_s = rejection.retry_after_s
