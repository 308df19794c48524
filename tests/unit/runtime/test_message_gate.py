"""How many requests a gRPC server receives at once, and which calls wait until it receives theirs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.runtime.grpc_limits.message_gate import MessageGate
from services.runtime.rpc import GrpcServer

LARGE = bytes(2**20)
CODE = grpc.StatusCode.RESOURCE_EXHAUSTED


class Late:
    """A call with a request that comes when the test says so."""

    def __init__(self, request: bytes = b"") -> None:
        self.request = request
        self.come: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.reading = asyncio.Event()
        self.refused: tuple[grpc.StatusCode, str] | None = None

    async def read(self) -> bytes:
        self.reading.set()
        return await self.come

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.refused = code, details
        raise grpc.aio.AbortError


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - any condition
            await asyncio.sleep(0.002)


async def test_a_limited_number_of_messages_is_read_at_once() -> None:
    gate = MessageGate(max_reading=2, max_waiting=9)
    calls = [Late() for _ in range(4)]
    tasks = [asyncio.create_task(gate.read(call)) for call in calls]
    await until(lambda: calls[1].reading.is_set())
    assert [call.reading.is_set() for call in calls] == [True, True, False, False]
    calls[1].come.set_result(b"b")
    await until(lambda: calls[2].reading.is_set())
    assert not calls[3].reading.is_set()
    for call in (calls[0], calls[2], calls[3]):
        call.come.set_result(b"x")
    assert await asyncio.gather(*tasks) == [b"x", b"b", b"x", b"x"]


async def test_a_call_beyond_the_limit_of_waiting_calls_is_refused() -> None:
    gate = MessageGate(max_reading=1, max_waiting=1)
    calls = [Late() for _ in range(3)]
    tasks = [asyncio.create_task(gate.read(call)) for call in calls]
    await until(lambda: calls[2].refused is not None)
    assert calls[2].refused == (CODE, "the server is receiving too many requests: try again later")
    for call in calls[:2]:
        call.come.set_result(b"x")
    assert await asyncio.gather(*tasks[:2]) == [b"x", b"x"]
    with pytest.raises(grpc.aio.AbortError):
        await tasks[2]


async def test_the_oldest_slow_requests_are_refused_for_calls_that_wait() -> None:
    gate = MessageGate(max_reading=3, max_waiting=9, patience_s=0.0)
    slow = [Late() for _ in range(3)]
    tasks = [asyncio.create_task(gate.read(call)) for call in slow]
    await until(lambda: slow[2].reading.is_set())
    quick = [Late(), Late()]
    for call in quick:
        call.come.set_result(b"quick")
    assert await asyncio.gather(*(gate.read(call) for call in quick)) == [b"quick"] * 2
    assert [call.refused is not None for call in slow] == [True, True, False]  # no other call waits
    assert slow[0].refused is not None
    assert slow[0].refused[0] is CODE
    assert "did not arrive as a whole within" in slow[0].refused[1]
    slow[2].come.set_result(b"slow")
    assert (await asyncio.gather(*tasks, return_exceptions=True))[2] == b"slow"


async def test_a_cancelled_call_frees_its_position() -> None:
    gate = MessageGate(max_reading=1, max_waiting=2)
    calls = [Late() for _ in range(3)]
    tasks = [asyncio.create_task(gate.read(call)) for call in calls]
    await until(lambda: calls[0].reading.is_set())
    tasks[1].cancel()
    tasks[0].cancel()
    calls[2].come.set_result(b"x")
    assert await tasks[2] == b"x"


async def once(request: bytes, context: Any) -> bytes:
    return b"%d" % len(request)


async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
    yield b"%d" % len(request)


@asynccontextmanager
async def serving(gate: MessageGate) -> AsyncIterator[Any]:
    server = GrpcServer("127.0.0.1", 0, gate=gate)
    handlers = {
        "Once": grpc.unary_unary_rpc_method_handler(once),
        "Stream": grpc.unary_stream_rpc_method_handler(stream),
    }
    service = grpc.method_handlers_generic_handler("test", handlers)
    server.add("test", lambda inner: inner.add_generic_rpc_handlers((service,)))
    port = await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


async def test_clients_of_methods_that_take_one_request_notice_nothing() -> None:
    async with serving(MessageGate(max_reading=2, max_waiting=100)) as channel:
        answers = await asyncio.gather(*(channel.unary_unary("/test/Once")(LARGE) for _ in range(20)))
        assert answers == [b"1048576"] * 20
        assert [answer async for answer in channel.unary_stream("/test/Stream")(LARGE)] == [b"1048576"]
        assert await channel.unary_unary("/test/Once")(b"") == b"0"


async def test_a_call_without_a_request_is_refused_and_health_is_not_limited() -> None:
    gate = MessageGate(max_reading=1, max_waiting=0)
    async with serving(gate) as channel:
        nothing = channel.stream_unary("/test/Once")()
        await nothing.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await nothing
        assert (caught.value.code(), caught.value.details()) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "the call has no request",
        )
        open_call = channel.stream_unary("/test/Once")()
        await open_call.wait_for_connection()
        await until(gate._places.locked)
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/test/Once")(b"x")
        assert caught.value.code() is CODE
        open_call.cancel()
        await until(lambda: not gate._places.locked())
        assert await channel.unary_unary("/test/Once")(b"x") == b"1"
