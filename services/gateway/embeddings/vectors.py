"""Jobs for vectors, and vectors as an answer has them. All APIs with embeddings use these."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.v1 import common_pb2, inference_pb2
from services.gateway.engine.generation import Generation
from services.gateway.engine.request import GenerateJob, RequestBuilder, too_long
from services.gateway.errors import ApiError, invalid
from services.gateway.openai.gateway import Gateway

Vector = npt.NDArray[np.float32]
_SHOWN_SIZES = 20
_SMALLEST_LENGTH = 1e-12  # as torch.nn.functional.normalize


def embedding_info(gateway: Gateway) -> common_pb2.EmbeddingInfo:
    """The EmbeddingInfo of the workers' model. Call session.know_model() before. Raises ApiError 400 for a model that
    generates."""
    model = gateway.session.model
    if model is not None and model.HasField("embedding"):
        return model.embedding
    message = (
        f"the model {gateway.model_name!r} generates text and makes no embeddings; use the checkpoint of an embedding "
        "model (with a modules.json, or with --pooling)"
    )
    raise invalid("model", message, code="no_embedding_model")


def check_dimensions(dimensions: int, info: common_pb2.EmbeddingInfo, model_name: str) -> None:
    """Check that vectors may be cut to this many elements, as vLLM does. Raises ApiError 400."""
    sizes = [size for size in info.matryoshka_dimensions if size <= info.size]
    if not info.is_matryoshka:
        message = f"dimensions: the vectors of {model_name!r} cannot be cut, as it is no Matryoshka model"
    elif info.matryoshka_dimensions and dimensions not in sizes:
        shown = ", ".join(map(str, sizes[:_SHOWN_SIZES])) + (", …" if len(sizes) > _SHOWN_SIZES else "")
        message = f"dimensions must be one of {shown} for {model_name!r}, not {dimensions}"
    elif not 1 <= dimensions <= info.size:
        message = f"dimensions must be between 1 and {info.size} for {model_name!r}, not {dimensions}"
    else:
        return
    raise invalid("dimensions", message, code="unsupported_value")


def embedding_job(
    builder: RequestBuilder,
    token_ids: Sequence[int],
    info: common_pb2.EmbeddingInfo,
    *,
    request_id: str,
    endpoint: str,
    name: str,
    arrival_s: float,
    metadata: inference_pb2.Submission,
) -> GenerateJob:
    """The job for one input. `name`: of the field with the input. Raises ApiError 400."""
    if not token_ids:
        raise invalid(name, f"{name}: the input is empty: it needs at least one token")
    if len(token_ids) > builder.max_model_len:
        raise too_long(name, str(len(token_ids)), builder.max_model_len)
    own = inference_pb2.Submission(pooling=info.pooling)
    own.MergeFrom(metadata)
    return GenerateJob(
        request_id=request_id,
        endpoint=endpoint,
        prompt_ids=array("i", token_ids),
        sampling=common_pb2.SamplingParams(top_p=1.0, max_tokens=1),  # no token comes
        stop=(),
        final_tokens=frozenset(),
        token_bytes=builder.tokenizer.token_bytes,
        shown_bytes=builder.tokenizer.token_bytes,
        new_detokenizer=builder.tokenizer.detokenizer,
        arrival_s=arrival_s,
        metadata=own,
    )


async def vector_of(generation: Generation, info: common_pb2.EmbeddingInfo, dimensions: int | None = None) -> Vector:
    """Wait for the vector of an embedding_job(), and cut it to `dimensions`. Raises what Generation.next raises, and
    ApiError 500 for a vector of another size."""
    while generation.finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED:
        await generation.next()
    vector = np.frombuffer(generation.run.live.embedding, "<f4")
    if len(vector) != info.size:
        raise ApiError(500, f"the worker has sent {len(vector)} of {info.size} elements", code="internal_error")
    if dimensions is None or dimensions == info.size:
        return vector
    part = vector[:dimensions]
    if not info.normalized:
        return part
    cut: Vector = np.divide(part, max(float(np.linalg.norm(part)), _SMALLEST_LENGTH), dtype=np.float32)
    return cut
