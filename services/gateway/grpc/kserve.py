"""The Open Inference Protocol v2, `inference.GRPCInferenceService`, of KServe and Triton's clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio

from paceline.third_party import kserve_inference_pb2 as pb
from paceline.third_party import kserve_inference_pb2_grpc
from paceline.v1 import common_pb2
from services.gateway.engine.sampling import FieldNames
from services.gateway.errors import ApiError, invalid
from services.gateway.fields.other_servers import IGNORED
from services.gateway.grpc.engine import FINISH_NAMES, Engine
from services.gateway.grpc.engine_requests import EngineRequest
from services.gateway.grpc.kserve_tensors import INPUTS, OUTPUTS, Inputs, read_inputs, response
from services.gateway.grpc.status import abort, status_message
from services.gateway.openai import schema
from services.runtime.logs import get_logger

_log = get_logger(__name__)

SERVICE_NAME = "inference.GRPCInferenceService"
VERSION = "1"  # of the model
# At most so many streams are open at once, and fewer if the memory limit for bodies holds fewer bodies of the largest
# size. Nothing else limits the memory of the messages that streams receive.
MAX_STREAMS = 256
# Requests of one stream that run at once. Of further messages, one is read and waits; the others wait unread.
MAX_STREAMED = 64
_RUNNING = common_pb2.FINISH_REASON_UNSPECIFIED
# Fields of the HTTP API that have no place in the answers of this protocol, or are given in another way.
_NOT_HERE = frozenset(
    {"prompt", "model", "stream", "stream_options", "n", "best_of", "echo", "logprobs", "prompt_logprobs"}
    | {"use_beam_search", "length_penalty", "early_stopping", "cache_retention", "add_special_tokens"}
)
PARAMETERS = frozenset(schema.CompletionRequest.model_fields) - _NOT_HERE
_Context = grpc.aio.ServicerContext[object, object]
_InferContext = grpc.aio.ServicerContext[pb.ModelInferRequest, pb.ModelInferResponse]
_StreamContext = grpc.aio.ServicerContext[pb.ModelInferRequest, pb.ModelStreamInferResponse]


class KServeInference(kserve_inference_pb2_grpc.GRPCInferenceServiceServicer):
    """Serves the model under the gateway's name for it, version 1."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._gateway = engine.gateway
        bodies = self._gateway.bodies.max_bytes // self._gateway.max_body_bytes
        self._free_streams = self._max_streams = min(max(bodies, 1), MAX_STREAMS)

    async def ServerLive(self, request: pb.ServerLiveRequest, context: _Context) -> pb.ServerLiveResponse:
        """True."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: _Context) -> pb.ServerReadyResponse:
        """Whether a request would be served now."""
        return pb.ServerReadyResponse(ready=self._gateway.ready)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: _Context) -> pb.ModelReadyResponse:
        """False also for a model that is not served."""
        is_served = request.name == self._gateway.model_name and request.version in ("", VERSION)
        return pb.ModelReadyResponse(ready=is_served and self._gateway.ready)

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: _Context) -> pb.ServerMetadataResponse:
        """Name and version of the server."""
        return pb.ServerMetadataResponse(name="paceline", version=self._engine.version)

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: _Context) -> pb.ModelMetadataResponse:
        """The tensors. NOT_FOUND for a model that is not served."""
        try:
            self._check_model(request.name, request.version)
        except ApiError as error:
            await abort(context, error)
        tensor = pb.ModelMetadataResponse.TensorMetadata
        return pb.ModelMetadataResponse(
            name=self._gateway.model_name,
            versions=[VERSION],
            platform="paceline",
            inputs=[tensor(name=name, datatype=datatype, shape=shape) for name, datatype, shape in INPUTS],
            outputs=[tensor(name=name, datatype=datatype, shape=shape) for name, datatype, shape in OUTPUTS],
        )

    async def ModelInfer(self, request: pb.ModelInferRequest, context: _InferContext) -> pb.ModelInferResponse:
        """The whole answer to one request."""
        try:
            async with aclosing(self._answer(request, context, may_stream=False)) as parts:
                del request  # otherwise the prompt stays in memory until the end of the answer
                return await anext(parts)
        except ApiError as error:
            await abort(context, error)

    async def ModelStreamInfer(
        self, request_iterator: AsyncIterator[pb.ModelInferRequest], context: _StreamContext
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        """Answers the requests concurrently, so responses interleave. An error ends its request, and not the stream.
        RESOURCE_EXHAUSTED if too many streams are open."""
        if not self._free_streams:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._max_streams} streams are open already")
        self._free_streams -= 1
        responses: asyncio.Queue[pb.ModelStreamInferResponse | None] = asyncio.Queue(maxsize=MAX_STREAMED)
        running: set[asyncio.Task[None]] = set()
        slots = asyncio.Semaphore(MAX_STREAMED)

        async def answer(request: pb.ModelInferRequest) -> None:
            request_id = request.id
            try:
                async with aclosing(self._answer(request, context, may_stream=True)) as parts:
                    del request
                    async for part in parts:
                        await responses.put(pb.ModelStreamInferResponse(infer_response=part))
            except ApiError as error:
                await responses.put(_failed(request_id, error))
            except Exception as error:  # a bug: the stream goes on, and its client waits for each answer
                _log.error("a request of a stream failed", id=request_id[:128], exc_info=error)
                bug = ApiError(500, "internal error; the log has the details", code="internal_error")
                await responses.put(_failed(request_id, bug))
            finally:
                slots.release()

        async def read_all() -> None:
            async for request in request_iterator:
                await slots.acquire()
                task = asyncio.create_task(answer(request))
                running.add(task)
                task.add_done_callback(running.discard)
                del request, task
            await asyncio.gather(*running)

        async def read() -> None:
            try:
                await read_all()
            except Exception:
                await responses.put(None)
                raise
            await responses.put(None)

        reader = asyncio.create_task(read())
        try:
            while (message := await responses.get()) is not None:
                yield message
            await reader  # raises what `read` has raised
        finally:
            tasks = [reader, *running]
            for each in tasks:
                each.cancel()
            self._free_streams += 1
            await asyncio.gather(*tasks, return_exceptions=True)

    def _check_model(self, name: str, version: str) -> None:
        self._gateway.check_model(name)
        if version not in ("", VERSION):
            raise ApiError(
                404, f"model_version must be {VERSION!r} or empty, not {version[:40]!r}", param="model_version"
            )

    async def _answer(
        self, request: pb.ModelInferRequest, context: grpc.aio.ServicerContext[Any, Any], *, may_stream: bool
    ) -> AsyncGenerator[pb.ModelInferResponse]:
        """One response, or with the input `stream` one for each batch of tokens. Raises ApiError."""
        requests, request_id = self._engine.requests, request.id
        call = self._engine.call(context, request_id, "kserve", request.ByteSize())
        async with requests.admit(call):
            self._check_model(request.model_name, request.model_version)
            inputs = read_inputs(request, self._gateway.builder.max_model_len)
            if inputs.stream and not may_stream:
                raise invalid("stream", "stream: true is only possible with ModelStreamInfer")
            reading = await requests.open(call, self._asked(inputs))
        outputs, stream = inputs.outputs, inputs.stream
        text = inputs.prompt if inputs.with_prompt and isinstance(inputs.prompt, str) else ""
        del request, inputs  # otherwise the prompt stays in memory until the end of the answer
        token_ids: list[int] = []
        async with aclosing(requests.pieces(call, reading)) as pieces:
            async for piece in pieces:
                text += piece.text
                token_ids += piece.token_ids
                has_ended = piece.finish_reason != _RUNNING
                if has_ended or (stream and token_ids):
                    reason = FINISH_NAMES[piece.finish_reason] if has_ended else ""
                    yield response(request_id, self._gateway.model_name, outputs, text, token_ids, reason)
                    text, token_ids = "", []

    def _asked(self, inputs: Inputs) -> EngineRequest:
        for name in inputs.parameters:
            if name not in PARAMETERS and name not in IGNORED:
                raise invalid(name[:80], f"{name[:80]!r} is no parameter of this server")
        max_model_len = self._gateway.builder.max_model_len
        body = schema.parse(schema.CompletionRequest, {**inputs.parameters, "prompt": [0]}, max_model_len)
        return EngineRequest(
            prompt=inputs.prompt,
            choices=body.sampling(),
            names=FieldNames(prompt=inputs.prompt_name),
            structure=body.structure(),
            metadata=body.metadata(),
            named_tenant=body.named_tenant,
        )


def _failed(request_id: str, error: ApiError) -> pb.ModelStreamInferResponse:
    failed = pb.ModelInferResponse(id=request_id)
    failed.parameters["triton_final_response"].bool_param = True
    return pb.ModelStreamInferResponse(error_message=status_message(error), infer_response=failed)
