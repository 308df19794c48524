"""The memory of a request is free when the request has ended, without the garbage collector. The collector runs after
a number of new objects, not of bytes, and one object may be a prompt of a million tokens."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from paceline.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from services.gateway.engine.request import GenerateJob
from tests.contract.gateway.conftest import MODEL, Running, Start, until

NUM_REQUESTS = 3


def jobs() -> dict[int, GenerateJob]:
    """All jobs in memory, by id."""
    return {id(thing): thing for thing in gc.get_objects() if type(thing) is GenerateJob}


NoneIsLeft = Callable[[Running], Awaitable[None]]


@pytest.fixture
def none_is_left() -> Iterator[NoneIsLeft]:
    """Waits until memory has no job that the test has made."""
    gc.collect()
    gc.disable()
    before = jobs()  # of other tests

    async def wait(running: Running) -> None:
        await until(lambda: running.scheduler.num_running == 0)
        await until(lambda: not jobs().keys() - before.keys())

    yield wait
    gc.enable()


def body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": [7] * 50, "max_tokens": 5, **more}


async def ask(running: Running, fields: dict[str, Any], status: int) -> None:
    answer = await running.http.post("/v1/completions", json=fields)
    assert answer.status_code == status


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 3, "stream": True}, {"n": 2, "best_of": 3}])
async def test_answered_requests_leave_nothing_in_memory(
    running: Running, fields: dict[str, Any], none_is_left: NoneIsLeft
) -> None:
    for _ in range(NUM_REQUESTS):
        await ask(running, body(**fields), 200)
    await none_is_left(running)


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 3, "stream": True}, {"n": 3}])
async def test_requests_of_disconnected_clients_leave_nothing_in_memory(
    start: Start, fields: dict[str, Any], none_is_left: NoneIsLeft
) -> None:
    running = await start(step_s=0.01)
    long = {**body(**fields), "max_tokens": 1000}
    for _ in range(NUM_REQUESTS):
        with contextlib.suppress(httpx.ReadTimeout):
            async with running.http.stream("POST", "/v1/completions", json=long, timeout=0.3) as answer:
                await anext(answer.aiter_lines())
    assert len(running.scheduler.submissions) >= NUM_REQUESTS
    await none_is_left(running)


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 2}])
async def test_failed_requests_leave_nothing_in_memory(
    start: Start, fields: dict[str, Any], none_is_left: NoneIsLeft
) -> None:
    running = await start()
    error = common_pb2.FINISH_REASON_ERROR
    running.scheduler.reject = lambda s: inference_pb2.Ending(handle=s.handle, reason=error, code=13, message="broken")
    for _ in range(NUM_REQUESTS):
        await ask(running, body(**fields), 500)
    await none_is_left(running)


@contextlib.asynccontextmanager
async def grpc_calls(running: Running, max_tokens: int) -> AsyncIterator[list[Any]]:
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[7] * 50), sampling=inference_pb2.SamplingOptions(max_tokens=max_tokens)
    )
    async with grpc.aio.insecure_channel(running.addresses.grpc or "") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        yield [stub.Generate(request) for _ in range(NUM_REQUESTS)]


async def test_grpc_calls_leave_nothing_in_memory(running: Running, none_is_left: NoneIsLeft) -> None:
    async with grpc_calls(running, 5) as calls:
        for call in calls:
            assert [message async for message in call][-1].HasField("usage")
        await none_is_left(running)


async def test_cancelled_grpc_calls_leave_nothing_in_memory(start: Start, none_is_left: NoneIsLeft) -> None:
    running = await start(step_s=0.01)
    async with grpc_calls(running, 1000) as calls:
        for call in calls:
            await call.read()
            call.cancel()
        await asyncio.sleep(0)
        await none_is_left(running)
