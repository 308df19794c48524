"""InferenceService.Generate of a gateway, through the Python client and raw."""

from __future__ import annotations

import asyncio
import math
import re
from typing import Any

import grpc
import grpc.aio
import pytest

from paceline.v1 import inference_pb2, inference_pb2_grpc
from services.client import AsyncPacelineClient, InvalidRequest, NotFound, Overloaded, PacelineClient, Unavailable
from services.gateway.engine.request import RequestBuilder
from services.gateway.grpc import inference_service as grpc_front
from services.gateway.text.tokenizer import TextTokenizer
from tests.contract.gateway.conftest import MODEL, Running, Start, until
from tests.contract.gateway.fake_scheduler import scripted
from tests.contract.gateway.test_openai import CHECKPOINT
from tests.support.fake_session import ERROR

CHAT = [{"role": "user", "content": "hello"}]


async def test_grpc_and_http_give_the_same(running: Running) -> None:
    http = await running.openai.completions.create(model=MODEL, prompt="once", max_tokens=9, seed=4)
    chat = await running.openai.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=9, seed=4)  # type: ignore[arg-type]
    async with AsyncPacelineClient(running.addresses.grpc or "") as client:
        text = await client.generate("once", max_tokens=9, seed=4)
        assert (text.text, text.finish_reason) == (http.choices[0].text, "length")
        assert (await client.generate(messages=CHAT, max_tokens=9, seed=4)).text == chat.choices[0].message.content
        assert http.usage is not None
        assert (text.usage.prompt_tokens, text.usage.completion_tokens) == (http.usage.prompt_tokens, 9)
        assert len(text.token_ids) == 9
        ids = await client.generate(token_ids=[7, 8, 9], max_tokens=5, ignore_eos=True)
        assert (ids.usage.prompt_tokens, ids.usage.completion_tokens, ids.usage.cached_tokens) == (3, 5, 3)


async def test_the_blocking_client(running: Running) -> None:
    def use() -> tuple[str, str]:
        with PacelineClient(running.addresses.grpc or "", model=MODEL) as client:
            whole = client.generate(messages=CHAT, max_tokens=9, temperature=0)
            pieces = list(client.stream(messages=CHAT, max_tokens=9, temperature=0))
            assert [piece.finish_reason for piece in pieces][-1] == "length"
            return whole.text, "".join(piece.text for piece in pieces)

    whole, streamed = await asyncio.to_thread(use)
    assert whole == streamed != ""


async def test_stop_strings_over_grpc(start: Start) -> None:
    ids = TextTokenizer.from_folder(CHECKPOINT).encode("one two three four", add_special_tokens=False)
    running = await start(next_token=scripted(ids), step_s=0.002)
    async with AsyncPacelineClient(running.addresses.grpc or "") as client:
        result = await client.generate("x", stop=["o thr"], max_tokens=500)
        shown = await client.generate("x", stop=["o thr"], max_tokens=500, include_stop_str_in_output=True)
    assert (result.text, result.finish_reason) == ("one tw", "stop")
    assert (shown.text, shown.token_ids) == ("one two thr", result.token_ids)
    assert result.usage.completion_tokens == len(result.token_ids) < len(ids)
    await until(lambda: running.scheduler.num_running == 0)


async def test_special_tokens_over_grpc(start: Start) -> None:
    tokenizer = TextTokenizer.from_folder(CHECKPOINT)
    special = "<|user|>"
    running = await start(next_token=scripted(tokenizer.encode(f"one{special}two", add_special_tokens=False)))
    async with AsyncPacelineClient(running.addresses.grpc or "") as client:
        hidden = await client.generate("x", stop=["two"], max_tokens=500)
        shown = await client.generate("x", stop=["two"], max_tokens=500, skip_special_tokens=False)
    assert (hidden.text, shown.text) == ("one", f"one{special}")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"prompt": ""}, "text"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [5000]}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": [7] * 2048}, "token_ids"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"prompt": "x", "temperature": -1.0}, "sampling.temperature"),
        ({"prompt": "x", "temperature": float("nan")}, "sampling.temperature"),
        ({"prompt": "x", "max_tokens": 0}, "sampling.max_tokens"),
        ({"prompt": "x", "max_tokens": 3000}, "sampling.max_tokens"),
        ({"prompt": "x", "min_tokens": -1}, "sampling.min_tokens"),
        ({"prompt": "x", "top_p": 0.0}, "sampling.top_p"),
        ({"prompt": "x", "top_k": -2}, "sampling.top_k"),
        ({"prompt": "x", "stop": [""]}, "sampling.stop"),
        ({"prompt": "x", "stop_token_ids": [-4]}, "sampling.stop_token_ids"),
    ],
)
async def test_wrong_fields_are_refused_by_name(running: Running, arguments: dict[str, Any], field: str) -> None:
    async with AsyncPacelineClient(running.addresses.grpc or "") as client:
        with pytest.raises(InvalidRequest) as caught:
            await client.generate(**arguments)
    assert caught.value.field == field
    assert field.rpartition(".")[2] in str(caught.value)


async def test_overload_an_absent_scheduler_and_another_model_have_their_errors(start: Start) -> None:
    running = await start(settings={"scheduler_wait_s": 0.2})
    running.scheduler.reject = lambda _: inference_pb2.Ending(reason=ERROR, code=8, message="full", retry_after_s=2.5)
    async with AsyncPacelineClient(running.addresses.grpc or "", retry_for_s=0) as client:
        with pytest.raises(Overloaded, match="full") as caught:
            await client.generate("x")
        assert caught.value.retry_after_s == 2.5
        await running.scheduler.stop()
        with pytest.raises(Unavailable, match="no connection"):
            await client.generate("x")
    async with AsyncPacelineClient(running.addresses.grpc or "", model="other") as client:
        with pytest.raises(NotFound, match="other"):
            await client.generate("x")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["priority", "deadline_s"])
async def test_numbers_that_are_not_finite_are_refused_by_name(running: Running, name: str, value: Any) -> None:
    async with grpc.aio.insecure_channel(running.addresses.grpc or "") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match=f"{name} must be a finite number") as caught:
            _ = [r async for r in stub.Generate(inference_pb2.GenerateRequest(text="x", **{name: value}))]
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert running.scheduler.submissions == []


async def test_session_calls_and_calls_without_a_prompt_are_refused(running: Running) -> None:
    async with grpc.aio.insecure_channel(running.addresses.grpc or "") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [r async for r in stub.Generate(inference_pb2.GenerateRequest())]
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [r async for r in stub.Session(iter([inference_pb2.SessionRequest()]))]
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_request_ids(running: Running) -> None:
    async with grpc.aio.insecure_channel(running.addresses.grpc or "") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.GenerateRequest(text="x", request_id="mine")
        request.sampling.max_tokens = 2
        assert {r.request_id async for r in stub.Generate(request)} == {"mine"}
    assert running.scheduler.submissions[0].request_id == "mine"


@pytest.mark.parametrize("how", ["close", "deadline", "disconnect"])
async def test_a_cancelled_call_ends_at_the_scheduler(start: Start, how: str) -> None:
    running = await start(step_s=0.005)
    client = AsyncPacelineClient(running.addresses.grpc or "")
    stream = client.stream("x", max_tokens=1500, ignore_eos=True, timeout_s=5.0 if how == "deadline" else None)
    await anext(stream)
    assert running.scheduler.num_running == 1
    if how == "close":
        await stream.aclose()  # type: ignore[attr-defined]
    elif how == "disconnect":
        await client.close()
    await until(lambda: running.scheduler.num_running == 0)
    assert len(running.scheduler.cancels) == 1
    await client.close()


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({"messages": {"messages": [{"role": "user", "content": ""}] * 16_385}}, "messages"),
        ({"token_ids": {"ids": [5] * 2049}}, "token_ids"),
        ({"text": "x", "resume_after": 1, "resume_token_ids": [5] * 2049}, "resume_token_ids"),
        ({"text": "x", "cache_retention": [{}] * 65}, "cache_retention"),
        ({"text": "x", "sampling": {"stop": [""] * 17}}, "sampling.stop"),
        ({"text": "x", "sampling": {"stop_token_ids": [5] * 257}}, "sampling.stop_token_ids"),
        ({"text": "x", "sampling": {"logit_bias": dict.fromkeys(range(1025), 1.0)}}, "sampling.logit_bias"),
        ({"text": "x", "sampling": {"bad_words": [""] * 257}}, "sampling.bad_words"),
        ({"text": "x", "sampling": {"allowed_token_ids": [5] * 8193}}, "sampling.allowed_token_ids"),
        ({"text": "x", "sampling": {"bad_word_ids": [{"ids": [1]}] * 257}}, "sampling.bad_word_ids"),
        ({"text": "x", "sampling": {"bad_word_ids": [{"ids": [1] * 65}]}}, "sampling.bad_word_ids"),
    ],
)
async def test_a_list_that_is_too_long_is_refused_before_its_items_are_read(
    running: Running, request_: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message has room for a million items. To read them takes half a minute, in which no other call is served."""
    for nothing in (TextTokenizer.encode_chat, TextTokenizer.encode, RequestBuilder.check_token_ids):
        monkeypatch.setattr(f"{nothing.__module__}.{nothing.__qualname__}", None)
    monkeypatch.setattr(grpc_front, "_choices", None)
    monkeypatch.setattr(grpc_front, "message_fingerprint", None)
    async with grpc.aio.insecure_channel(running.addresses.grpc or "") as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest(**request_))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    metadata: Any = caught.value.trailing_metadata()
    assert dict(metadata)["field"] == field
    assert re.search(
        r"at most \d+ |context is 2048|context length is 2048|1 to 64 tokens, not 65", caught.value.details() or ""
    )
