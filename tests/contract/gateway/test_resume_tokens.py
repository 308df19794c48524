"""The gRPC client's way to go on at any gateway: it brings the tokens that it has."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from paceline.v1 import inference_pb2, inference_pb2_grpc
from services.client import AsyncPacelineClient, InvalidRequest, Piece
from services.client.types import Options, error_from, make_request, piece_from, result_from
from tests.contract.gateway.conftest import Running, Start

OPTIONS: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "logprobs": 1, "seed": 11}


async def ask(running: Running, tokens: list[int], **options: Any) -> list[Piece]:
    """The rest of the answer that begins with `tokens`."""
    request = make_request("once", None, None, "", OPTIONS | options)  # type: ignore[arg-type]
    request.resume_after = len(tokens)
    request.resume_token_ids.extend(tokens)
    return await send(running, request)


async def send(running: Running, request: inference_pb2.GenerateRequest) -> list[Piece]:
    async with grpc.aio.insecure_channel(running.addresses.grpc or "") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        try:
            responses = [response async for response in stub.Generate(request)]
        except grpc.aio.AioRpcError as error:
            raise error_from(error.code(), error.details(), error.trailing_metadata()) from None  # type: ignore[arg-type]
    positions = [len(request.resume_token_ids)]
    for response in responses:
        assert response.position == positions[-1]
        positions.append(response.position + len(response.token_ids))
    return [piece_from(response) for response in responses]


@pytest.mark.parametrize("stop", [[], ["no such end"], ["of the answer"]])
async def test_delivered_tokens_are_not_generated_again(start: Start, stop: list[str]) -> None:
    running = await start(step_s=0.001)
    pieces = await ask(running, [], stop=stop)
    whole = result_from(pieces)
    assert len(whole.token_ids) == 40
    for cut in range(1, len(pieces)):
        before = pieces[:cut]
        tokens = [token for piece in before for token in piece.token_ids]
        num_submitted = len(running.scheduler.submissions)
        got = result_from([*before, *await ask(running, tokens, stop=stop)])
        assert (got.text, got.token_ids, got.logprobs) == (whole.text, whole.token_ids, whole.logprobs)
        assert (got.finish_reason, got.usage) == (whole.finish_reason, whole.usage)
        [submission] = running.scheduler.submissions[num_submitted:]
        assert np.frombuffer(submission.output_token_ids, "<i4").tolist() == tokens


@pytest.mark.parametrize("ending", ["length", "stop"])
async def test_nothing_is_generated_if_only_the_end_of_an_answer_is_missing(start: Start, ending: str) -> None:
    running = await start(step_s=0.001)
    whole = result_from(await ask(running, []))
    options: dict[str, Any] = (
        {} if ending == "length" else {"stop_token_ids": [whole.token_ids[9]], "ignore_eos": False}
    )
    tokens = whole.token_ids[: 40 if ending == "length" else whole.token_ids.index(whole.token_ids[9]) + 1]
    num_submitted = len(running.scheduler.submissions)
    [end] = await ask(running, tokens, **options)
    assert (end.text, end.token_ids, end.finish_reason) == ("", [], ending)
    assert end.usage is not None
    assert end.usage.completion_tokens == len(tokens)
    assert len(running.scheduler.submissions) == num_submitted


async def test_resume_tokens_are_compared_with_an_answer_that_the_gateway_has(start: Start) -> None:
    running = await start(step_s=0.001)
    whole = result_from(await ask(running, [], idempotency_key="k"))
    rest = await ask(running, whole.token_ids[:7], idempotency_key="k")
    assert result_from(rest).token_ids == whole.token_ids[7:]
    assert len(running.scheduler.submissions) == 1
    with pytest.raises(InvalidRequest, match="begins with other tokens") as error:
        await ask(running, [*whole.token_ids[:6], whole.token_ids[6] ^ 1], idempotency_key="k")
    assert error.value.field == "resume_token_ids"


async def test_a_client_with_fewer_tokens_gets_none_that_another_client_has_brought(start: Start) -> None:
    running = await start(step_s=0.001)
    whole = result_from(await ask(running, []))
    await ask(running, whole.token_ids[:7], idempotency_key="k")
    again = result_from(await ask(running, [], idempotency_key="k"))  # this client has lost its tokens
    assert (again.token_ids, again.logprobs) == (whole.token_ids, whole.logprobs)
    await ask(running, [whole.token_ids[0] ^ 1], idempotency_key="made up")
    assert result_from(await ask(running, [], idempotency_key="made up")).token_ids == whole.token_ids


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("resume_after", {"resume_after": 1}),
        ("resume_after", {"resume_after": 3}),
        ("resume_after", {"sampling": {"max_tokens": 1}}),
        ("resume_after", {"beam": {"width": 2}}),
        ("resume_token_ids", {"resume_token_ids": [7, 5000]}),
        ("resume_token_ids", {"resume_token_ids": [7, -1]}),
        ("resume_token_ids", {"sampling": {}}),
        ("resume_token_ids", {"sampling": {"temperature": 0.5}}),
    ],
)
async def test_wrong_resume_fields_are_refused_by_name(running: Running, field: str, changes: dict[str, Any]) -> None:
    fields: dict[str, Any] = {
        "text": "x",
        "resume_after": 2,
        "resume_token_ids": [7, 8],
        "sampling": {"temperature": 0},
    }
    with pytest.raises(InvalidRequest) as error:
        await send(running, inference_pb2.GenerateRequest(**fields | changes))
    assert error.value.field == field
    assert running.scheduler.submissions == []


@pytest.mark.parametrize("key", ["", "k"])
async def test_the_client_goes_on_at_the_next_gateway(start: Start, key: str) -> None:
    """The first one is stopped in the middle; nothing is lost, doubled, or generated again."""
    gateways = [await start(step_s=0.003, settings={"drain_s": 0.0}), await start(tokens_per_step=3)]
    targets = [running.addresses.grpc or "" for running in gateways]
    # So many tokens that some are left, however many come in one piece.
    options: Options = {"max_tokens": 600, "ignore_eos": True, "idempotency_key": key}
    pieces: list[Piece] = []
    async with AsyncPacelineClient(targets) as client:
        async for piece in client.stream("once", **options):
            pieces.append(piece)
            if len(pieces) == 5:
                gateways[0].stop.set()
                await asyncio.sleep(0)
    first, second = (running.scheduler.submissions[-1] for running in gateways)
    assert first.sampling.seed == second.sampling.seed
    num_before = len(second.output_token_ids) // 4
    assert 5 <= num_before < 600
    async with AsyncPacelineClient(targets[1:]) as client:
        undisturbed = await client.generate("once", max_tokens=600, ignore_eos=True, seed=first.sampling.seed)
    got = result_from(pieces)
    assert (got.text, got.token_ids, got.finish_reason) == (undisturbed.text, undisturbed.token_ids, "length")
