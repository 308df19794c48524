"""The contract `sglang.grpc.scheduler.SglangScheduler`, by which smg (the SGLang Model Gateway, a router) drives an
SGLang scheduler."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

import grpc
import grpc.aio
from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp

from paceline.third_party import sglang_scheduler_pb2 as pb
from paceline.third_party import sglang_scheduler_pb2_grpc
from paceline.third_party import smg_common_pb2 as smg
from paceline.v1 import common_pb2
from services.gateway.engine.logprobs import ScoredToken
from services.gateway.errors import ApiError
from services.gateway.grpc.engine import FINISH_NAMES, Engine, Output
from services.gateway.grpc.engine_facts import timestamp
from services.gateway.grpc.engine_requests import EngineRequest, SamplePiece
from services.gateway.grpc.engine_sampling import (
    SGLANG_TOKENS,
    check_rank,
    refuse_set,
    sglang_choices,
    sglang_structure,
)
from services.gateway.grpc.engine_stubs import EngineStubs
from services.gateway.grpc.status import abort, unimplemented

SERVICE_NAME = "sglang.grpc.scheduler.SglangScheduler"
_NOT_SUPPORTED = (
    *("mm_inputs", "token_ids_logprob", "return_hidden_states", "disaggregated_params", "custom_logit_processor"),
    *("input_embeds", "lora_id", "require_reasoning"),
)
_NOT_EMBEDDED = ("mm_inputs", "token_type_ids", "is_cross_encoder", "texts")
_RUNNING = common_pb2.FINISH_REASON_UNSPECIFIED
_Context = grpc.aio.ServicerContext[object, object]
_GenerateContext = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]


class SglangScheduler(EngineStubs, sglang_scheduler_pb2_grpc.SglangSchedulerServicer):
    """Serves the gateway as one SGLang scheduler."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def Generate(
        self, request: pb.GenerateRequest, context: _GenerateContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        """With `stream`: a chunk per batch of tokens of a sample, and a Complete per sample. Else only the Completes.

        As in SGLang's own servicer, `completion_tokens` of a chunk counts all tokens of the sample so far.
        """
        requests, request_id = self._engine.requests, request.request_id
        stream, start = request.stream, request.logprob_start_len
        try:
            call = self._engine.call(context, request_id, "sglang-grpc", request.ByteSize())
            async with requests.admit(call):
                reading = await requests.open(call, _asked(request))
            del request  # otherwise the prompt stays in memory until the end of the answer
            outputs = [Output() for _ in reading.generations]
            async with aclosing(requests.pieces(call, reading)) as pieces:
                async for piece in pieces:
                    output = outputs[piece.sample]
                    output.add(piece, keep_scores=True)
                    if stream and piece.token_ids:
                        yield pb.GenerateResponse(request_id=request_id, chunk=_chunk(piece, output, start))
                    if piece.finish_reason != _RUNNING:
                        yield pb.GenerateResponse(request_id=request_id, complete=_complete(piece, output, start))
        except ApiError as error:
            await abort(context, error)

    async def Abort(self, request: pb.AbortRequest, context: _Context) -> pb.AbortResponse:
        """Abort the caller's live requests with this id. The answer says whether there was one."""
        try:
            caller = self._engine.caller(context)
        except ApiError as error:
            await abort(context, error)
        found = self._engine.requests.abort(caller, request.request_id)
        return pb.AbortResponse(success=found, message="aborted" if found else "no live request has this id")

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: _Context) -> pb.HealthCheckResponse:
        """Healthy while requests are served."""
        healthy, message = self._engine.health()
        return pb.HealthCheckResponse(healthy=healthy, message=message)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: _Context) -> pb.GetModelInfoResponse:
        """The served model."""
        return pb.GetModelInfoResponse(**self._engine.model_info())

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: _Context) -> pb.GetServerInfoResponse:
        """This gateway and the workers behind it, as one scheduler."""
        load, info = self._engine.load, self._engine.model_info()
        arguments, started = Struct(), Timestamp()
        arguments.update(
            {
                "model_path": info["model_path"],
                "served_model_name": info["served_model_name"],
                "context_length": info["max_context_length"],
                "page_size": load.block_size,
                "max_running_requests": load.num_slots,
                "dp_size": 1,
                "tp_size": 1,
            }
        )
        started.FromSeconds(int(self._engine.started_unix_s))
        return pb.GetServerInfoResponse(
            server_args=arguments,
            active_requests=self._engine.requests.num_live,
            last_receive_timestamp=self._engine.requests.last_arrival_s,
            uptime_seconds=self._engine.uptime_s,
            sglang_version=self._engine.version,
            server_type="grpc",
            start_time=started,
            max_total_num_tokens=load.num_blocks * load.block_size,
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: _Context) -> pb.GetLoadsResponse:
        """The load of all workers, as one rank."""
        load = pb.SchedulerLoad(**self._engine.load_fields())
        aggregate = pb.AggregateMetrics(
            total_running_reqs=load.num_running_reqs,
            total_waiting_reqs=load.num_waiting_reqs,
            total_reqs=load.num_total_reqs,
            avg_token_usage=load.token_usage,
            avg_throughput=load.gen_throughput,
            avg_utilization=load.utilization,
        )
        return pb.GetLoadsResponse(
            timestamp=timestamp(), version=self._engine.version, dp_rank_count=1, loads=[load], aggregate=aggregate
        )

    async def GetTokenizer(
        self, request: smg.GetTokenizerRequest, context: _Context
    ) -> AsyncIterator[smg.GetTokenizerChunk]:
        """The tokenizer's files as a zip archive. FAILED_PRECONDITION if the model has none."""
        async for chunk in self._engine.tokenizer_chunks(context):
            yield chunk

    async def SubscribeKvEvents(
        self, request: smg.SubscribeKvEventsRequest, context: _Context
    ) -> AsyncIterator[smg.KvEventBatch]:
        """Stored and removed blocks: an admin call. UNIMPLEMENTED without --cache, or if the cache sends no tokens."""
        async with aclosing(self._engine.kv_events.subscribe(context)) as batches:
            async for batch in batches:
                yield batch

    async def ListLoadedLoRAAdapters(
        self, request: pb.ListLoadedLoRAAdaptersRequest, context: _Context
    ) -> pb.ListLoadedLoRAAdaptersResponse:
        """None: no worker serves adapters yet."""
        return pb.ListLoadedLoRAAdaptersResponse()

    async def LoadLoRAAdapter(
        self, request: pb.LoadLoRAAdapterRequest, context: _Context
    ) -> pb.LoadLoRAAdapterResponse:
        """Not served."""
        await unimplemented(context, "LoadLoRAAdapter: workers serve no adapters")

    async def UnloadLoRAAdapter(
        self, request: pb.UnloadLoRAAdapterRequest, context: _Context
    ) -> pb.UnloadLoRAAdapterResponse:
        """Not served."""
        await unimplemented(context, "UnloadLoRAAdapter: workers serve no adapters")

    async def Embed(self, request: pb.EmbedRequest, context: _Context) -> pb.EmbedResponse:
        """The vector of one input. INVALID_ARGUMENT if the model generates text."""
        try:
            refuse_set(request, _NOT_EMBEDDED)
            check_rank(request)
            call = self._engine.embed_call(context, request, "sglang-grpc")
            embedded = await self._engine.requests.embed(call, request.request_id)
        except ApiError as error:
            await abort(context, error)
        return pb.EmbedResponse(
            embedding=embedded.vector.tolist(), prompt_tokens=embedded.prompt_tokens, embedding_dim=len(embedded.vector)
        )


def _asked(request: pb.GenerateRequest) -> EngineRequest:
    refuse_set(request, _NOT_SUPPORTED)
    check_rank(request)
    return EngineRequest(
        prompt=request.tokenized.input_ids,
        choices=sglang_choices(request),
        names=SGLANG_TOKENS,
        structure=sglang_structure(request.sampling_params),
        n=request.sampling_params.n or 1,
    )


def _chunk(piece: SamplePiece, output: Output, logprob_start: int) -> pb.GenerateStreamChunk:
    prompt_ids = piece.generation.job.prompt_ids
    return pb.GenerateStreamChunk(
        token_ids=piece.token_ids,
        prompt_tokens=len(prompt_ids),
        completion_tokens=len(output.token_ids),
        cached_tokens=piece.generation.cached_tokens or 0,
        output_logprobs=_output_logprobs(piece.scored),
        input_logprobs=_input_logprobs(prompt_ids[0], piece.prompt_scored, logprob_start),
        index=piece.sample,
    )


def _complete(piece: SamplePiece, output: Output, logprob_start: int) -> pb.GenerateComplete:
    prompt_ids = piece.generation.job.prompt_ids
    complete = pb.GenerateComplete(
        output_ids=output.token_ids,
        finish_reason=FINISH_NAMES[piece.finish_reason],
        prompt_tokens=len(prompt_ids),
        completion_tokens=len(output.token_ids),
        cached_tokens=piece.generation.cached_tokens or 0,
        output_logprobs=_output_logprobs(output.scored),
        input_logprobs=_input_logprobs(prompt_ids[0], output.prompt_scored, logprob_start),
        index=piece.sample,
    )
    if piece.matched_stop is not None:
        complete.matched_stop_str = piece.matched_stop
    elif piece.last_token is not None:
        complete.matched_token_id = piece.last_token
    return complete


def _output_logprobs(scored: Sequence[ScoredToken]) -> pb.OutputLogProbs | None:
    if not scored:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[token.logprob for token in scored],
        token_ids=[token.token_id for token in scored],
        top_logprobs=[_top(token) for token in scored] if scored[0].top else (),
    )


def _input_logprobs(first: int, scored: Sequence[ScoredToken], start: int) -> pb.InputLogProbs | None:
    """Of the prompt tokens from `start` on. The prompt's first token, `first`, has no value."""
    if not scored:
        return None
    tokens = [ScoredToken(first, 0.0, ()), *scored]
    shown = range(start, len(tokens))
    return pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(value=tokens[i].logprob if i else None) for i in shown],
        token_ids=[tokens[i].token_id for i in shown],
        top_logprobs=[_top(tokens[i]) for i in shown] if scored[0].top else (),
    )


def _top(token: ScoredToken) -> pb.TopLogProbs:
    return pb.TopLogProbs(values=[value for _, value in token.top], token_ids=[other for other, _ in token.top])
