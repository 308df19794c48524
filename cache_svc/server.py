"""The gRPC shell of the cache: passes exchanges from the link to the core, one scheduler at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import grpc
from prometheus_client import REGISTRY

from cache_svc.admin import ADMIN_SERVICE_NAME, CacheAdmin, now_ms
from cache_svc.block_stream import BlockStreams
from cache_svc.core.admin import expire_pins
from cache_svc.core.cache import CacheCore
from cache_svc.core.errors import LinkError
from cache_svc.core.tree.events import EventLog
from cache_svc.event_stream import EventStreams
from cache_svc.metrics import EXCHANGE_DURATION, CacheCollector
from cache_svc.settings import CacheSettings
from paceline.v1 import cache_pb2 as pb
from paceline.v1 import cache_pb2_grpc
from services.runtime.fence import Fence, StaleScheduler, from_metadata
from services.runtime.keys.admin_gate import AdminGate
from services.runtime.keys.source import open_keys
from services.runtime.liveness import Silent, Watch, beat, first_of
from services.runtime.logs import get_logger
from services.runtime.metrics import start_metrics_server
from services.runtime.rpc import GrpcServer, link_options
from services.runtime.service import Addresses
from services.runtime.tls.opening import open_tls

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["CacheService"].full_name
# Events may have the tokens of every tenant (see CacheSettings.event_tokens).
ADMIN_METHODS = (f"/{ADMIN_SERVICE_NAME}/", f"/{SERVICE_NAME}/WatchEvents")

# A scheduler may be silent for this many heartbeat timeouts. No other process waits for the link to end (a new
# scheduler takes over at once), and the prefix tree is lost with the link.
PATIENCE = 4.0
# How long short calls may take to end after SIGTERM. A link never ends by itself.
LAST_CALLS_S = 0.2

log = get_logger("cache_svc.server")

if TYPE_CHECKING:  # generic in the stubs only
    _Context = grpc.aio.ServicerContext[pb.CacheServiceLinkRequest, pb.CacheServiceLinkResponse]


class _Link:
    """One scheduler's stream, and the task that serves it."""

    def __init__(self, task: asyncio.Task[Any], peer: str) -> None:
        self._task = task
        self.peer = peer
        self.superseded = False

    def supersede(self) -> None:
        """Ends the link: its task executes no further exchange and ends its stream with ABORTED."""
        self.superseded = True
        self._task.cancel()


class CacheServicer(cache_pb2_grpc.CacheServiceServicer):
    """CacheService over one core. The core belongs to the newest link, and is empty without a link."""

    def __init__(self, core: CacheCore, heartbeat_timeout_s: float) -> None:
        self._core = core
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self.events = EventStreams(core)
        self._exchanged_s = time.perf_counter()  # when the last exchange began
        self.blocks = BlockStreams(core, lambda: self._exchanged_s)
        self._current: _Link | None = None
        self._fence = Fence()

    # The generated type allows only generators. This is a coroutine that writes, so that supersede() can end each wait.
    async def Link(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.CacheServiceLinkRequest], context: _Context
    ) -> None:
        """See cache.proto. Ends with ABORTED when a newer link begins, FAILED_PRECONDITION when an exchange is out of
        order or of another epoch, PERMISSION_DENIED when the cache knows a newer leader, INVALID_ARGUMENT when the
        fence metadata is invalid, INTERNAL when an exchange fails inside the core, and DEADLINE_EXCEEDED when the
        scheduler is silent."""
        # The initial metadata goes out now, while no newer link can supersede this one. If a first write is cut short,
        # gRPC can send neither the metadata nor the status, and the scheduler waits for ever. It also goes out before
        # the fence check, because there must be no wait between that check and the assignment of `_current`.
        await context.send_initial_metadata(())
        try:
            self._fence.check(from_metadata(context.invocation_metadata() or ()))
        except StaleScheduler as error:
            log.warning("link refused", peer=context.peer(), reason=str(error))
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        task = asyncio.current_task()
        assert task is not None  # a handler runs in a task
        link = _Link(task, context.peer())
        if self._current is not None:
            log.warning("link superseded", peer=self._current.peer, by=link.peer)
            self._current.supersede()
        self._current = link
        self._core.reset()
        log.info("link opened", peer=link.peer)
        try:
            fault = await self._serve_living(link, request_iterator, context)
        except asyncio.CancelledError:
            if not link.superseded:
                raise
            task.uncancel()
            fault = grpc.StatusCode.ABORTED, "a newer link to the cache has begun"
        finally:
            if self._current is link:
                self._current = None
                self._core.reset()
            log.info("link closed", peer=link.peer)
        if fault is not None:  # only here: nothing can supersede the link any more, and a stream is aborted once
            await context.abort(*fault)

    async def _serve_living(
        self, link: _Link, requests: AsyncIterator[pb.CacheServiceLinkRequest], context: _Context
    ) -> tuple[grpc.StatusCode, str] | None:
        """Like _serve(), with heartbeats if the scheduler reads them. Ends when the scheduler is silent."""
        clock = asyncio.get_running_loop().time
        watch = Watch(PATIENCE * self._heartbeat_timeout_s, clock(), opened=True)
        writing = asyncio.Lock()  # gRPC takes one message at a time
        wants, due = asyncio.Event(), asyncio.Event()
        fault: tuple[grpc.StatusCode, str] | None = None

        async def read() -> AsyncIterator[pb.CacheServiceLinkRequest]:
            async for request in requests:
                watch.heard(clock())
                if request.heartbeats:
                    wants.set()
                if request.heartbeat:
                    watch.promised = True
                elif link.superseded:
                    return
                else:
                    yield request

        async def answer() -> None:
            nonlocal fault
            fault = await self._serve(read(), context, writing)

        async def keep() -> None:
            await wants.wait()
            await first_of(write_heartbeats(), beat(watch, due.set))

        async def write_heartbeats() -> None:
            while await due.wait():
                due.clear()
                async with writing:
                    await context.write(pb.CacheServiceLinkResponse(heartbeat=True))

        try:
            await first_of(answer(), keep())
        except Silent as silent:
            return grpc.StatusCode.DEADLINE_EXCEEDED, f"the scheduler is silent: {silent}"
        return fault

    async def _serve(
        self, requests: AsyncIterator[pb.CacheServiceLinkRequest], context: _Context, writing: asyncio.Lock
    ) -> tuple[grpc.StatusCode, str] | None:
        """Runs until the client has sent its last exchange. Returns an error, if any."""
        async for request in requests:
            self._exchanged_s = started_s = time.perf_counter()
            received_us = time.monotonic_ns() // 1000 if request.traced else 0
            try:
                if self._core.pins.by_name:
                    expire_pins(self._core, now_ms())
                response = self._core.exchange(request)
            except LinkError as error:
                return grpc.StatusCode.FAILED_PRECONDITION, str(error)
            except Exception:
                # The state is lost with the link. The scheduler connects again and restores everything.
                log.exception("exchange failed", epoch=request.epoch, exchange=request.exchange)
                return grpc.StatusCode.INTERNAL, f"exchange {request.exchange} failed inside the cache"
            EXCHANGE_DURATION.observe(time.perf_counter() - started_s)
            async with writing:
                if request.traced:
                    response.received_us, response.answered_us = received_us, time.monotonic_ns() // 1000
                await context.write(response)
        return None

    async def WatchEvents(  # type: ignore[override]
        self,
        request: pb.WatchEventsRequest,
        context: grpc.aio.ServicerContext[pb.WatchEventsRequest, pb.WatchEventsResponse],
    ) -> None:
        """See cache.proto."""
        await self.events.serve(request, context)

    def WatchBlocks(
        self,
        request: pb.WatchBlocksRequest,
        context: grpc.aio.ServicerContext[pb.WatchBlocksRequest, pb.WatchBlocksResponse],
    ) -> AsyncIterator[pb.WatchBlocksResponse]:
        """See cache.proto."""
        return self.blocks.serve(request, context)


async def serve(
    settings: CacheSettings, stop: asyncio.Event, *, on_ready: Callable[[Addresses], None] | None = None
) -> None:
    """Serves until `stop` is set. The link then ends soon: the scheduler restores the state in the next cache, and
    plans no step until there is one.

    Raises OSError (metrics) or RuntimeError (gRPC) if a port is taken, CannotStart if the keys or
    certificates cannot be read.
    """
    keys = open_keys(settings.keys_file)
    tls = open_tls(settings.tls_dir, settings.section)
    # In microseconds, so that no number repeats after a restart: see WatchEventsResponse.
    events = EventLog(settings.event_buffer, first_number=time.time_ns() // 1000, with_tokens=settings.event_tokens)
    core = CacheCore(
        debug=settings.debug,
        eviction=settings.eviction,
        events=events,
        max_pinned_share=settings.max_pinned_share,
        max_tenant_retained_share=settings.max_tenant_retained_share,
        max_retained_share=settings.max_retained_share,
    )
    collector = CacheCollector(core)
    REGISTRY.register(collector)
    metrics = None
    gate = AdminGate(keys, admin=ADMIN_METHODS, insecure=settings.insecure)
    server = GrpcServer(settings.host, settings.port, link_options(settings.ping_timeout_s), first=[gate], tls=tls)
    servicer = CacheServicer(core, settings.heartbeat_timeout_s)
    server.add(SERVICE_NAME, lambda target: cache_pb2_grpc.add_CacheServiceServicer_to_server(servicer, target))
    admin = CacheAdmin(core)
    server.add(ADMIN_SERVICE_NAME, lambda target: cache_pb2_grpc.add_CacheAdminServiceServicer_to_server(admin, target))
    watching = asyncio.create_task(keys.watch()) if keys is not None else None
    try:
        metrics = start_metrics_server(settings.host, settings.metrics_port)
        port = await server.start()
        server.set_serving(True)
        addresses = Addresses(grpc=f"{settings.host}:{port}", http=None, metrics=f"{settings.host}:{metrics.port}")
        log.info("cache listens", grpc=addresses.grpc, metrics=addresses.metrics, debug=settings.debug)
        if on_ready is not None:
            on_ready(addresses)
        await stop.wait()
        server.set_serving(False)
        servicer.events.close()
        servicer.blocks.close()
    finally:
        if watching is not None:
            watching.cancel()
        await server.stop(min(settings.drain_s, LAST_CALLS_S))
        if metrics is not None:
            metrics.close()
        REGISTRY.unregister(collector)
