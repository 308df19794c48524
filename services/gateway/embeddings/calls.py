"""One input's vector, for a gRPC call."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.v1 import inference_pb2
from services.gateway.access.caller import Caller
from services.gateway.embeddings.vectors import Vector, check_dimensions, embedding_info, embedding_job, vector_of
from services.gateway.engine.request import too_long
from services.gateway.engine.request_store import Reading
from services.gateway.engine.sampling import FieldNames
from services.gateway.errors import ApiError, invalid
from services.gateway.openai.gateway import Gateway


@dataclass(slots=True)
class EmbedCall:
    """A call of one gRPC contract.

    `request_id`: sanitised. `endpoint`: the contract, in metrics and in the request log. `num_bytes`: of the message.
    `name`: of the field with the input, a text or token ids. `named_tenant`: as in Caller.permit."""

    caller: Caller
    request_id: str
    endpoint: str
    num_bytes: int
    text_or_ids: str | Sequence[int]
    name: str
    model: str = ""
    dimensions: int = 0  # 0: all
    metadata: inference_pb2.Submission = field(default_factory=inference_pb2.Submission)
    named_tenant: str = ""


@dataclass(frozen=True, slots=True)
class Embedded:
    """`prompt_tokens` and `cached_tokens` are counts."""

    vector: Vector
    prompt_tokens: int
    cached_tokens: int


async def embed(gateway: Gateway, call: EmbedCall) -> Embedded:
    """Run the call. gRPC cancels it if its client leaves. Raises ApiError."""
    return await read_vector(gateway, call, await open_embedding(gateway, call))


async def open_embedding(gateway: Gateway, call: EmbedCall) -> Reading:
    """Submit the input. Pass the result to `read_vector`. Raises ApiError."""
    try:
        entering = gateway.access.quotas.entering(call.caller.key, new=True)
        with entering, gateway.held_body() as held:
            held.add(call.num_bytes)
            gateway.check_capacity()
            await gateway.wait_to_parse(num_bytes=call.num_bytes, new=True)
            return await _open(gateway, call)
    except ApiError as error:
        gateway.refused(call.endpoint, call.request_id, error)
        raise


async def read_vector(gateway: Gateway, call: EmbedCall, reading: Reading) -> Embedded:
    """Wait for the vector. Ends the request. Raises ApiError, and the error given to `reading.interrupt`."""
    [generation] = reading.generations
    try:
        vector = await vector_of(generation, embedding_info(gateway), call.dimensions or None)
        return Embedded(vector, len(generation.job.prompt_ids), generation.cached_tokens or 0)
    finally:
        reading.close()


async def _open(gateway: Gateway, call: EmbedCall) -> Reading:
    arrival_s, builder, given = time.perf_counter(), gateway.builder, call.text_or_ids
    gateway.check_model(call.model)
    await gateway.session.know_model()
    info = embedding_info(gateway)
    if call.dimensions:
        check_dimensions(call.dimensions, info, gateway.model_name)
    metadata = call.caller.permit(call.metadata, call.named_tenant)
    if not given:
        raise invalid(call.name, f"{call.name}: the input is empty")
    if isinstance(given, str):
        ids: Sequence[int] = await builder.encode_text(given, FieldNames(prompt=call.name))
    elif len(given) > builder.max_model_len:
        raise too_long(call.name, str(len(given)), builder.max_model_len)
    else:
        ids = builder.check_token_ids(given, call.name)
    job = embedding_job(
        builder,
        ids,
        info,
        request_id=call.request_id,
        endpoint=call.endpoint,
        name=call.name,
        arrival_s=arrival_s,
        metadata=metadata,
    )
    return gateway.open([job], None, call.caller)
