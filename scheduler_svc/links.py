"""The scheduler's shell: moves protobuf messages between gRPC streams and the core."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING

import grpc
from google.protobuf.message import DecodeError

from paceline.v1 import cache_pb2_grpc, inference_pb2_grpc, worker_pb2_grpc
from paceline.v1.cache_pb2 import CacheServiceLinkRequest
from paceline.v1.inference_pb2 import (
    EmbedRequest,
    EmbedResponse,
    GenerateRequest,
    GenerateResponse,
    ReleaseConversationRequest,
    ReleaseConversationResponse,
    SessionRequest,
    SessionResponse,
)
from paceline.v1.worker_pb2 import SchedulerHeartbeat, WorkerServiceLinkRequest, WorkerServiceLinkResponse
from scheduler_svc.core.cache.link import ProtocolError
from scheduler_svc.core.faults.suspects import Loss
from scheduler_svc.core.rejection import Rejection
from scheduler_svc.core.scheduler import SchedulerCore
from scheduler_svc.generate import STATUS_BY_CODE, generate
from scheduler_svc.standby import step_down
from scheduler_svc.streams import Outgoing, keep, stream
from services.runtime import fence, refusal
from services.runtime.liveness import Silent, Watch, beat, first_of
from services.runtime.logs import get_logger
from services.runtime.rpc import GrpcServer, Options, open_channel
from services.runtime.tls.credentials import Renewed, until_connected
from services.runtime.tls.files import TlsFiles

if TYPE_CHECKING:
    from scheduler_svc.election import Election

log = get_logger(__name__)

TICK_S = 0.25
CACHE_RETRY_S = 0.2
MAX_NAMED = 16  # requests named in one log line
# A worker may be silent for this many times as long until its first step is done: loading kernels holds the GIL.
FIRST_STEP_PATIENCE = 4.0


class SchedulerServer(inference_pb2_grpc.InferenceServiceServicer, worker_pb2_grpc.WorkerServiceServicer):
    """Serves InferenceService and WorkerService. Keeps the link to the cache."""

    def __init__(
        self,
        core: SchedulerCore,
        cache_target: str,
        transport: Options,
        heartbeat_timeout_s: float,
        election: Election | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        self.core = core
        self.election = election
        self.cache_target = cache_target
        self._transport, self._tls = transport, tls
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self.core_seconds = 0.0  # spent in the core
        self._served_name = ""  # the model's name, as the last gateway said
        self._sessions: dict[str, Outgoing[SessionResponse]] = {}
        self._workers: dict[int, Outgoing[WorkerServiceLinkResponse]] = {}
        self._cache: Outgoing[CacheServiceLinkRequest] | None = None
        # Why the cache link broke, until the cache answers. grpc may give no reason; then it is "".
        self._cache_troubles: set[str] = set()

    # ── the core ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def event(self, handle: Callable[..., object], *args: object) -> None:
        """Give the core an event, and send the messages that follow. Raises what the event raises."""
        if self.election is not None and not self.election.holds:
            step_down(self.election.why_not)
        began, trace = time.perf_counter(), self.core.trace_log
        began_s = time.monotonic()
        self.core.event_at(began_s)
        try:
            handle(*args)
        finally:
            applied_s = time.monotonic()
            outbox = self.core.poll(applied_s)
            self.core_seconds += time.perf_counter() - began
            if trace.num_readers:
                sent = len(outbox.to_workers), len(outbox.to_cache)
                trace.ran(getattr(handle, "__name__", "event").lstrip("_"), began_s, applied_s, time.monotonic(), *sent)
            if self._cache is not None:
                for exchange in outbox.to_cache:
                    exchange.heartbeats = exchange.exchange == 1
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
                    worker=failure.worker or None,
                    what=failure.what,
                    num_retried=len(failure.requests),
                    retried=failure.requests[:MAX_NAMED],
                    poisoned=failure.poisoned or None,
                    trace_ids=failure.traces[:MAX_NAMED] or None,
                )
            for worker, reason in outbox.lost_workers:
                log.warning("worker lost", worker=worker, reason=reason)
                if (worker_link := self._workers.get(worker)) is not None:
                    worker_link.close((grpc.StatusCode.DEADLINE_EXCEEDED, reason))

    @property
    def model_name(self) -> str:
        """The clients' name of the model. Until a gateway has said it: the workers' name, or empty."""
        if self._served_name or self.core.limits is None:
            return self._served_name
        return self.core.limits.model.name

    async def work(self, grpc_server: GrpcServer) -> None:
        """Run for ever. With an election: stand by until it is won, and end the process when it is lost."""
        if self.election is not None:
            grpc_server.set_serving(True, standby=True)
            self.core.epoch = self.core.fence = await self.election.campaign()
            if self.election.cache_secret:
                self.core.namespaces.secret = self.election.cache_secret
            log.info("elected leader", epoch=self.core.epoch)
        grpc_server.set_serving(True)
        await asyncio.gather(self.tick(), self.keep_cache_link(), self._lead())

    async def _lead(self) -> None:
        if self.election is not None:
            step_down(await self.election.lead())

    def _watch(self, *, promised: bool) -> Watch:
        """A watch over a peer. `promised`: the peer sends heartbeats."""
        watch = Watch(self._heartbeat_timeout_s, time.monotonic(), opened=True)
        watch.promised = promised
        return watch

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
        self._served_name = first.open.model_name or self._served_name
        outgoing: Outgoing[SessionResponse] = Outgoing()
        watch = self._watch(promised=first.open.heartbeats)

        async def read() -> None:
            self.event(self.core.session_message, session_id, first, time.monotonic())
            async for message in request_iterator:
                watch.heard(time.monotonic())
                if session_id not in self.core.sessions:
                    return  # the peer was silent for too long
                if message.submissions and logging.getLogger(__name__).isEnabledFor(logging.DEBUG):
                    _log_submissions(message)
                self.event(self.core.session_message, session_id, message, time.monotonic())

        def give_up(reason: str) -> None:
            log.warning("session given up", session=session_id, reason=reason)
            self.event(self.core.close_session, session_id)

        self._sessions.setdefault(session_id, outgoing)
        try:
            self.event(self.core.open_session, session_id, first.open.response_window)
        except Rejection as rejection:
            if self._sessions[session_id] is outgoing:
                del self._sessions[session_id]
            await context.abort(STATUS_BY_CODE[rejection.code], rejection.message)
        log.info("session opened", session=session_id)
        try:
            heartbeat = self._heartbeat if first.open.heartbeats else None
            async for message in stream(context, outgoing, read, keep(watch, outgoing, heartbeat, give_up)):
                yield message
        finally:
            del self._sessions[session_id]
            self.event(self.core.close_session, session_id)
            log.info("session closed", session=session_id)

    def _heartbeat(self) -> SessionResponse:
        return SessionResponse(heartbeat=True, load=self.core.load(time.monotonic()))

    async def ReleaseConversation(
        self,
        request: ReleaseConversationRequest,
        context: grpc.aio.ServicerContext[ReleaseConversationRequest, ReleaseConversationResponse],
    ) -> ReleaseConversationResponse:
        try:
            self.event(self.core.release_conversation, request.conversation)
        except KeyError:
            await context.abort(grpc.StatusCode.NOT_FOUND, "conversation: is not known")
        return ReleaseConversationResponse()

    async def Generate(
        self, request: GenerateRequest, context: grpc.aio.ServicerContext[GenerateRequest, GenerateResponse]
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

    async def Embed(
        self, request: EmbedRequest, context: grpc.aio.ServicerContext[EmbedRequest, EmbedResponse]
    ) -> EmbedResponse:
        """Not served by a scheduler."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "only a gateway serves Embed; a scheduler serves Generate")
        return EmbedResponse()

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
            await context.abort(STATUS_BY_CODE[rejection.code], rejection.message, refusal.to_metadata(rejection.field))
        self._workers[worker] = outgoing
        watch = self._watch(promised=True)
        watch.limit_s *= FIRST_STEP_PATIENCE
        self.event(lambda: None)
        log.info("worker attached", worker=worker, name=first.registration.name, peer=context.peer())

        async def read() -> None:
            async for message in self._from_worker(worker, request_iterator):
                watch.heard(time.monotonic())
                if message.HasField("result"):
                    watch.limit_s = self._heartbeat_timeout_s
                if worker not in self.core.workers:
                    return
                try:
                    self.event(self._worker_message, worker, message)
                # the worker registers again, and must not be taken for one that was only cut off
                except Exception as error:
                    self.event(self.core.worker_lost, worker, Loss.FAULT)
                    if not isinstance(error, ProtocolError):
                        raise
                    outgoing.close((grpc.StatusCode.FAILED_PRECONDITION, str(error)))
                    return
                if message.HasField("failure"):
                    return

        def give_up(reason: str) -> None:
            log.warning("worker lost", worker=worker, reason=reason)
            self.event(self.core.worker_lost, worker, Loss.SILENCE)

        try:
            reads_heartbeats = first.registration.heartbeats
            beats = WorkerServiceLinkResponse(heartbeat=SchedulerHeartbeat())
            heartbeat = (lambda: beats) if reads_heartbeats else None
            async for message in stream(context, outgoing, read, keep(watch, outgoing, heartbeat, give_up)):
                yield message
        finally:
            del self._workers[worker]
            self.event(self.core.worker_lost, worker)
            log.info("worker detached", worker=worker, name=first.registration.name)

    async def _from_worker(
        self, worker: int, messages: AsyncIterator[WorkerServiceLinkRequest]
    ) -> AsyncIterator[WorkerServiceLinkRequest]:
        try:
            async for message in messages:
                yield message
        except DecodeError:  # not just a broken link
            self.event(self.core.worker_lost, worker, Loss.FAULT)
            raise

    def _worker_message(self, worker: int, message: WorkerServiceLinkRequest) -> None:
        match message.WhichOneof("message"):
            case "result":
                self.core.worker_result(worker, message.result)
            case "heartbeat":
                self.core.worker_heartbeat(worker, message.heartbeat)
            case "failure":
                self.core.worker_failed(worker, message.failure)
            case "grammar":
                self.core.worker_grammar(worker, message.grammar)
            case "drain":
                log.info("worker drains", worker=worker)
                self.core.worker_drain(worker)
            case other:
                raise ProtocolError(f"unexpected {other} after the registration")

    # ── the cache ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def keep_cache_link(self) -> None:
        """Hold a link to the cache, for ever. When it breaks, open a new one with a new epoch."""
        epochs = itertools.count(self.core.epoch)
        while True:
            with contextlib.suppress(Renewed):
                await self._keep_cache_channel(epochs)

    async def _keep_cache_channel(self, epochs: Iterator[int]) -> None:
        """Raises Renewed when the link broke, and the certificates have changed since the channel was opened."""
        certificates = self._tls.current() if self._tls is not None else None
        async with open_channel(self.cache_target, self._transport, self._tls) as channel:
            stub = cache_pb2_grpc.CacheServiceStub(channel)
            for epoch in epochs:
                try:
                    await until_connected(channel, self._tls, certificates)
                    await self._cache_link(stub, epoch)
                except (grpc.aio.AioRpcError, ProtocolError, Silent) as error:
                    code = error.code() if isinstance(error, grpc.aio.AioRpcError) else None
                    reason = (error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)) or ""
                    if self.election is not None and code is grpc.StatusCode.PERMISSION_DENIED:
                        step_down(f"the cache says: {reason}")
                    if reason not in self._cache_troubles:  # a cache that refuses us does so five times a second
                        log.warning("cache link broke", target=self.cache_target, reason=reason)
                    self._cache_troubles.add(reason)
                await asyncio.sleep(CACHE_RETRY_S)

    async def _cache_link(self, stub: cache_pb2_grpc.CacheServiceAsyncStub, epoch: int) -> None:
        self._cache = outgoing = Outgoing[CacheServiceLinkRequest]()
        call = stub.Link(aiter(outgoing), metadata=fence.to_metadata(self.core.fence))
        # An unanswered opening is no reason to give up: there is no other cache.
        watch = self._watch(promised=False)

        async def read() -> None:
            async for response in call:
                watch.heard(time.monotonic())
                if self._cache_troubles:
                    self._cache_troubles.clear()
                    log.info("cache connected", target=self.cache_target)
                if response.heartbeat:
                    watch.promised = True
                else:
                    self.event(self.core.cache_response, response)
            raise ProtocolError("the cache ended the link")

        def send() -> None:
            if watch.promised:
                outgoing.beat(CacheServiceLinkRequest(epoch=epoch, heartbeat=True))

        try:
            self.event(self.core.cache_connected, epoch)
            if not self._cache_troubles:
                log.info("cache connected", target=self.cache_target)
            await first_of(read(), beat(watch, send))
        finally:
            call.cancel()
            outgoing.close()
            self._cache = None
            self.event(self.core.cache_lost)


def _log_submissions(message: SessionRequest) -> None:
    for submission in message.submissions:
        log.debug(
            "request submitted",
            request_id=submission.request_id,
            id=submission.answer_id or None,
            tenant=submission.tenant or None,
            key=submission.owner or None,
            trace_id=submission.trace_id or None,
        )
