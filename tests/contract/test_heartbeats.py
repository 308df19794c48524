"""Links between services when one end falls silent. Each test runs one real service and plays its peer.

The tests assert no times: a test that waits for an event that never comes fails with its timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from cache_svc.server import PATIENCE
from cache_svc.server import serve as serve_cache
from cache_svc.settings import CacheSettings
from paceline.v1 import cache_pb2, cache_pb2_grpc, common_pb2, inference_pb2, inference_pb2_grpc, worker_pb2
from paceline.v1.worker_pb2_grpc import WorkerServiceStub
from scheduler_svc.core.faults.suspects import Loss
from scheduler_svc.core.scheduler import SchedulerCore
from scheduler_svc.server import serve as serve_scheduler
from scheduler_svc.settings import SchedulerSettings
from services.gateway.engine.session import SchedulerSession
from services.runtime import liveness
from services.runtime.liveness import BEAT_S
from services.runtime.rpc import open_channel
from tests.support.untyped_grpc import EOF, untyped

# Even a crowded machine passes a heartbeat from thread to thread within this time.
TIMEOUT_S = 2.0
LONG_S = TIMEOUT_S + 3 * BEAT_S  # a live peer must not be given up within this time
NUM_BEATS = round(LONG_S / BEAT_S)
SILENT = grpc.StatusCode.DEADLINE_EXCEEDED
REGISTRATION = worker_pb2.WorkerRegistration(
    name="w",
    model=common_pb2.ModelInfo(name="m", fingerprint="m", vocab_size=10, max_model_len=100),
    block_size=4,
    num_blocks=10,
    max_num_seqs=4,
    max_batched_tokens=16,
)
OPEN = inference_pb2.SessionRequest(open=inference_pb2.SessionOpen(session_id="s", response_window=8))


@asynccontextmanager
async def running(serve: Callable[..., Awaitable[None]], settings: Any) -> AsyncIterator[grpc.aio.Channel]:
    ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    task = asyncio.ensure_future(serve(settings, stop, on_ready=ready.set_result))
    try:
        await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
        async with open_channel(ready.result().grpc or "") as channel:
            yield channel
    finally:
        stop.set()
        await task


@pytest.fixture
async def cache() -> AsyncIterator[grpc.aio.Channel]:
    settings = CacheSettings(port=0, metrics_port=0, heartbeat_timeout_s=TIMEOUT_S / PATIENCE)
    async with running(serve_cache, settings) as channel:
        yield channel


@pytest.fixture
async def scheduler() -> AsyncIterator[grpc.aio.Channel]:
    """A scheduler without a cache, so it serves no request."""
    settings = SchedulerSettings(port=0, metrics_port=0, cache="127.0.0.1:1", heartbeat_timeout_s=TIMEOUT_S)
    async with running(serve_scheduler, settings) as channel:
        yield channel


async def ends_with(call: Any) -> grpc.StatusCode:
    """Reads until the other end ends the call, and returns its status."""
    try:
        while await call.read() is not EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def first_exchange(**flags: Any) -> cache_pb2.CacheServiceLinkRequest:
    return cache_pb2.CacheServiceLinkRequest(epoch=3, exchange=1, **flags)


async def test_the_cache_sends_heartbeats_and_gives_up_a_scheduler_that_sends_none(cache: grpc.aio.Channel) -> None:
    call = untyped(cache_pb2_grpc.CacheServiceStub(cache)).Link()
    await call.write(first_exchange(heartbeats=True))
    assert sorted([(await call.read()).heartbeat, (await call.read()).heartbeat]) == [False, True]
    for _ in range(NUM_BEATS):
        await call.write(cache_pb2.CacheServiceLinkRequest(epoch=3, heartbeat=True))
        response = await call.read()
        assert (response.heartbeat, response.exchange) == (True, 0)
    await call.write(cache_pb2.CacheServiceLinkRequest(epoch=3, exchange=2))  # heartbeats take no exchange number
    while (response := await call.read()).heartbeat:
        pass
    assert response.exchange == 2
    assert await ends_with(call) is SILENT


async def test_the_cache_asks_nothing_of_a_scheduler_that_knows_no_heartbeats(cache: grpc.aio.Channel) -> None:
    call = untyped(cache_pb2_grpc.CacheServiceStub(cache)).Link()
    await call.write(first_exchange())
    assert (await call.read()).exchange == 1
    await asyncio.sleep(LONG_S)
    await call.write(cache_pb2.CacheServiceLinkRequest(epoch=3, exchange=2))
    assert (await call.read()).exchange == 2, "a heartbeat came before it"
    call.cancel()


async def after_status(call: Any) -> inference_pb2.SessionResponse:
    """The next message that is not only a status. (A status comes with each change.)"""
    while True:
        message: inference_pb2.SessionResponse = await call.read()
        if message != inference_pb2.SessionResponse(status=message.status):
            return message


async def test_the_scheduler_gives_up_a_gateway_that_stops_sending_heartbeats(scheduler: grpc.aio.Channel) -> None:
    call = untyped(inference_pb2_grpc.InferenceServiceStub(scheduler)).Session()
    opening = inference_pb2.SessionRequest()
    opening.CopyFrom(OPEN)
    opening.open.heartbeats = True
    await call.write(opening)
    while not (await call.read()).heartbeat:
        pass
    for _ in range(NUM_BEATS):
        await call.write(inference_pb2.SessionRequest())
        assert (await after_status(call)).heartbeat
    assert await ends_with(call) is SILENT
    again = untyped(inference_pb2_grpc.InferenceServiceStub(scheduler)).Session()
    await again.write(OPEN)  # the name is free
    assert (await again.read()).HasField("opened")
    again.cancel()


async def test_the_scheduler_asks_nothing_of_a_gateway_that_knows_no_heartbeats(scheduler: grpc.aio.Channel) -> None:
    call = untyped(inference_pb2_grpc.InferenceServiceStub(scheduler)).Session()
    await call.write(OPEN)
    assert (await call.read()).HasField("opened")
    await asyncio.sleep(LONG_S)
    submission = inference_pb2.Submission(handle=1)  # without any other field, so the scheduler refuses it
    await call.write(inference_pb2.SessionRequest(submissions=[submission]))
    assert (await after_status(call)).endings[0].handle == 1, "a heartbeat came before it"
    call.cancel()


@pytest.mark.parametrize("reads_heartbeats", [True, False])
async def test_the_scheduler_gives_up_a_worker_that_is_silent(
    scheduler: grpc.aio.Channel, reads_heartbeats: bool
) -> None:
    call = untyped(WorkerServiceStub(scheduler)).Link()
    registration = worker_pb2.WorkerRegistration()
    registration.CopyFrom(REGISTRATION)
    registration.heartbeats = reads_heartbeats
    await call.write(worker_pb2.WorkerServiceLinkRequest(registration=registration))
    assert (await call.read()).HasField("registered")
    for _ in range(NUM_BEATS):
        await call.write(worker_pb2.WorkerServiceLinkRequest(heartbeat=worker_pb2.Heartbeat()))
        if reads_heartbeats:
            assert (await call.read()).HasField("heartbeat")
        else:
            await asyncio.sleep(BEAT_S)
    assert await ends_with(call) is SILENT


class Scheduler(inference_pb2_grpc.InferenceServiceServicer):
    """`behaviours`: for each session, the number of heartbeats before it is silent; -1: it opens no session."""

    def __init__(self, *behaviours: int) -> None:
        self.behaviours = list(behaviours)
        self.num_heard = 0

    async def Session(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        first = await anext(aiter(request_iterator))
        assert first.open.heartbeats
        num_heartbeats = self.behaviours.pop(0)
        if num_heartbeats >= 0:
            await context.write(inference_pb2.SessionResponse(opened=inference_pb2.SessionOpened(epoch=1)))
        for _ in range(num_heartbeats):
            await context.write(inference_pb2.SessionResponse(heartbeat=True))
            await anext(aiter(request_iterator))
            self.num_heard += 1
        await asyncio.Event().wait()


async def test_a_gateway_leaves_a_scheduler_that_is_silent_or_opens_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps a scheduler that has never sent a heartbeat: an older version sends none."""
    monkeypatch.setattr(liveness, "OPENING_S", TIMEOUT_S)
    scheduler = Scheduler(NUM_BEATS, -1, 0)
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(scheduler, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    session = SchedulerSession(f"127.0.0.1:{port}", heartbeat_timeout_s=TIMEOUT_S)
    session.start()
    async with asyncio.timeout(90):
        while session.num_connects < 2:  # noqa: ASYNC110 - another task counts them
            await asyncio.sleep(0.05)
    assert scheduler.behaviours == []
    assert scheduler.num_heard == NUM_BEATS
    await asyncio.sleep(LONG_S)
    assert session.connected
    assert session.num_connects == 2
    await session.close()
    await server.stop(0)


class Cache(cache_pb2_grpc.CacheServiceServicer):
    """Sends a heartbeat after each message, but in its first link only `num_heartbeats` times."""

    def __init__(self, num_heartbeats: int) -> None:
        self.num_heartbeats = num_heartbeats
        self.epochs: list[int] = []

    async def Link(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        left = self.num_heartbeats if not self.epochs else 1_000_000
        async for request in request_iterator:
            if not request.heartbeat:
                assert request.heartbeats == (request.exchange == 1)
                self.epochs += [request.epoch] * request.heartbeats
                results = [cache_pb2.CacheOpResult() for _ in request.ops]
                answer = {"epoch": request.epoch, "exchange": request.exchange, "results": results}
                await context.write(cache_pb2.CacheServiceLinkResponse(**answer))
            if left:
                left -= 1
                await context.write(cache_pb2.CacheServiceLinkResponse(heartbeat=True))


async def test_the_scheduler_leaves_a_cache_that_is_silent() -> None:
    cache = Cache(num_heartbeats=NUM_BEATS)
    server = grpc.aio.server()
    cache_pb2_grpc.add_CacheServiceServicer_to_server(cache, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    settings = SchedulerSettings(port=0, metrics_port=0, cache=f"127.0.0.1:{port}", heartbeat_timeout_s=TIMEOUT_S)
    async with running(serve_scheduler, settings) as channel:
        worker = untyped(WorkerServiceStub(channel)).Link()  # so that the scheduler has operations for a cache
        await worker.write(worker_pb2.WorkerServiceLinkRequest(registration=REGISTRATION))
        async with asyncio.timeout(90):
            while len(cache.epochs) < 2:
                await worker.write(worker_pb2.WorkerServiceLinkRequest(heartbeat=worker_pb2.Heartbeat()))
                await asyncio.sleep(BEAT_S)
        assert cache.epochs[0] < cache.epochs[1]
        worker.cancel()
    await server.stop(0)


@pytest.mark.parametrize(("end", "loss"), [("silent", Loss.SILENCE), ("nonsense", Loss.FAULT), ("gone", Loss.LINK)])
async def test_the_scheduler_knows_how_it_lost_a_worker(
    scheduler: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch, end: str, loss: Loss
) -> None:
    """The kind of loss decides whether the scheduler clears the worker's requests of suspicion when the worker is
    back."""
    lost: asyncio.Future[Loss] = asyncio.get_running_loop().create_future()
    worker_lost = SchedulerCore.worker_lost

    def told(self: SchedulerCore, worker_id: int, loss: Loss = Loss.LINK) -> None:
        worker_lost(self, worker_id, loss)
        if not lost.done():  # only the first loss counts
            lost.set_result(loss)

    monkeypatch.setattr(SchedulerCore, "worker_lost", told)
    monkeypatch.setattr("scheduler_svc.links.FIRST_STEP_PATIENCE", 0.5)
    call = untyped(WorkerServiceStub(scheduler)).Link()
    await call.write(worker_pb2.WorkerServiceLinkRequest(registration=REGISTRATION))
    assert (await call.read()).HasField("registered")
    if end == "nonsense":
        await call.write(worker_pb2.WorkerServiceLinkRequest(result=worker_pb2.StepResult(step=7)))
    elif end == "gone":
        call.cancel()
    assert await lost is loss
