"""The contract `vllm.grpc.engine.VllmEngine`, by which smg (the SGLang Model Gateway, a router) drives a vLLM
engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

import grpc
import grpc.aio

from paceline.third_party import smg_common_pb2 as smg
from paceline.third_party import vllm_engine_pb2 as pb
from paceline.third_party import vllm_engine_pb2_grpc
from paceline.v1 import common_pb2
from services.gateway.engine.logprobs import ScoredToken
from services.gateway.errors import ApiError, invalid
from services.gateway.grpc.engine import FINISH_NAMES, Engine, Output
from services.gateway.grpc.engine_facts import timestamp
from services.gateway.grpc.engine_requests import EngineRequest, SamplePiece
from services.gateway.grpc.engine_sampling import (
    VLLM_TEXT,
    VLLM_TOKENS,
    check_rank,
    refuse_set,
    vllm_choices,
    vllm_structure,
)
from services.gateway.grpc.engine_stubs import EngineStubs
from services.gateway.grpc.status import abort

SERVICE_NAME = "vllm.grpc.engine.VllmEngine"
_NOT_SUPPORTED = ("kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "extra_mm_inputs", "media_refs")
MAX_ABORTED = 16384  # ids in one Abort
_RUNNING = common_pb2.FINISH_REASON_UNSPECIFIED
_Context = grpc.aio.ServicerContext[object, object]
_GenerateContext = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]


class VllmEngine(EngineStubs, vllm_engine_pb2_grpc.VllmEngineServicer):
    """Serves the gateway as one vLLM engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def Generate(
        self, request: pb.GenerateRequest, context: _GenerateContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        """With `stream`: a chunk per batch of tokens of a sample, and a Complete per sample. Else only the Completes.

        As in vLLM's own servicer, `completion_tokens` of a chunk counts only the tokens of this chunk.
        """
        requests, request_id, stream = self._engine.requests, request.request_id, request.stream
        try:
            call = self._engine.call(context, request_id, "vllm-grpc", request.ByteSize())
            async with requests.admit(call):
                reading = await requests.open(call, _asked(request))
            del request  # otherwise the prompt stays in memory until the end of the answer
            outputs = [Output() for _ in reading.generations]
            async with aclosing(requests.pieces(call, reading)) as pieces:
                async for piece in pieces:
                    output = outputs[piece.sample]
                    output.add(piece, keep_scores=not stream)
                    if stream and piece.token_ids:
                        yield pb.GenerateResponse(chunk=_chunk(piece))
                    if piece.finish_reason != _RUNNING:
                        yield pb.GenerateResponse(complete=_complete(piece, output))
        except ApiError as error:
            await abort(context, error)

    async def Abort(self, request: pb.AbortRequest, context: _Context) -> pb.AbortResponse:
        """Abort the caller's live requests with these ids. Any other id is ignored: its request may have ended."""
        try:
            caller = self._engine.caller(context)
            if (count := len(request.request_ids)) > MAX_ABORTED:  # the loop below blocks the event loop
                raise invalid("request_ids", f"request_ids has {count} ids; at most {MAX_ABORTED} are possible")
        except ApiError as error:
            await abort(context, error)
        for request_id in request.request_ids:
            self._engine.requests.abort(caller, request_id)
        return pb.AbortResponse()

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: _Context) -> pb.HealthCheckResponse:
        """Healthy while requests are served."""
        healthy, message = self._engine.health()
        return pb.HealthCheckResponse(healthy=healthy, message=message)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: _Context) -> pb.GetModelInfoResponse:
        """The served model."""
        return pb.GetModelInfoResponse(**self._engine.model_info())

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: _Context) -> pb.GetServerInfoResponse:
        """This gateway and the workers behind it, as one engine."""
        load, model = self._engine.load, self._engine.gateway.session.model
        return pb.GetServerInfoResponse(
            active_requests=self._engine.requests.num_live,
            last_receive_timestamp=self._engine.requests.last_arrival_s,
            uptime_seconds=self._engine.uptime_s,
            server_type="vllm-grpc",
            data_parallel_size=1,
            kv_cache_dtype="auto",
            block_size=load.block_size,
            model_dtype=f"torch.{model.dtype.partition('+')[0]}" if model is not None and model.dtype else "",
            max_num_seqs=load.num_slots,
            constrained_decoding_start="first_token",
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: _Context) -> pb.GetLoadsResponse:
        """The load of all workers, as one rank."""
        loads = [pb.SchedulerLoad(**self._engine.load_fields())]
        return pb.GetLoadsResponse(
            timestamp=timestamp(), version=self._engine.version, dp_rank_count=len(loads), loads=loads
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

    async def Embed(self, request: pb.EmbedRequest, context: _Context) -> pb.EmbedResponse:
        """The vector of one input. INVALID_ARGUMENT if the model generates text."""
        try:
            call = self._engine.embed_call(context, request, "vllm-grpc")
            embedded = await self._engine.requests.embed(call, request.request_id)
        except ApiError as error:
            await abort(context, error)
        return pb.EmbedResponse(
            embedding=embedded.vector.tolist(), prompt_tokens=embedded.prompt_tokens, embedding_dim=len(embedded.vector)
        )


def _asked(request: pb.GenerateRequest) -> EngineRequest:
    refuse_set(request, _NOT_SUPPORTED)
    check_rank(request)
    match request.WhichOneof("input"):
        case "tokenized":
            prompt: str | Sequence[int] = request.tokenized.input_ids
            names = VLLM_TOKENS
        case "text":
            prompt, names = request.text, VLLM_TEXT
        case _:
            raise invalid("input", "input: one of tokenized and text is required")
    params = request.sampling_params
    return EngineRequest(
        prompt=prompt, choices=vllm_choices(params), names=names, structure=vllm_structure(params), n=params.n or 1
    )


def _chunk(piece: SamplePiece) -> pb.GenerateStreamChunk:
    return pb.GenerateStreamChunk(
        token_ids=piece.token_ids,
        prompt_tokens=len(piece.generation.job.prompt_ids),
        completion_tokens=len(piece.token_ids),
        cached_tokens=piece.generation.cached_tokens or 0,
        output_logprobs=_output_logprobs(piece.scored),
        input_logprobs=_input_logprobs(piece.generation.job.prompt_ids[0], piece.prompt_scored),
        index=piece.sample,
    )


def _complete(piece: SamplePiece, output: Output) -> pb.GenerateComplete:
    job = piece.generation.job
    complete = pb.GenerateComplete(
        output_ids=output.token_ids,
        finish_reason=FINISH_NAMES[piece.finish_reason],
        prompt_tokens=len(job.prompt_ids),
        completion_tokens=len(output.token_ids),
        cached_tokens=piece.generation.cached_tokens or 0,
        output_logprobs=_output_logprobs(output.scored),
        input_logprobs=_input_logprobs(job.prompt_ids[0], output.prompt_scored),
        index=piece.sample,
    )
    if piece.matched_stop is not None:
        complete.matched_stop_str = piece.matched_stop
    elif (token := piece.last_token) is not None and token in job.sampling.stop_token_ids:
        complete.matched_token_id = token  # an end of sequence is no match, as in vLLM
    return complete


def _output_logprobs(scored: Sequence[ScoredToken]) -> pb.OutputLogProbs | None:
    if not scored:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[token.logprob for token in scored],
        token_ids=[token.token_id for token in scored],
        top_logprobs=[_top(token) for token in scored] if scored[0].top else (),
    )


def _input_logprobs(first: int, scored: Sequence[ScoredToken]) -> pb.InputLogProbs | None:
    """Of the whole prompt. Its first token, `first`, has no value."""
    if not scored:
        return None
    values = [pb.InputTokenLogProb(), *(pb.InputTokenLogProb(value=token.logprob) for token in scored)]
    return pb.InputLogProbs(
        token_logprobs=values,
        token_ids=[first, *(token.token_id for token in scored)],
        top_logprobs=[pb.TopLogProbs(), *map(_top, scored)] if scored[0].top else (),
    )


def _top(token: ScoredToken) -> pb.TopLogProbs:
    return pb.TopLogProbs(values=[value for _, value in token.top], token_ids=[other for other, _ in token.top])
