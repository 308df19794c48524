"""The gateway as one engine: the state that the engine contracts share."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import grpc
import grpc.aio

from paceline.third_party import sglang_scheduler_pb2, vllm_engine_pb2
from paceline.third_party.smg_common_pb2 import GetTokenizerChunk
from paceline.v1 import common_pb2
from paceline.v1.inference_pb2 import SchedulerLoad
from services.gateway.access.caller import Caller
from services.gateway.embeddings.calls import EmbedCall
from services.gateway.engine.logprobs import ScoredToken
from services.gateway.grpc.engine_facts import ModelFacts, Throughput, TokenizerArchive, load_fields
from services.gateway.grpc.engine_requests import EngineCall, EngineRequests, SamplePiece
from services.gateway.grpc.kv_event_streams import KvEventStreams
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.middleware import sanitised_request_id

FINISH_NAMES = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_ABORT: "abort",
}


class Engine:
    """A running gateway, seen by routers."""

    def __init__(
        self, gateway: Gateway, facts: ModelFacts, tokenizer: TokenizerArchive, kv_events: KvEventStreams
    ) -> None:
        self.gateway = gateway
        self.requests = EngineRequests(gateway)
        self._tokenizer = tokenizer
        self.kv_events = kv_events
        self.version = version("paceline")
        self._facts = facts
        self._started_s = time.monotonic()
        self.started_unix_s = time.time()
        self._throughput = Throughput(lambda: gateway.metrics.generation_tokens, self._started_s)

    @property
    def uptime_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started_s

    @property
    def load(self) -> SchedulerLoad:
        """The load of all workers; all 0 while no scheduler is connected."""
        return self.gateway.session.load or SchedulerLoad()

    def caller(self, context: grpc.aio.ServicerContext[Any, Any]) -> Caller:
        """The caller. KeyGate has checked the key, but it may have been revoked meanwhile. Raises ApiError 401."""
        return self.gateway.access.identify(context.invocation_metadata() or ())

    def call(
        self, context: grpc.aio.ServicerContext[Any, Any], request_id: str, endpoint: str, num_bytes: int
    ) -> EngineCall:
        """A call that generates. Raises ApiError 401."""
        return EngineCall(request_id, endpoint, self.caller(context), num_bytes)

    def embed_call(
        self,
        context: grpc.aio.ServicerContext[Any, Any],
        request: vllm_engine_pb2.EmbedRequest | sglang_scheduler_pb2.EmbedRequest,
        endpoint: str,
    ) -> EmbedCall:
        """A call that embeds. Raises ApiError 401."""
        request_id = sanitised_request_id(request.request_id)
        ids, caller = request.tokenized.input_ids, self.caller(context)
        return EmbedCall(caller, request_id, endpoint, request.ByteSize(), ids, "tokenized.input_ids")

    def health(self) -> tuple[bool, str]:
        """Whether a request would be served now, and why not."""
        if self.gateway.ready:
            return True, "serving"
        return False, "draining" if self.gateway.draining else "the scheduler or its workers are not ready"

    def model_info(self) -> dict[str, Any]:
        """The fields of GetModelInfoResponse that both contracts have."""
        facts, builder, model = self._facts, self.gateway.builder, self.gateway.session.model
        generates = model is None or not model.HasField("embedding")
        return {
            "model_path": facts.root,
            "tokenizer_path": facts.root,
            "served_model_name": self.gateway.model_name,
            "is_generation": generates,
            "max_context_length": builder.max_model_len,
            "max_req_input_len": builder.max_model_len - generates,
            "vocab_size": builder.vocab_size,
            "supports_vision": False,
            "model_type": facts.model_type,
            "architectures": facts.architectures,
            "eos_token_ids": sorted(builder.eos_token_ids),
            "pad_token_id": facts.pad_token_id,
            "bos_token_id": facts.bos_token_id,
            "default_sampling_params_json": facts.default_sampling_json,
        }

    async def tokenizer_chunks(self, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[GetTokenizerChunk]:
        """The tokenizer's files. Ends the call with FAILED_PRECONDITION if the model has none."""
        try:
            chunks = await self._tokenizer.chunks()
        except FileNotFoundError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        for chunk in chunks:
            yield chunk

    def load_fields(self) -> dict[str, Any]:
        """The fields that the SchedulerLoad messages of both contracts have."""
        metrics = self.gateway.metrics
        hit_rate = metrics.cached_tokens / metrics.prompt_tokens if metrics.prompt_tokens else 0.0
        tokens_per_s = self._throughput.per_s(time.monotonic())
        return load_fields(self.gateway.session.load, tokens_per_s=tokens_per_s, hit_rate=hit_rate)


@dataclass(slots=True)
class Output:
    """The whole output of one sample."""

    token_ids: list[int] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)
    prompt_scored: list[ScoredToken] = field(default_factory=list)

    def add(self, piece: SamplePiece, *, keep_scores: bool) -> None:
        """Append a piece. Without `keep_scores`, drop its log probabilities, because they were already sent to the
        client."""
        self.token_ids += piece.token_ids
        if keep_scores:
            self.scored += piece.scored
            self.prompt_scored = self.prompt_scored or piece.prompt_scored
