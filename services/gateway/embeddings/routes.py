"""The path /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from functools import partial
from typing import Literal

import numpy as np
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from paceline.v1 import common_pb2
from services.gateway.access.headers import HEADERS
from services.gateway.embeddings.schema import EmbeddingRequest
from services.gateway.embeddings.vectors import Vector, check_dimensions, embedding_info, embedding_job, vector_of
from services.gateway.engine.idempotency import IDEMPOTENCY_KEY
from services.gateway.engine.request import GenerateJob
from services.gateway.engine.request_store import Reading
from services.gateway.engine.sampling import FieldNames
from services.gateway.engine.timings import SERVER_TIMING, server_timing, timings
from services.gateway.errors import ApiError, Gone, invalid
from services.gateway.http.connection import CONNECTION
from services.gateway.openai.answers import JsonResponse, RunningAnswer, together
from services.gateway.openai.event_ids import LAST_EVENT_ID, cannot_resume
from services.gateway.openai.format import Envelope, usage
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.jobs import Asked
from services.gateway.openai.middleware import OtherApi, caller_of
from services.gateway.openai.routes import GENERATION_ERRORS, entered
from services.gateway.openapi.answers import EmbeddingList
from services.gateway.openapi.description import described

_PATH, _KIND = "/v1/embeddings", "embedding"
_INPUT = FieldNames(prompt="input")


def embeddings_api(gateway: Gateway) -> OtherApi:
    """The API of a gateway."""

    @described(
        body=EmbeddingRequest,
        answer=EmbeddingList,
        errors=GENERATION_ERRORS,
        headers=HEADERS | {IDEMPOTENCY_KEY: "the client's name for the request; the same request is not run twice"},
    )
    async def embeddings(request: Request) -> Response:
        """The vectors of an input, or of several. 400 if the model generates text."""
        info = await _info(gateway, request)
        make_jobs = partial(_jobs, info)
        most = gateway.max_embedding_body_bytes
        async with entered(gateway, request, "embedding", EmbeddingRequest, make_jobs, max_bytes=most) as admitted:
            if LAST_EVENT_ID in request.headers:
                raise cannot_resume("embeddings have no events")
            body, asked = admitted.body, admitted.asked
            reading = gateway.open(admitted.jobs, asked.key, caller_of(request))
        envelope = Envelope("embedding", body.model or gateway.model_name, reading.created_s, asked.answer_id)
        return EmbeddingAnswer(reading, envelope, info, body.encoding_format or "float", body.dimensions)

    return OtherApi(_PATH, [Route(_PATH, embeddings, methods=["POST"])], {_PATH: _KIND})


async def _info(gateway: Gateway, request: Request) -> common_pb2.EmbeddingInfo:
    """The model's EmbeddingInfo, before the body is read. Raises ApiError and Gone."""
    try:
        await gateway.session.know_model(request.scope[CONNECTION].has_gone)
        return embedding_info(gateway)
    except ApiError as error:
        gateway.refused(_KIND, request.scope["state"]["request_id"], error)
        raise
    except Gone:
        gateway.count_gone()
        raise


async def _jobs(
    info: common_pb2.EmbeddingInfo, gateway: Gateway, body: EmbeddingRequest, asked: Asked
) -> list[GenerateJob]:
    """The jobs of all inputs. Raises ApiError 400 and Gone."""
    builder = gateway.builder
    if body.dimensions is not None:
        check_dimensions(body.dimensions, info, gateway.model_name)
    inputs: Sequence[str | Sequence[int]] = [body.input]  # type: ignore[list-item]
    if isinstance(body.input, list):
        inputs = body.input
    num_chars = sum(len(one) for one in inputs if isinstance(one, str))
    truncation = body.truncation(builder.max_model_len)
    jobs: list[GenerateJob] = []
    for index, one in enumerate(inputs):
        if index:
            await asyncio.sleep(0)  # let other requests run between two inputs
        if isinstance(one, str):
            if not one:
                raise invalid("input", "input: a text is empty")
            add = body.add_special_tokens is not False
            ids: Sequence[int] = await builder.encode_text(
                one, _INPUT, add_special_tokens=add, of_chars=num_chars, truncation=truncation, gone=asked.gone
            )
        else:
            ids = builder.check_token_ids(one if truncation is None else truncation.cut(one), "input")
        jobs.append(
            embedding_job(
                builder,
                ids,
                info,
                request_id=asked.request_id if index == 0 else f"{asked.request_id}-{index}",
                endpoint=_KIND,
                name="input",
                arrival_s=asked.arrival_s,
                metadata=asked.metadata,
            )
        )
    return jobs


class EmbeddingAnswer(RunningAnswer):
    """One JSON body with the vectors of all inputs, in their order."""

    def __init__(
        self,
        reading: Reading,
        envelope: Envelope,
        info: common_pb2.EmbeddingInfo,
        encoding: Literal["float", "base64"],
        dimensions: int | None,
    ) -> None:
        super().__init__(reading, envelope)
        self._info, self._encoding, self._dimensions = info, encoding, dimensions

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        vectors = await together([vector_of(one, self._info, self._dimensions) for one in self._generations])
        data = []
        for index, vector in enumerate(vectors):
            if index:
                await asyncio.sleep(0)  # 4,096 floats take 0.2 ms
            data.append(b'{"object":"embedding","index":%d,"embedding":%s}' % (index, self._shown(vector)))
        head = orjson.dumps(self._envelope.head("list"))
        took = timings(self._generations)
        rest = orjson.dumps({"usage": usage(self._generations), "timings": took})
        body = b'%s,"data":[%s],%s' % (head[:-1], b",".join(data), rest[1:])
        header = server_timing(took)
        await JsonResponse(body, headers={SERVER_TIMING: header} if header else None)(scope, receive, send)

    def _shown(self, vector: Vector) -> bytes:
        """As JSON. base64: little-endian float32, as OpenAI's."""
        if self._encoding == "base64":
            return b'"%s"' % base64.b64encode(vector.astype("<f4", copy=False).tobytes())
        return orjson.dumps(np.ascontiguousarray(vector), option=orjson.OPT_SERIALIZE_NUMPY)
