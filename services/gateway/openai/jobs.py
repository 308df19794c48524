"""Turns a parsed completion or chat into jobs: its prompts as tokens, its sampling, grammar and limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.v1 import inference_pb2
from services.gateway.engine.idempotency import RequestKey
from services.gateway.engine.logprobs import Echo
from services.gateway.engine.request import GenerateJob, RequestBuilder, check_copies, check_samples
from services.gateway.engine.sampling import FieldNames
from services.gateway.errors import invalid
from services.gateway.fields.replies import NUM_PROMPT_END, reply_format, reply_structure
from services.gateway.openai import schema
from services.gateway.openai.gateway import Gateway
from services.gateway.parsing.reply import ReplyFormat

PROMPT = FieldNames(prompt="prompt")
CHAT = FieldNames(prompt="messages", num_logprobs="top_logprobs")
# Limits over all choices of an answer. A log probability takes about 70 bytes.
MAX_PROMPT_LOGPROBS = 2**16
MAX_ECHO_CHARS = 2**22
_COMPLETION_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Asked:
    """What is known of a request besides its body. `arrival_s` is a time of time.perf_counter."""

    request_id: str
    answer_id: str
    arrival_s: float
    key: RequestKey | None
    gone: Callable[[], bool]
    metadata: inference_pb2.Submission


async def completion_jobs(gateway: Gateway, body: schema.CompletionRequest, asked: Asked) -> list[GenerateJob]:
    """The jobs of all prompts and samples. Raises ApiError 400 and Gone."""
    gateway.check_generates()
    builder = gateway.builder
    prompts: Sequence[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    num_chars = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    _, best_of = check_samples(body.n, body.best_of, bool(body.stream))
    choices, metadata = body.sampling(), asked.metadata
    truncation = body.truncation(builder.max_model_len)
    num_sequences = len(prompts) * best_of
    choices.grammar = await builder.grammar(body.structure(), metadata.tenant, asked.gone, num_sequences)
    jobs: list[GenerateJob] = []
    for index, prompt in enumerate(prompts):
        if index:
            await asyncio.sleep(0)  # let other requests run between two prompts
        ids: Sequence[int]
        if isinstance(prompt, str):
            add = body.add_special_tokens is not False
            ids = await builder.encode_text(
                prompt, PROMPT, add_special_tokens=add, of_chars=num_chars, truncation=truncation, gone=asked.gone
            )
            if not prompt:
                raise invalid("prompt", "the prompt is empty")
        else:
            ids = builder.check_token_ids(prompt if truncation is None else truncation.cut(prompt), "prompt")
        if asked.key is not None and body.seed is None:
            choices.seed = asked.key.seed(index)
        job = builder.job(
            ids,
            choices,
            request_id=asked.request_id if index == 0 else f"{asked.request_id}-{index}",
            endpoint="completion",
            names=PROMPT,
            default_max_tokens=_COMPLETION_MAX_TOKENS,
            arrival_s=asked.arrival_s,
            metadata=metadata,
        )
        check_copies(job.sampling, len(prompts) * best_of)
        if body.echo:
            shown = prompt if truncation is None else ids  # an echo shows what the model gets
            job.echo = await _echo(builder, body, shown, ids, asked.gone)
            job.prompt_logprobs = body.prompt_logprobs is not None
        jobs += body.jobs(builder, job)
        check_scored_prompts(body, jobs)  # before any work for the next prompt
    return jobs


async def _echo(
    builder: RequestBuilder, body: schema.CompletionRequest, prompt: Any, ids: Sequence[int], gone: Callable[[], bool]
) -> Echo:
    if not isinstance(prompt, str):
        text = await builder.decode(ids, skip_special_tokens=False, gone=gone)
        return Echo(text, (), body.only_echoes)
    offsets: list[int] = []
    if body.logprobs is not None:
        offsets = await builder.offsets(prompt, add_special_tokens=body.add_special_tokens is not False, gone=gone)
    return Echo(prompt, offsets, body.only_echoes)


def check_scored_prompts(body: schema.SamplingFields, jobs: Sequence[GenerateJob]) -> None:
    """Raises ApiError 400 if the answer would be too long: it is formatted in one piece, and other requests wait."""
    num_top = body.sampling().prompt_logprobs
    shown = (body.n or 1) / max(body.n or 1, body.best_of or 1)
    num_chars = int(shown * sum(len(job.echo.text) for job in jobs if job.echo))
    if num_chars > MAX_ECHO_CHARS:
        message = f"echo: {num_chars} characters in all choices, and at most {MAX_ECHO_CHARS} are possible in an answer"
        raise invalid("echo", message)
    if num_top is None:
        return
    count = int((1 + num_top) * shown * sum(len(job.prompt_ids) for job in jobs))
    if count > MAX_PROMPT_LOGPROBS:
        name = "echo" if body.prompt_logprobs is None else "prompt_logprobs"
        raise invalid(
            name,
            f"{name}: {count} log probabilities of prompts in all choices, and at most {MAX_PROMPT_LOGPROBS} are "
            "possible in an answer",
        )


def _reply(gateway: Gateway, body: schema.ChatRequest, prompt_ids: Sequence[int]) -> ReplyFormat | None:
    return reply_format(
        gateway.formats,
        body.tool_use(),
        gateway.builder.prompt_end(prompt_ids, NUM_PROMPT_END),
        (body.messages[-1].content or "") if body.continue_final_message else None,
        shows_reasoning=body.include_reasoning is not False,
    )


async def chat_jobs(
    gateway: Gateway, body: schema.ChatRequest, asked: Asked, endpoint: str = "chat"
) -> list[GenerateJob]:
    """The jobs of all samples. `endpoint`: the API, for metrics and log. Raises ApiError 400 and Gone."""
    gateway.check_generates()
    names = CHAT
    if body.max_completion_tokens is not None:
        names = replace(CHAT, max_tokens="max_completion_tokens")
    gateway.check_template(body.chat_template)
    chat = body.for_template()
    ids = await gateway.builder.encode_chat(
        chat.messages,
        names,
        add_generation_prompt=chat.add_generation_prompt,
        variables=chat.variables,
        extras=chat.extras,
        truncation=body.truncation(gateway.builder.max_model_len),
        gone=asked.gone,
    )
    choices, metadata = body.sampling(), asked.metadata
    _, best_of = check_samples(body.n, body.best_of, bool(body.stream))
    reply = _reply(gateway, body, ids)
    structure = reply_structure(gateway.formats, body.tool_use(), reply, body.structure())
    choices.grammar = await gateway.builder.grammar(structure, metadata.tenant, asked.gone, best_of)
    if choices.max_tokens is None:
        await gateway.session.know_model(asked.gone)
    if asked.key is not None and body.seed is None:
        choices.seed = asked.key.seed(0)
    job = gateway.builder.job(
        ids,
        choices,
        request_id=asked.request_id,
        endpoint=endpoint,
        names=names,
        arrival_s=asked.arrival_s,
        metadata=metadata,
        reply=reply,
    )
    if (echoed := body.echoed()) is not None:
        job.echo = Echo(echoed)
    jobs = body.jobs(gateway.builder, job)
    check_scored_prompts(body, jobs[:1])  # a chat's answer has the prompt's log probabilities once
    return jobs
