"""A tiny gRPC service, in this process or in one that can be stopped with a signal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from services.runtime.logs import get_logger
from services.runtime.rpc import GrpcServer, Options, open_channel, transport_options
from tests.support.untyped_grpc import untyped

NAME = "test.Echo"
log = get_logger(__name__)


class Echo:
    """Methods named after what they do; bytes in, bytes out."""

    def __init__(self) -> None:
        self.hanging = 0
        self.closed = asyncio.Event()

    async def say(self, request: bytes, context: Any) -> bytes:
        log.info("said")
        return request

    async def fail(self, request: bytes, context: Any) -> bytes:
        raise KeyError("a secret detail")

    async def refuse(self, request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.NOT_FOUND, "no such thing")
        raise AssertionError("unreachable")

    async def count(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        for number in range(int(request)):
            yield str(number).encode()

    async def hang(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        self.hanging += 1
        try:
            yield b"here"
            await asyncio.sleep(3600)
        finally:
            self.hanging -= 1
            self.closed.set()

    async def wait(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            await asyncio.sleep(float(request))
            yield request

    def register(self, server: grpc.aio.Server) -> None:
        handlers = {
            "Say": grpc.unary_unary_rpc_method_handler(self.say),
            "Fail": grpc.unary_unary_rpc_method_handler(self.fail),
            "Refuse": grpc.unary_unary_rpc_method_handler(self.refuse),
            "Count": grpc.unary_stream_rpc_method_handler(self.count),
            "Hang": grpc.unary_stream_rpc_method_handler(self.hang),
            "Wait": grpc.stream_stream_rpc_method_handler(self.wait),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))


async def start(options: Options | None = None) -> tuple[GrpcServer, Echo, int]:
    """A serving echo server on a free port of loopback."""
    server, echo = GrpcServer("127.0.0.1", 0, options), Echo()
    server.add(NAME, echo.register)
    port = await server.start()
    server.set_serving(True)
    await asyncio.sleep(0)
    return server, echo, port


async def _serve(ping_s: float) -> None:
    server, _, port = await start(transport_options(ping_s, ping_s))
    print(port, flush=True)
    await asyncio.sleep(60)
    await server.stop(0)


async def _call(target: str, ping_s: float) -> None:
    async with open_channel(target, transport_options(ping_s, ping_s)) as channel:
        async for _ in untyped(channel).unary_stream(f"/{NAME}/Hang")(b""):
            print("hanging", flush=True)


if __name__ == "__main__":
    role, *rest = sys.argv[1:]
    asyncio.run(_serve(float(rest[0])) if role == "serve" else _call(rest[0], float(rest[1])))
