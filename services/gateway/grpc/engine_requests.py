"""Requests that come through the engine APIs of other systems (contracts): vLLM, SGLang and KServe.

The code of each contract submits, reads and aborts its requests here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from paceline.v1 import common_pb2, inference_pb2
from paceline.v1.common_pb2 import FinishReason
from services.gateway.access.caller import Caller
from services.gateway.embeddings.calls import EmbedCall, Embedded, open_embedding, read_vector
from services.gateway.engine.generation import Generation
from services.gateway.engine.list_limits import check_length
from services.gateway.engine.logprobs import ScoredToken
from services.gateway.engine.request import check_copies, check_samples, too_long
from services.gateway.engine.request_store import Reading
from services.gateway.engine.sampling import FieldNames, SamplingChoices
from services.gateway.errors import CLIENT_CLOSED_REQUEST, ApiError, invalid
from services.gateway.grammars.structure import Structure
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.middleware import sanitised_request_id

_RUNNING = common_pb2.FINISH_REASON_UNSPECIFIED
# Of one answer. A log probability takes about 10 bytes.
MAX_PROMPT_LOGPROBS = 2**18
_LISTS = ("stop", "stop_token_ids", "logit_bias", "bad_words")


class Aborted(Exception):
    """The router has aborted the request."""


@dataclass(frozen=True, slots=True)
class EngineCall:
    """A call that generates, before its fields are read. `num_bytes`: of its message."""

    request_id: str
    endpoint: str  # the contract, in metrics and in the request log
    caller: Caller
    num_bytes: int
    arrival_s: float = field(default_factory=time.perf_counter)


@dataclass(slots=True)
class EngineRequest:
    """A request of one contract. `prompt`: a text or token ids. `named_tenant`: as in Caller.permit."""

    prompt: str | Sequence[int]
    choices: SamplingChoices
    names: FieldNames
    structure: Structure | None = None
    n: int = 1
    metadata: inference_pb2.Submission = field(default_factory=inference_pb2.Submission)
    named_tenant: str | None = None


class SamplePiece(NamedTuple):
    """New tokens of one sample. `finish_reason` is 0 (unspecified) while it runs; with an abort it is ABORT."""

    generation: Generation
    text: str
    token_ids: list[int]
    scored: list[ScoredToken]
    prompt_scored: list[ScoredToken]  # only in the first piece of the first sample
    finish_reason: FinishReason.ValueType

    @property
    def sample(self) -> int:
        """The index of the sample."""
        return self.generation.job.sample

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the sample."""
        return self.generation.text_stream.stop_string

    @property
    def last_token(self) -> int | None:
        """The token that ended the sample: a stop token or an end of sequence."""
        ended_by_token = self.finish_reason == common_pb2.FINISH_REASON_STOP and self.matched_stop is None
        return self.token_ids[-1] if ended_by_token and self.token_ids else None


class EngineRequests:
    """Submits the requests of all contracts. Finds live requests by the name of their API key and the request id that
    the router gave them."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.last_arrival_s = 0.0  # Unix time
        self._live: dict[tuple[str, str], set[Reading]] = {}

    @property
    def num_live(self) -> int:
        """Live requests."""
        return sum(map(len, self._live.values()))

    @asynccontextmanager
    async def admit(self, call: EngineCall) -> AsyncIterator[None]:
        """The context in which a call's fields are read and its request is submitted. Entering it checks quotas and
        capacity, and waits until the parse limiter lets the call in. A refused call is counted. Raises ApiError."""
        gateway = self.gateway
        try:
            with gateway.access.quotas.entering(call.caller.key, new=True), gateway.held_body() as held:
                held.add(call.num_bytes)
                gateway.check_capacity()
                await gateway.wait_to_parse(num_bytes=call.num_bytes, new=True)
                yield
        except ApiError as error:
            gateway.refused(call.endpoint, sanitised_request_id(call.request_id), error)
            raise

    async def open(self, call: EngineCall, asked: EngineRequest) -> Reading:
        """Submit the request. Pass the result to `pieces`. Raises ApiError."""
        self.last_arrival_s = time.time()
        gateway, builder = self.gateway, self.gateway.builder
        gateway.check_generates()
        names, choices, prompt = asked.names, asked.choices, asked.prompt
        for name in _LISTS:
            check_length(name, len(getattr(choices, name) or ()), names.prefix)
        if not isinstance(prompt, str) and len(prompt) > builder.max_model_len:
            raise too_long(names.prompt, str(len(prompt)), builder.max_model_len)
        check_samples(asked.n, None, stream=True)
        metadata = call.caller.permit(asked.metadata, asked.named_tenant)
        if isinstance(prompt, str):
            if not prompt:
                raise invalid(names.prompt, f"{names.prompt}: the prompt is empty")
            ids: Sequence[int] = await builder.encode_text(prompt, names)
        else:
            ids = builder.check_token_ids(prompt, names.prompt)
        grammar = await builder.grammar(asked.structure, metadata.tenant, num_sequences=asked.n)
        choices = replace(choices, grammar=grammar)
        if choices.max_tokens is None:
            await gateway.session.know_model()
        job = builder.job(
            ids,
            choices,
            request_id=sanitised_request_id(call.request_id),
            endpoint=call.endpoint,
            names=names,
            arrival_s=call.arrival_s,
            metadata=metadata,
        )
        check_copies(job.sampling, asked.n)
        if job.prompt_logprobs:
            _check_prompt_logprobs(len(ids), choices.prompt_logprobs or 0, names)
        reading = gateway.open(builder.samples(job, asked.n, asked.n), None, call.caller)
        self._add((call.caller.owner, call.request_id), reading)
        return reading

    async def pieces(self, call: EngineCall, reading: Reading) -> AsyncGenerator[SamplePiece]:
        """The output of all samples as it arrives. Ends the request when the iteration ends. Raises ApiError."""
        try:
            alone = len(reading.generations) == 1
            source = _read(reading.generations[0]) if alone else _interleaved(reading.generations)
            async with aclosing(source) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            self._close((call.caller.owner, call.request_id), reading)

    async def embed(self, call: EmbedCall, request_id: str) -> Embedded:
        """The vector of one input. `request_id`: the router's. Raises ApiError, also if the router aborts."""
        self.last_arrival_s = time.time()
        owned_id = (call.caller.owner, request_id)
        reading = await open_embedding(self.gateway, call)
        self._add(owned_id, reading)
        try:
            return await read_vector(self.gateway, call, reading)
        except Aborted as error:
            raise ApiError(CLIENT_CLOSED_REQUEST, "the router has aborted the request") from error
        finally:
            self._close(owned_id, reading)

    def abort(self, caller: Caller, request_id: str) -> bool:
        """Abort the caller's live requests with this id. Returns whether there is any."""
        readings = self._live.get((caller.owner, request_id), set())
        for reading in readings:
            reading.interrupt(Aborted())
        return bool(readings)

    def _add(self, owned_id: tuple[str, str], reading: Reading) -> None:
        self._live.setdefault(owned_id, set()).add(reading)

    def _close(self, owned_id: tuple[str, str], reading: Reading) -> None:
        reading.close()
        readings = self._live.get(owned_id, set())
        readings.discard(reading)
        if not readings:
            self._live.pop(owned_id, None)


def _check_prompt_logprobs(num_tokens: int, num_top: int, names: FieldNames) -> None:
    if (count := (1 + num_top) * num_tokens) > MAX_PROMPT_LOGPROBS:
        name = names.of("prompt_logprobs")
        raise invalid(name, f"{name}: {count} log probabilities; at most {MAX_PROMPT_LOGPROBS} are possible")


async def _read(generation: Generation) -> AsyncGenerator[SamplePiece]:
    first = generation.job.sample == 0
    while generation.finish_reason == _RUNNING:
        try:
            text = await generation.next()
        except Aborted:
            yield SamplePiece(generation, "", [], [], [], common_pb2.FINISH_REASON_ABORT)
            return
        prompt_scored = generation.prompt_scored if first and generation.job.prompt_logprobs else []
        first = first and not generation.token_ids  # the scores arrive with the first token
        yield SamplePiece(
            generation, text, generation.token_ids, generation.scored, prompt_scored, generation.finish_reason
        )


async def _interleaved(generations: Sequence[Generation]) -> AsyncGenerator[SamplePiece]:
    """Pieces of several samples in the order of their arrival."""
    arrived: asyncio.Queue[SamplePiece | BaseException | None] = asyncio.Queue(maxsize=len(generations))

    async def read(generation: Generation) -> None:
        try:
            async for piece in _read(generation):
                await arrived.put(piece)
            await arrived.put(None)
        except Exception as error:  # a bug, too: otherwise the reader would wait forever
            await arrived.put(error)

    tasks = [asyncio.create_task(read(generation)) for generation in generations]
    num_running = len(tasks)
    try:
        while num_running:
            piece = await arrived.get()
            if isinstance(piece, BaseException):
                raise piece
            if piece is None:
                num_running -= 1
            else:
                yield piece
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
