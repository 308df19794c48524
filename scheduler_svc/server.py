"""The scheduler's shell: moves protobuf messages between gRPC streams and the core."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from paceline.v1 import admin_pb2_grpc, cache_pb2_grpc, inference_pb2_grpc, worker_pb2_grpc
from paceline.v1.cache_pb2 import CacheServiceLinkRequest
from paceline.v1.inference_pb2 import GenerateRequest, GenerateResponse, SessionRequest, SessionResponse
from paceline.v1.worker_pb2 import WorkerServiceLinkRequest, WorkerServiceLinkResponse
from scheduler_svc.admin import Admin
from scheduler_svc.core.cache_link import ProtocolError
from scheduler_svc.core.policy import PolicyError
from scheduler_svc.core.rejection import Rejection
from scheduler_svc.core.scheduler import SchedulerCore
from scheduler_svc.core.types import SchedulerConfig
from scheduler_svc.generate import generate
from scheduler_svc.metrics import SchedulerMetrics
from scheduler_svc.policies.registry import KINDS, build, choose
from scheduler_svc.policy_errors import PolicyErrors
from scheduler_svc.settings import SchedulerSettings
from services.runtime.logs import get_logger
from services.runtime.metrics import start_metrics_server
from services.runtime.rpc import GrpcServer, Options, link_options, open_channel
from services.runtime.service import Addresses, CannotStart

log = get_logger(__name__)

TICK_S = 0.25
CACHE_RETRY_S = 0.2

M = TypeVar("M")
STATUS_BY_CODE = {status.value[0]: status for status in grpc.StatusCode}


class Outgoing(Generic[M]):
    """Messages on their way to one peer. Bounded by the protocols: windows, credits, one exchange at a time."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[M | None] = asyncio.Queue()
        self.error: tuple[grpc.StatusCode, str] | None = None

    def put(self, message: M) -> None:
        self._queue.put_nowait(message)

    def close(self, error: tuple[grpc.StatusCode, str] | None = None) -> None:
        """End the stream after what is in the queue; with an error, if one is given."""
        self.error = self.error or error
        self._queue.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[M]:
        while (message := await self._queue.get()) is not None:
            yield message


class SchedulerServer(inference_pb2_grpc.InferenceServiceServicer, worker_pb2_grpc.WorkerServiceServicer):
    """Serves InferenceService and WorkerService; keeps the link to the cache."""

    def __init__(self, core: SchedulerCore, cache_target: str, transport: Options) -> None:
        self.core = core
        self.cache_target = cache_target
        self._transport = transport
        self.core_seconds = 0.0  # spent in the core
        self._sessions: dict[str, Outgoing[SessionResponse]] = {}
        self._workers: dict[int, Outgoing[WorkerServiceLinkResponse]] = {}
        self._cache: Outgoing[CacheServiceLinkRequest] | None = None

    # ── the core ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def event(self, handle: Callable[..., object], *args: object) -> None:
        """Give the core an event and send what follows from it. Raises what the event raises."""
        began = time.perf_counter()
        try:
            handle(*args)
        finally:
            outbox = self.core.poll(time.monotonic())
            self.core_seconds += time.perf_counter() - began
            if self._cache is not None:
                for exchange in outbox.to_cache:
                    self._cache.put(exchange)
            for worker, message in outbox.to_workers:
                if (worker_link := self._workers.get(worker)) is not None:
                    worker_link.put(message)
            for session, response in outbox.to_sessions:
                if (session_link := self._sessions.get(session)) is not None:
                    session_link.put(response)
            for failure in outbox.failures:
                log.error(
                    "step failed",
                    worker=failure.worker,
                    what=failure.what,
                    retried=failure.requests,
                    quarantined=failure.quarantined or None,
                )
            for worker, reason in outbox.lost_workers:
                log.warning("worker lost", worker=worker, reason=reason)
                if (worker_link := self._workers.get(worker)) is not None:
                    worker_link.close((grpc.StatusCode.DEADLINE_EXCEEDED, reason))

    async def tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.event(self.core.tick, time.monotonic())

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def Session(
        self,
        request_iterator: AsyncIterator[SessionRequest],
        context: grpc.aio.ServicerContext[SessionRequest, SessionResponse],
    ) -> AsyncIterator[SessionResponse]:
        first = await anext(aiter(request_iterator), None)
        if first is None or not first.HasField("open") or not first.open.session_id:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "open: the first message must open the session")
        session_id = first.open.session_id
        outgoing: Outgoing[SessionResponse] = Outgoing()

        async def read() -> None:
            self.event(self.core.session_message, session_id, first, time.monotonic())
            async for message in request_iterator:
                self.event(self.core.session_message, session_id, message, time.monotonic())

        self._sessions.setdefault(session_id, outgoing)
        try:
            self.event(self.core.open_session, session_id, first.open.response_window)
        except Rejection as rejection:
            if self._sessions[session_id] is outgoing:
                del self._sessions[session_id]
            await context.abort(STATUS_BY_CODE[rejection.code], rejection.message)
        log.info("session opened", session=session_id)
        try:
            async for message in stream(context, outgoing, read):
                yield message
        finally:
            del self._sessions[session_id]
            self.event(self.core.close_session, session_id)
            log.info("session closed", session=session_id)

    async def Generate(
        self,
        request: GenerateRequest,
        context: grpc.aio.ServicerContext[GenerateRequest, GenerateResponse],
    ) -> AsyncIterator[GenerateResponse]:
        outgoing: Outgoing[SessionResponse] = Outgoing()
        session_id = f"generate-{id(outgoing)}"
        self._sessions[session_id] = outgoing
        self.event(self.core.open_session, session_id, 64)
        try:

            def send(message: SessionRequest) -> None:
                self.event(self.core.session_message, session_id, message, time.monotonic())

            async for response in generate(request, aiter(outgoing), send, self.core.limits, context):
                yield response
        finally:
            del self._sessions[session_id]
            self.event(self.core.close_session, session_id)

    # ── workers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def Link(
        self,
        request_iterator: AsyncIterator[WorkerServiceLinkRequest],
        context: grpc.aio.ServicerContext[WorkerServiceLinkRequest, WorkerServiceLinkResponse],
    ) -> AsyncIterator[WorkerServiceLinkResponse]:
        first = await anext(aiter(request_iterator), None)
        if first is None or not first.HasField("registration"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "registration: must be the first message of the link")
        outgoing: Outgoing[WorkerServiceLinkResponse] = Outgoing()
        try:
            worker = self.core.register_worker(first.registration)
        except Rejection as rejection:
            log.warning("worker refused", name=first.registration.name, reason=rejection.message)
            await context.abort(STATUS_BY_CODE[rejection.code], rejection.message)
        self._workers[worker] = outgoing
        self.event(lambda: None)
        log.info("worker attached", worker=worker, name=first.registration.name, peer=context.peer())

        async def read() -> None:
            async for message in request_iterator:
                if worker not in self.core.workers:
                    return
                try:
                    self.event(self._worker_message, worker, message)
                except ProtocolError as error:
                    outgoing.close((grpc.StatusCode.FAILED_PRECONDITION, str(error)))
                    return
                if message.HasField("failure"):
                    return

        try:
            async for message in stream(context, outgoing, read):
                yield message
        finally:
            del self._workers[worker]
            self.event(self.core.worker_lost, worker)
            log.info("worker detached", worker=worker, name=first.registration.name)

    def _worker_message(self, worker: int, message: WorkerServiceLinkRequest) -> None:
        match message.WhichOneof("message"):
            case "result":
                self.core.worker_result(worker, message.result)
            case "heartbeat":
                self.core.worker_heartbeat(worker)
            case "failure":
                self.core.worker_failed(worker, message.failure)
            case "drain":
                log.info("worker drains", worker=worker)
                self.core.worker_drain(worker)
            case other:
                raise ProtocolError(f"unexpected {other} after the registration")

    # ── the cache ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def keep_cache_link(self) -> None:
        """Hold a link to the cache, for ever: when it breaks, a new one with a new epoch."""
        async with open_channel(self.cache_target, self._transport) as channel:
            stub = cache_pb2_grpc.CacheServiceStub(channel)
            for epoch in itertools.count(self.core.epoch):
                try:
                    await channel.channel_ready()
                    await self._cache_link(stub, epoch)
                except (grpc.aio.AioRpcError, ProtocolError) as error:
                    reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                    log.warning("cache link broke", target=self.cache_target, reason=reason)
                await asyncio.sleep(CACHE_RETRY_S)

    async def _cache_link(self, stub: cache_pb2_grpc.CacheServiceAsyncStub, epoch: int) -> None:
        self._cache = outgoing = Outgoing[CacheServiceLinkRequest]()
        call = stub.Link(aiter(outgoing))
        try:
            self.event(self.core.cache_connected, epoch)
            log.info("cache connected", target=self.cache_target)
            async for response in call:
                self.event(self.core.cache_response, response)
            raise ProtocolError("the cache ended the link")
        finally:
            call.cancel()
            outgoing.close()
            self._cache = None
            self.event(self.core.cache_lost)


async def stream(
    context: grpc.aio.ServicerContext[Any, Any], outgoing: Outgoing[M], read: Callable[[], Coroutine[Any, Any, None]]
) -> AsyncIterator[M]:
    """What goes out, while `read` takes what comes in. Ends when `read` does or `outgoing` is closed."""

    async def read_then_close() -> None:
        try:
            await read()
        finally:
            outgoing.close()

    reader = asyncio.create_task(read_then_close())
    try:
        async for message in outgoing:
            yield message
        if outgoing.error:
            await context.abort(*outgoing.error)
        await reader
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)


async def serve(
    settings: SchedulerSettings, stop: asyncio.Event, *, on_ready: Callable[[Addresses], None] | None = None
) -> None:
    """Run the scheduler until `stop` is set."""
    config = SchedulerConfig(
        window=settings.window,
        max_queued_requests=settings.max_queued_requests,
        max_queued_tokens=settings.max_queued_tokens,
        worker_timeout_s=settings.worker_timeout_s,
        poison_failures=settings.poison_failures,
        prefix_caching=settings.prefix_caching,
        partial_reuse=settings.partial_reuse,
        host_cache=settings.host_cache,
        max_num_seqs=settings.max_num_seqs,
        tenant_max_running_tokens=settings.tenant_max_running_tokens,
        tenant_max_queued_tokens=settings.tenant_max_queued_tokens,
        waiting_timeout_s=settings.waiting_timeout_s,
        running_timeout_s=settings.running_timeout_s,
    )
    overrides = {kind: getattr(settings, kind) for kind in KINDS}
    try:
        choice = choose(settings.preset, overrides, settings.policy_options)
        policies = build(choice)
    except PolicyError as error:
        raise CannotStart(str(error)) from error
    # Later schedulers have larger epochs, so that a peer can tell an old one.
    epoch = time.time_ns() // 1_000_000
    core = SchedulerCore(config, policies, lambda: build(choose()), epoch, on_policy_error=PolicyErrors(log.error))
    transport = link_options(settings.ping_timeout_s)
    server = SchedulerServer(core, settings.cache, transport)
    admin = Admin(core, choice)
    grpc_server = GrpcServer(settings.host, settings.port, transport)
    grpc_server.add(
        "paceline.v1.InferenceService", lambda s: inference_pb2_grpc.add_InferenceServiceServicer_to_server(server, s)
    )
    grpc_server.add(
        "paceline.v1.WorkerService", lambda s: worker_pb2_grpc.add_WorkerServiceServicer_to_server(server, s)
    )
    grpc_server.add("paceline.v1.AdminService", lambda s: admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, s))
    metrics = SchedulerMetrics(server)
    metrics_server = start_metrics_server(settings.host, settings.metrics_port)
    port = await grpc_server.start()
    background = [asyncio.create_task(server.keep_cache_link()), asyncio.create_task(server.tick())]
    try:
        grpc_server.set_serving(True)
        address = f"{settings.host}:{port}"
        log.info("scheduler listens", grpc=address, metrics=metrics_server.port)
        if on_ready:
            on_ready(Addresses(grpc=address, http=None, metrics=f"{settings.host}:{metrics_server.port}"))
        stopping = asyncio.create_task(stop.wait())
        done, _ = await asyncio.wait([stopping, *background], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # a background task ends only by failing
    finally:
        grpc_server.set_serving(False)
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await grpc_server.stop(0.5)
        metrics.close()
        metrics_server.close()
