"""A cache that knows an elected leader refuses a scheduler without election. The scheduler logs this once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from paceline.v1 import cache_pb2, cache_pb2_grpc, worker_pb2
from paceline.v1.worker_pb2_grpc import WorkerServiceStub
from scheduler_svc.server import serve
from scheduler_svc.settings import SchedulerSettings
from tests.contract.test_heartbeats import REGISTRATION, running
from tests.support.untyped_grpc import untyped


class Cache(cache_pb2_grpc.CacheServiceServicer):
    """Refuses every call until `refuses` is switched off."""

    def __init__(self) -> None:
        self.num_refused = self.num_answers = 0
        self.refuses = True

    async def Link(
        self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[cache_pb2.CacheServiceLinkResponse]:
        if self.refuses:
            self.num_refused += 1
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "there was a leader of epoch 7")
        async for request in requests:
            results = [cache_pb2.CacheOpResult() for _ in request.ops]
            self.num_answers += 1
            yield cache_pb2.CacheServiceLinkResponse(epoch=request.epoch, exchange=request.exchange, results=results)


async def test_a_refusal_of_the_cache_is_logged_once(capsys: pytest.CaptureFixture[str]) -> None:
    cache, server = Cache(), grpc.aio.server()
    cache_pb2_grpc.add_CacheServiceServicer_to_server(cache, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    settings = SchedulerSettings(port=0, metrics_port=0, cache=f"127.0.0.1:{port}")
    async with running(serve, settings) as channel, asyncio.timeout(30):
        worker = untyped(WorkerServiceStub(channel)).Link()  # so that there is something to say to a cache
        await worker.write(worker_pb2.WorkerServiceLinkRequest(registration=REGISTRATION))
        while cache.num_refused < 4:  # noqa: ASYNC110 - the other side's state
            await asyncio.sleep(0.01)
        cache.refuses = False
        while not cache.num_answers:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        said = capsys.readouterr().out
        while "cache connected" not in said[said.rindex("cache link broke") :]:
            await asyncio.sleep(0.01)
            said += capsys.readouterr().out
        worker.cancel()
    await server.stop(0)
    assert said.count("there was a leader of epoch 7") == 1, said
    assert said.count("cache link broke") <= 2, said  # twice if grpc reports only a failed write
