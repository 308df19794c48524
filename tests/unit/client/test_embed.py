"""The client's embed(): what it sends, and after which errors it repeats the call."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from paceline.v1 import inference_pb2, inference_pb2_grpc
from services.client import AsyncPacelineClient, EmbedResult, PacelineClient, PacelineError, Usage
from services.client.types import EmbedOptions, make_embed_request

CODES = grpc.StatusCode


class EmbeddingServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Fails the first calls with these codes, and then gives a vector."""

    def __init__(self, *codes: grpc.StatusCode) -> None:
        self.codes = list(codes)
        self.requests: list[inference_pb2.EmbedRequest] = []

    def Embed(self, request: inference_pb2.EmbedRequest, context: Any) -> inference_pb2.EmbedResponse:
        self.requests.append(request)
        if self.codes:
            context.abort(self.codes.pop(0), "broken")
        usage = inference_pb2.Usage(prompt_tokens=3, cached_tokens=2)
        return inference_pb2.EmbedResponse(embedding=[0.5, -1.0], usage=usage)


@contextmanager
def serving(servicer: EmbeddingServicer) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


def embed(targets: list[str], *, is_async: bool, **given: Any) -> EmbedResult:
    if not is_async:
        with PacelineClient(targets, model="m") as client:
            return client.embed(**given)

    async def run() -> EmbedResult:
        async with AsyncPacelineClient(targets, model="m") as client:
            return await client.embed(**given)

    return asyncio.run(run())


@pytest.mark.parametrize("is_async", [False, True])
def test_a_failed_embed_call_is_repeated_at_the_next_server(is_async: bool) -> None:
    """Each server fails once. The third call goes to the first server again."""
    first, second = EmbeddingServicer(CODES.CANCELLED), EmbeddingServicer(CODES.UNAVAILABLE)
    with serving(first) as one, serving(second) as two:
        result = embed([one, two], is_async=is_async, token_ids=[7, 8], tenant="t", dimensions=2, deadline_s=50)
    assert result == EmbedResult([0.5, -1.0], Usage(3, 0, 2))
    assert (len(first.requests), len(second.requests)) == (2, 1)
    [request] = second.requests
    assert (request.model, request.tenant, request.dimensions) == ("m", "t", 2)
    assert list(request.token_ids.ids) == [7, 8]
    assert 40 < request.deadline_s < 50, "the time that is left"


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("code", [CODES.INVALID_ARGUMENT, CODES.RESOURCE_EXHAUSTED])
def test_a_final_error_of_an_embed_is_raised_at_once(code: grpc.StatusCode, is_async: bool) -> None:
    servicer = EmbeddingServicer(code)
    with serving(servicer) as target, pytest.raises(PacelineError, match="broken") as caught:
        embed([target], is_async=is_async, text="hi")
    assert (caught.value.code, len(servicer.requests)) == (code, 1)


def test_the_arguments_of_an_embed_call_are_checked() -> None:
    assert make_embed_request("", None, "", {}).WhichOneof("input") == "text"
    assert make_embed_request(None, [], "", {}).WhichOneof("input") == "token_ids"
    options: Any = dict.fromkeys(EmbedOptions.__annotations__)
    assert make_embed_request("a", None, "", options) == make_embed_request("a", None, "", {})
    for text, ids in ((None, None), ("a", [1])):
        with pytest.raises(TypeError, match="exactly one"):
            make_embed_request(text, ids, "", {})
    for wrong in ({"dimensions": -1}, {"priority": "high"}, {"temperature": 1}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            make_embed_request("a", None, "", wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ids"):
        make_embed_request(None, [2**40], "", {})
