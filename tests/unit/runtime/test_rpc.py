"""The gRPC factory: health, reflection, interceptor, drain, and a keepalive that really notices a dead peer."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import REGISTRY

from services.runtime.grpc_limits.open_streams import MAX_STREAMS_PER_PEER
from services.runtime.logs import configure_logging
from services.runtime.rpc import MAX_MESSAGE_BYTES, GrpcServer, open_channel, transport_options
from tests.support.untyped_grpc import EOF, untyped
from tests.unit.runtime import peers
from tests.unit.runtime.peers import NAME, Echo

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
PING_S = 1.5
ROOT = Path(__file__).parents[3]


@pytest.fixture
async def echo() -> AsyncIterator[tuple[GrpcServer, Echo, grpc.aio.Channel]]:
    server, servicer, port = await peers.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield server, servicer, channel
    await server.stop(0)


async def health(channel: grpc.aio.Channel, name: str = "") -> int:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name), timeout=30)
    return int(answer.status)


async def eventually(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 (polls state that has no event)
            await asyncio.sleep(0.01)


@asynccontextmanager
async def process(*argv: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """tests.unit.runtime.peers in a process of its own."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.unit.runtime.peers", *argv, stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    try:
        yield child
    finally:
        with suppress(ProcessLookupError):
            child.kill()
        await child.communicate()


async def first_line(child: asyncio.subprocess.Process) -> str:
    assert child.stdout is not None
    return (await asyncio.wait_for(child.stdout.readline(), 30)).decode().strip()


async def test_health_follows_set_serving(echo: tuple[GrpcServer, Echo, grpc.aio.Channel]) -> None:
    server, _, channel = echo
    for name in ("", NAME):
        assert await health(channel, name) == SERVING
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await health(channel, "no.Such")
    assert error.value.code() == grpc.StatusCode.NOT_FOUND
    server.set_serving(False)
    for name in ("", NAME):
        assert await health(channel, name) == NOT_SERVING


async def test_a_server_is_not_serving_before_set_serving() -> None:
    server = GrpcServer("127.0.0.1", 0)
    port = await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            assert await health(channel) == NOT_SERVING
    finally:
        await server.stop(0)


async def test_reflection_lists_the_services(echo: tuple[GrpcServer, Echo, grpc.aio.Channel]) -> None:
    call = reflection_pb2_grpc.ServerReflectionStub(echo[2]).ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    )
    answer = await call.read()
    names = {service.name for service in answer.list_services_response.service}
    assert {NAME, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= names


async def test_reflection_of_v1_describes_itself(echo: tuple[GrpcServer, Echo, grpc.aio.Channel]) -> None:
    """A client that knows only the v1 service gets descriptions of v1. (The test uses the message classes of v1alpha,
    which have the same fields, because grpcio-reflection has none of v1.)"""
    method = echo[2].stream_stream(
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    name = "grpc.reflection.v1.ServerReflection"
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=name),
    ]
    listed, described = [answer async for answer in method(iter(requests))]
    assert name in {service.name for service in listed.list_services_response.service}
    files = described.file_descriptor_response.file_descriptor_proto
    parsed = [descriptor_pb2.FileDescriptorProto.FromString(file) for file in files]
    [own] = [file for file in parsed if file.package == "grpc.reflection.v1"]
    pool = descriptor_pool.DescriptorPool()
    for file in parsed:
        pool.Add(file)
    [described_method] = pool.FindServiceByName(name).methods
    assert described_method.input_type.full_name == "grpc.reflection.v1.ServerReflectionRequest"
    assert "v1alpha" not in str(own)


@pytest.mark.parametrize("kind", ["watch", "reflection"])
async def test_streams_that_any_client_may_open_are_limited(
    echo: tuple[GrpcServer, Echo, grpc.aio.Channel], kind: str
) -> None:
    """The limit is per client address. It also holds if all streams are on one connection."""
    _, _, channel = echo
    streams: list[Any] = []

    async def open_one() -> str:
        """Opens a stream, and keeps it after its first answer. Returns why the server refuses it."""
        if kind == "watch":
            stream = untyped(health_pb2_grpc.HealthStub(channel)).Watch(health_pb2.HealthCheckRequest())
        else:
            stream = untyped(reflection_pb2_grpc.ServerReflectionStub(channel)).ServerReflectionInfo()
            with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):  # already refused
                await stream.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        streams.append(stream)
        try:
            await stream.read()
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        return ""

    async with asyncio.timeout(60):
        assert {await open_one() for _ in range(MAX_STREAMS_PER_PEER)} == {""}
        assert (await open_one()).startswith("RESOURCE_EXHAUSTED: at most 256 streams")
        assert await health(channel) == SERVING, "calls that end at once are served"
        for stream in streams:
            stream.cancel()
        while await open_one():  # noqa: ASYNC110 - the server's state
            await asyncio.sleep(0.05)
        streams[-1].cancel()


async def test_a_taken_port_is_refused() -> None:
    server, _, port = await peers.start()
    second = GrpcServer("127.0.0.1", port)
    try:
        with pytest.raises(RuntimeError, match="bind"):
            await second.start()
    finally:
        await server.stop(0)
        await second.stop(0)


async def test_streams_and_message_sizes(echo: tuple[GrpcServer, Echo, grpc.aio.Channel]) -> None:
    channel = echo[2]
    assert [m async for m in untyped(channel).unary_stream(f"/{NAME}/Count")(b"3")] == [b"0", b"1", b"2"]
    big = bytes(MAX_MESSAGE_BYTES)
    assert await untyped(channel).unary_unary(f"/{NAME}/Say")(big) == big
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await untyped(channel).unary_unary(f"/{NAME}/Say")(big + b"1")
    assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_an_unexpected_exception_is_internal_and_logged(
    echo: tuple[GrpcServer, Echo, grpc.aio.Channel], log_stream: io.StringIO
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await untyped(echo[2]).unary_unary(f"/{NAME}/Fail")(b"", metadata=(("x-request-id", "req-9"),))
    assert error.value.code() == grpc.StatusCode.INTERNAL
    assert "secret" not in (error.value.details() or "")
    (line,) = [json.loads(line) for line in log_stream.getvalue().splitlines()]
    assert (line["level"], line["request_id"], line["method"]) == ("error", "req-9", f"/{NAME}/Fail")
    assert "a secret detail" in line["exception"]


async def test_request_ids_stay_with_their_call(
    echo: tuple[GrpcServer, Echo, grpc.aio.Channel], log_stream: io.StringIO
) -> None:
    say = untyped(echo[2]).unary_unary(f"/{NAME}/Say")
    await say(b"", metadata=(("x-request-id", "r" * 500),))
    await say(b"")
    first, second = [json.loads(line) for line in log_stream.getvalue().splitlines()]
    assert first["request_id"] == "r" * 128
    assert "request_id" not in second


async def test_calls_are_counted_by_code(echo: tuple[GrpcServer, Echo, grpc.aio.Channel]) -> None:
    def handled(method: str, code: str) -> float:
        labels = {"grpc_method": f"/{NAME}/{method}", "grpc_code": code}
        return REGISTRY.get_sample_value("grpc_server_handled_total", labels) or 0.0

    wanted = [("Say", "OK"), ("Refuse", "NOT_FOUND"), ("Fail", "INTERNAL"), ("Hang", "CANCELLED")]
    before = {pair: handled(*pair) for pair in wanted}
    channel = echo[2]
    await untyped(channel).unary_unary(f"/{NAME}/Say")(b"")
    for method in ("Refuse", "Fail"):
        with pytest.raises(grpc.aio.AioRpcError):
            await untyped(channel).unary_unary(f"/{NAME}/{method}")(b"")
    call = untyped(channel).unary_stream(f"/{NAME}/Hang")(b"")
    await call.read()
    call.cancel()
    for pair in wanted:
        # Possibly by more than 1: a call of an earlier test may be counted late.
        await eventually(lambda pair=pair: handled(*pair) > before[pair])  # type: ignore[misc]
    seconds = REGISTRY.get_sample_value("grpc_server_handling_seconds_count", {"grpc_method": f"/{NAME}/Say"})
    assert seconds is not None
    assert seconds >= 1


async def test_a_cancelled_call_ends_its_handler(
    echo: tuple[GrpcServer, Echo, grpc.aio.Channel], log_stream: io.StringIO
) -> None:
    call = untyped(echo[2]).unary_stream(f"/{NAME}/Hang")(b"")
    await call.read()
    call.cancel()
    await asyncio.wait_for(echo[1].closed.wait(), 20)
    assert log_stream.getvalue() == ""


async def test_stop_lets_a_running_call_end() -> None:
    server, _, port = await peers.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        call = untyped(channel).stream_stream(f"/{NAME}/Wait")()
        await call.write(b"0")
        assert await call.read() == b"0"
        await call.write(b"0.3")
        stopping = asyncio.create_task(server.stop(60))
        await call.done_writing()
        assert await call.read() == b"0.3"
        assert await call.read() is EOF
        assert await call.code() == grpc.StatusCode.OK
        await asyncio.wait_for(stopping, 20)


async def test_stop_cancels_calls_after_the_grace() -> None:
    server, servicer, port = await peers.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        call = untyped(channel).unary_stream(f"/{NAME}/Hang")(b"")
        await call.read()
        began = time.monotonic()
        await server.stop(0.2)
        assert time.monotonic() - began > 0.15
        await asyncio.wait_for(servicer.closed.wait(), 20)
        assert await call.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


async def test_a_health_watch_learns_of_the_stop_and_does_not_hold_it_up() -> None:
    server, _, port = await peers.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=NAME))
        assert (await watch.read()).status == SERVING
        stopping = asyncio.create_task(server.stop(60))
        assert (await asyncio.wait_for(watch.read(), 20)).status == NOT_SERVING
        await asyncio.wait_for(stopping, 20)


async def test_a_proxy_in_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    server, _, port = await peers.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            assert await untyped(channel).unary_unary(f"/{NAME}/Say")(b"x", timeout=20) == b"x"
    finally:
        await server.stop(0)


async def test_a_frozen_server_is_noticed() -> None:
    async with process("serve", str(PING_S)) as child:
        target = f"127.0.0.1:{await first_line(child)}"
        async with open_channel(target, transport_options(PING_S, PING_S)) as channel:
            call = untyped(channel).unary_stream(f"/{NAME}/Hang")(b"")
            assert await call.read() == b"here"
            os.kill(child.pid, signal.SIGSTOP)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await asyncio.wait_for(call.read(), 20)  # gRPC by itself takes a minute
            assert error.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_a_frozen_client_is_noticed() -> None:
    server, servicer, port = await peers.start(transport_options(PING_S, PING_S))
    try:
        async with process("call", f"127.0.0.1:{port}", str(PING_S)) as child:
            assert await first_line(child) == "hanging"
            assert servicer.hanging == 1
            os.kill(child.pid, signal.SIGSTOP)
            await asyncio.wait_for(servicer.closed.wait(), 20)
    finally:
        await server.stop(0)


async def test_an_idle_connection_is_left_alone() -> None:
    """The server does not close a connection with `too_many_pings` if the client pings at the configured interval."""
    fast = transport_options(0.1, 5.0)
    server, servicer, port = await peers.start(fast)
    try:
        async with open_channel(f"127.0.0.1:{port}", fast) as channel:
            call = untyped(channel).unary_stream(f"/{NAME}/Hang")(b"")
            await call.read()
            await asyncio.sleep(1.5)
            assert servicer.hanging == 1
            assert not call.done()
            call.cancel()
    finally:
        await server.stop(0)


@pytest.fixture
def log_stream() -> Iterator[io.StringIO]:
    import structlog

    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    configure_logging("test", "info", "json", stream=stream)
    yield stream
    root.handlers, root.level = handlers, level
    logging.captureWarnings(False)
    structlog.reset_defaults()
