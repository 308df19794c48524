"""The asyncio shell around SessionCore: one stream to the scheduler, reopened as long as the gateway runs."""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence

import grpc
import grpc.aio

from paceline.v1 import admin_pb2, common_pb2, inference_pb2, inference_pb2_grpc, live_pb2, live_pb2_grpc
from services.gateway.engine.live_request import NO_METADATA, LiveRequest
from services.gateway.engine.session_core import MISMATCH_RETRY_S, SessionCore, SessionFull, SessionProtocolError
from services.gateway.errors import ApiError, Gone, QueueFull, QueueLimit
from services.gateway.telemetry.trace_log import GatewayTraceLog, now_us
from services.runtime.fence import StaleScheduler
from services.runtime.leaders import find_leader
from services.runtime.liveness import Silent, Watch, beat, first_of
from services.runtime.logs import get_logger
from services.runtime.rpc import link_options, open_channel
from services.runtime.tls.files import TlsFiles

_log = get_logger(__name__)

_FIRST_BACKOFF_S = 0.05
_LAST_BACKOFF_S = 1.0
_TICK_S = 0.2
# Timeouts of calls that the scheduler answers from memory.
_RELEASE_S, _EXPLAIN_S = 5.0, 10.0
_EXPLAIN_ERRORS = {grpc.StatusCode.NOT_FOUND: 404, grpc.StatusCode.FAILED_PRECONDITION: 409}
_REASONS = {404: "request_not_found", 409: "several_owners"}
_LOOK_S = 1.0  # how often a waiting request checks whether its client has gone
_NO_WORKER_RETRY_S = 5.0  # the scheduler's retry_after_s for the same failure
_FULL = "the server has too many requests in flight"
SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name


def _away() -> ApiError:
    return ApiError(503, "no connection to the scheduler", retry_after_s=1.0)


class SchedulerSession:
    """Submits requests to the scheduler and wakes their consumers.

    All submissions and cancellations of one event-loop turn travel in one message, or in several if the submissions
    take more than 4 MiB. A broken stream is reopened after 50 ms to 1 s (±20 %), and all unfinished requests are
    submitted again.
    """

    def __init__(
        self,
        target: str,
        *,
        model_name: str = "",
        response_window: int = 64,
        max_live: int = 4096,
        wait_s: float = 30.0,
        ping_timeout_s: float = 2.0,
        heartbeat_timeout_s: float = 1.5,
        difference: Callable[[common_pb2.ModelInfo], str] = lambda model: "",
        tls: TlsFiles | None = None,
    ) -> None:
        self._target = target
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._wait_s, self.max_live = wait_s, max_live
        self._transport, self._tls = link_options(ping_timeout_s), tls
        self._core = SessionCore(
            f"gateway-{uuid.uuid4().hex[:12]}",
            response_window=response_window,
            max_live=max_live,
            wait_s=wait_s,
            model_name=model_name,
            difference=difference,
        )
        self._told_mismatch = ""  # the last mismatch in the log
        # Called when `status`, `ready` or `connected` may have changed.
        self.on_status: Callable[[], None] | None = None
        self._outgoing = asyncio.Event()
        self._model_told = asyncio.Event()
        self._num_asking = 0  # requests in know_model()
        self._closing = False
        self._channel: grpc.aio.Channel | None = None  # of the current stream
        self._tasks: list[asyncio.Task[None]] = []
        # How often the stream was opened.
        self.num_connects = 0
        self.trace = GatewayTraceLog()

    @property
    def ready(self) -> bool:
        """The scheduler is connected and accepts work, and the workers have the gateway's model."""
        status = self._core.status
        return not self._closing and self._core.opened and status is not None and status.ready and not self.mismatch

    @property
    def mismatch(self) -> str:
        """Why no request is served: the workers have another model than the gateway. Empty if the gateway knows of no
        difference."""
        return self._core.mismatch

    def check_mismatch(self) -> None:
        """Raises ApiError 503 while the workers have another model than the gateway."""
        if self.mismatch:
            raise ApiError(503, self.mismatch, code="model_mismatch", retry_after_s=MISMATCH_RETRY_S)

    @property
    def connected(self) -> bool:
        """The scheduler has opened this session."""
        return self._core.opened

    @property
    def status(self) -> inference_pb2.SchedulerStatus | None:
        """The scheduler's last report; None while it is not connected."""
        return self._core.status

    @property
    def epoch(self) -> int | None:
        """The epoch of the scheduler that opened the session last: a Unix time in milliseconds. None before the first
        scheduler."""
        return self._core.epoch

    @property
    def num_epochs(self) -> int:
        """Schedulers that have opened the session one after the other."""
        return self._core.num_epochs

    @property
    def load(self) -> inference_pb2.SchedulerLoad | None:
        """The load of all workers by online requests, at most 0.25 s old while heartbeats arrive; None until the
        connected scheduler has sent one."""
        return self._core.load

    @property
    def model(self) -> common_pb2.ModelInfo | None:
        """The workers' model as last reported; None before the first report."""
        return self._core.model

    async def know_model(self, gone: Callable[[], bool] = lambda: False) -> None:
        """Wait until the scheduler has reported the workers' model.

        The report is missing only just after the start, or while the first worker loads. The model's files may allow
        more tokens than a pool holds, so a request for all possible tokens must wait for the report.

        Raises ApiError 429 (too many requests wait) and 503 (the wait for a scheduler or a worker was too long), and
        Gone if `gone()`.
        """
        if self._model_told.is_set():
            return
        if self._num_asking >= self.max_live:
            raise self._full(_FULL)
        self._num_asking += 1
        try:
            clock = asyncio.get_running_loop().time
            began_s = alone_since_s = clock()
            while not self._model_told.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(_LOOK_S, self._wait_s)):
                        await self._model_told.wait()
                if gone():
                    raise Gone
                if self.connected or self._closing:
                    alone_since_s = clock()
                    limit_s = self.status.no_worker_timeout_s if self.status is not None else 0.0
                    if 0 < limit_s <= clock() - began_s:
                        message = f"no worker takes requests: waited {limit_s:g} s for one"
                        raise ApiError(503, message, retry_after_s=_NO_WORKER_RETRY_S)
                elif clock() - alone_since_s >= self._wait_s:
                    message = f"no connection to the scheduler for {self._wait_s:g} s"
                    raise ApiError(503, message, retry_after_s=1.0)
        finally:
            self._num_asking -= 1

    def refusal(self, message: str) -> ApiError:
        """A 429 that says when a position will be free."""
        return ApiError(429, message, retry_after_s=self._retry_after_s())

    def refusal_if_full(self) -> QueueFull | None:
        """A 429 if the gateway or, by its last report, the scheduler would refuse a new request."""
        if self._core.is_full:
            return self._full(_FULL)
        return None if self._core.queue_takes() else self._full("the queue is full", self._core.queue_limit)

    def _full(self, message: str, limit: QueueLimit = "requests") -> QueueFull:
        return QueueFull(message, limit, retry_after_s=self._retry_after_s())

    def _retry_after_s(self) -> float:
        return self._core.retry_after_s(asyncio.get_running_loop().time())

    @contextlib.contextmanager
    def entering(self) -> Iterator[None]:
        """The context in which a new request waits for its submission. Raises ApiError 429."""
        number = None if self._core.is_full else self._core.enter(asyncio.get_running_loop().time())
        if number is None:
            limit = "requests" if self._core.is_full else self._core.queue_limit
            raise self._full("the server has no room for more requests", limit)
        try:
            yield
        finally:
            self._core.admission.leave(number)

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return self._core.num_live

    def start(self) -> Sequence[asyncio.Task[None]]:
        """Start to connect, and return at once. The returned tasks end only by `close` or by a bug."""
        self._tasks = [asyncio.create_task(self._stay_connected()), asyncio.create_task(self._tick())]
        return self._tasks

    async def close(self) -> None:
        """End the stream. Live requests fail with UNAVAILABLE."""
        self._closing = True
        self._model_told.set()  # requests in know_model() continue, and are refused
        self._wake(self._core.fail_all("the server is shutting down"))
        # One event-loop turn, in which the consumers see their endings.
        await asyncio.sleep(0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def submit(
        self,
        request_id: str,
        prompt_token_ids: bytes,
        sampling: common_pb2.SamplingParams,
        final_tokens: frozenset[int] = frozenset(),
        metadata: inference_pb2.Submission = NO_METADATA,
        beam: inference_pb2.BeamOptions | None = None,
        delivered: Sequence[int] = (),
    ) -> LiveRequest:
        """Queue a request for the scheduler. Token ids are packed int32. `delivered`: output that the client has.

        Raises ApiError 429 or 503.
        """
        if self._closing:
            raise ApiError(503, "the server is shutting down", retry_after_s=1.0)
        self.check_mismatch()
        now_s = asyncio.get_running_loop().time()
        try:
            request = self._core.submit(
                request_id, prompt_token_ids, sampling, now_s, final_tokens, metadata, beam, delivered
            )
        except SessionFull:
            raise self._full(_FULL) from None
        self._outgoing.set()
        return request

    @property
    def channel(self) -> grpc.aio.Channel:
        """The connection to the scheduler that has the session. Raises ApiError 503 without one."""
        if self._channel is None or not self.connected:
            raise _away()
        return self._channel

    async def release_conversation(self, name: str) -> bool:
        """End a conversation at the scheduler. Returns whether the scheduler knew it. Raises ApiError 503."""
        stub = inference_pb2_grpc.InferenceServiceStub(self.channel)
        request = inference_pb2.ReleaseConversationRequest(conversation=name)
        try:
            await stub.ReleaseConversation(request, timeout=_RELEASE_S)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.NOT_FOUND:
                return False
            raise _away() from error
        return True

    async def explain(self, request: admin_pb2.ExplainRequest) -> admin_pb2.ExplainResponse:
        """Why a request waited. Raises ApiError 404 if the scheduler does not know it, 409 if several owners have
        requests of this id, and 503."""
        stub = live_pb2_grpc.LiveViewServiceStub(self.channel)
        try:
            answer = await stub.GetTimeline(live_pb2.GetTimelineRequest(explain=request), timeout=_EXPLAIN_S)
            return answer.explained
        except grpc.aio.AioRpcError as error:
            status = _EXPLAIN_ERRORS.get(error.code())
            if status is None:
                raise _away() from error
            raise ApiError(status, error.details() or "", param="request_id", code=_REASONS[status]) from error

    def cancel(self, request: LiveRequest) -> None:
        """End a request. No effect on an ended request."""
        self._core.cancel(request)
        self._outgoing.set()

    # -- tasks -------------------------------------------------------------------------------------

    async def _stay_connected(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while not self._closing:  # gRPC may swallow a cancellation during a failing call
            opened = False
            try:
                # A new channel per attempt: a failed channel waits for gRPC's back-off of seconds.
                target = await find_leader(self._target, SERVICE_NAME, self._transport, self._tls)
                async with open_channel(target, self._transport, self._tls) as channel:
                    self._channel = channel
                    await self._run_stream(channel)
            except StaleScheduler as error:
                _log.warning("refused a scheduler", scheduler=target, reason=str(error))
            except SessionProtocolError as error:
                _log.error("scheduler broke the session protocol", error=str(error))
            except Silent as silent:
                _log.warning("the scheduler is silent", target=self._target, reason=str(silent))
            except grpc.RpcError as error:
                code = error.code() if isinstance(error, grpc.aio.AioRpcError) else None
                _log.debug("scheduler stream failed", code=str(code))
            finally:
                self._channel = None
                opened = self._core.opened
                self._core.disconnect(asyncio.get_running_loop().time())
            if opened:
                _log.warning("lost the scheduler; reconnecting", target=self._target, live=self._core.num_live)
                self._status_changed()
                backoff_s = _FIRST_BACKOFF_S
            await asyncio.sleep(backoff_s * random.uniform(0.8, 1.2))
            backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)

    async def _run_stream(self, channel: grpc.aio.Channel) -> None:
        core = self._core
        self._wake(core.connect())
        # An event per stream: _requests() of the last stream may still wait, and would consume our event.
        self._outgoing = outgoing = asyncio.Event()
        outgoing.set()
        call = inference_pb2_grpc.InferenceServiceStub(channel).Session(self._requests(outgoing))
        clock = asyncio.get_running_loop().time
        watch = Watch(self._heartbeat_timeout_s, clock(), opened=False)

        async def read() -> None:
            async for response in call:
                watch.heard(clock())
                watch.promised = watch.promised or response.heartbeat
                first = not core.opened
                received_us = now_us() if self.trace.recording else 0
                self._wake(touched := core.receive(response))
                if received_us and touched:
                    self.trace.message(received_us, len(touched))
                if core.model is not None:
                    self._model_told.set()
                # The core knows what to send now: submissions after the opening, acknowledgements.
                self._outgoing.set()
                if first:
                    self.num_connects += 1
                    _log.info("session open", scheduler=self._target, epoch=core.epoch, live=core.num_live)
                if first or response.HasField("status"):
                    self._tell_mismatch()
                    self._status_changed()

        def send() -> None:
            core.beat()
            outgoing.set()

        try:
            await first_of(read(), beat(watch, send))
        finally:
            call.cancel()
            self._outgoing = asyncio.Event()
            outgoing.set()  # _requests() wakes up and ends

    async def _requests(self, outgoing: asyncio.Event) -> AsyncIterator[inference_pb2.SessionRequest]:
        while True:
            await outgoing.wait()
            outgoing.clear()
            try:
                while self._outgoing is outgoing and (message := self._core.take_request()) is not None:
                    yield message
            except Exception:
                _log.exception("cannot write to the scheduler")  # gRPC itself only cancels the call
                raise
            if self._outgoing is not outgoing:
                return

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_TICK_S)
            self._wake(self._core.tick(loop.time()))
            self._outgoing.set()

    def _wake(self, requests: Iterable[LiveRequest]) -> None:
        for request in requests:
            if request.wake is not None:
                request.wake()

    def _tell_mismatch(self) -> None:
        if self.mismatch and self.mismatch != self._told_mismatch:
            _log.error("not ready: the workers serve another model", reason=self.mismatch)
        self._told_mismatch = self.mismatch

    def _status_changed(self) -> None:
        if self.on_status is not None:
            self.on_status()
