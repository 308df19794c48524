"""One link to the scheduler: registration, then plans in, results and heartbeats out, until a release or a failure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import grpc.aio

from gpu_worker.deadline import Allowance, StepWatch
from gpu_worker.errors import RegistrationRefused, StepFailed, StepOverdue
from gpu_worker.metrics import record_step
from gpu_worker.model_thread import LinkRun, ModelThread
from gpu_worker.steps.launched import StepStats
from paceline.v1.worker_pb2 import (
    GrammarPrepared,
    Heartbeat,
    StepFailure,
    StepResult,
    WorkerDrain,
    WorkerRegistered,
    WorkerRegistration,
    WorkerServiceLinkRequest,
    WorkerServiceLinkResponse,
)
from paceline.v1.worker_pb2_grpc import WorkerServiceStub
from services.runtime.fence import Fence, StaleScheduler
from services.runtime.liveness import Silent, Watch, beat
from services.runtime.refusal import is_refusal

# How long the scheduler may take to read the report of a failed step.
REPORT_S = 2.0


class LinkBroken(Exception):
    """The link ended without a release. The message gives the known reason."""


@dataclass(slots=True)
class SchedulerLink:
    """`run()` returns when the scheduler has released the worker. It raises LinkBroken, StepFailed or
    RegistrationRefused."""

    channel: grpc.aio.Channel
    registration: WorkerRegistration
    thread: ModelThread
    on_registered: Callable[[WorkerRegistered], None]
    allowance: Allowance
    fence: Fence
    heartbeat_timeout_s: float

    async def run(self, drain: asyncio.Event) -> None:
        """Serve the link. When `drain` is set, ask for the release, and execute plans until it comes."""
        outbox: asyncio.Queue[WorkerServiceLinkRequest] = asyncio.Queue()
        outbox.put_nowait(WorkerServiceLinkRequest(registration=self.registration))
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        watch = StepWatch(self.allowance)
        scheduler = Watch(self.heartbeat_timeout_s, asyncio.get_running_loop().time(), opened=False)
        progress = _Progress(outbox, watch, self.thread)

        def on_failure(error: Exception) -> None:
            if not failed.done():
                failed.set_exception(error)

        run = LinkRun(progress.on_result, on_failure, progress.on_grammar)
        # Without a request iterator, so that read() and write() are allowed. `Any`: the stubs lack these two methods.
        call = cast(Any, WorkerServiceStub(self.channel)).Link()
        tasks: list[asyncio.Future[None]] = [
            asyncio.ensure_future(self._read(call, run, watch, scheduler, progress)),
            asyncio.ensure_future(_write(call, outbox)),
            asyncio.ensure_future(beat(scheduler, progress.beat)),
            asyncio.ensure_future(_ask_to_leave(drain, outbox)),
            failed,
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except StepFailed as failure:
            message = StepFailure(first_step=failure.first, last_step=failure.last, message=str(failure))
            outbox.put_nowait(WorkerServiceLinkRequest(failure=message))
            run.close()
            # The scheduler ends the link after it has read the report.
            await asyncio.wait(tasks[:1], timeout=REPORT_S)
            raise
        except grpc.aio.AioRpcError as error:
            if is_refusal(error):
                raise RegistrationRefused(f"the scheduler refuses this worker: {error.details()}") from error
            raise LinkBroken(f"{error.code().name}: {error.details()}") from error
        except Silent as error:
            raise LinkBroken(f"the scheduler is silent: {error}") from error
        finally:
            run.close()
            call.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, call: Any, run: LinkRun, watch: StepWatch, scheduler: Watch, progress: _Progress) -> None:
        """Returns after the release."""
        clock = asyncio.get_running_loop().time
        first = await _receive(call)
        scheduler.heard(clock())
        if first.WhichOneof("message") != "registered":
            raise LinkBroken("the scheduler's first message is not a registration's answer")
        try:
            self.fence.check(first.registered.fence)
        except StaleScheduler as error:
            raise LinkBroken(str(error)) from error
        self.thread.begin(run)
        self.on_registered(first.registered)
        while True:
            message = await _receive(call)
            scheduler.heard(clock())
            match message.WhichOneof("message"):
                case "heartbeat":
                    scheduler.promised = True
                case "plan":
                    if message.plan.traced:
                        progress.received_us[message.plan.step] = _now_us()
                    watch.begun(message.plan)
                    self.thread.submit(run, message.plan)
                case "grammars":
                    self.thread.order_grammars(run, message.grammars)
                case "released":
                    return
                case other:
                    raise LinkBroken(f"unexpected message {other!r} from the scheduler")


@dataclass(slots=True)
class _Progress:
    outbox: asyncio.Queue[WorkerServiceLinkRequest]
    watch: StepWatch
    thread: ModelThread
    last_step: int = 0
    last_beat_s: float | None = None
    received_us: dict[int, int] = field(default_factory=dict)  # by step; of plans for which a trace is recorded

    def on_result(self, result: StepResult, stats: StepStats) -> None:
        self.last_step = result.step
        if self.received_us and (received_us := self.received_us.pop(result.step, 0)):
            result.received_us, result.sent_us = received_us, _now_us()
        self.watch.finished((result.finished_us - result.started_us) / 1e6)
        self.outbox.put_nowait(WorkerServiceLinkRequest(result=result))
        record_step(result, stats)

    def on_grammar(self, prepared: GrammarPrepared) -> None:
        self.outbox.put_nowait(WorkerServiceLinkRequest(grammar=prepared))

    def beat(self) -> None:
        """Look for an overdue step, and send a heartbeat with the progress. Raises StepOverdue."""
        now_s = asyncio.get_running_loop().time()
        last_s, self.last_beat_s = self.last_beat_s, now_s
        if (overdue := self.watch.passed(now_s - last_s if last_s is not None else 0.0)) is not None:
            step, allowed_s = overdue
            raise StepOverdue(step, step, self.thread.request_ids(), f"not done after {allowed_s:.1f} s")
        # The first call sends no heartbeat, because the registration has just been queued. Later
        # calls send none while the outbox has a message: otherwise, heartbeats would pile up if the scheduler did not
        # read.
        if last_s is not None and self.outbox.empty():
            watch = self.watch
            heartbeat = Heartbeat(step=self.last_step, received=watch.last_begun, allowed_s=watch.allowed_s)
            self.outbox.put_nowait(WorkerServiceLinkRequest(heartbeat=heartbeat))


def _now_us() -> int:
    """The clock of StepResult."""
    return time.monotonic_ns() // 1000


async def _receive(call: Any) -> WorkerServiceLinkResponse:
    message = await call.read()
    if not isinstance(message, WorkerServiceLinkResponse):  # grpc.aio.EOF
        status = f"{(await call.code()).name} {await call.details()}".strip()
        raise LinkBroken(f"the scheduler ended the link ({status})")
    return message


async def _write(call: Any, outbox: asyncio.Queue[WorkerServiceLinkRequest]) -> None:
    """Does not return when a write fails, but waits to be cancelled: the reader reports how the call ended."""
    while True:
        message = await outbox.get()
        try:
            await call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await asyncio.Event().wait()


async def _ask_to_leave(drain: asyncio.Event, outbox: asyncio.Queue[WorkerServiceLinkRequest]) -> None:
    await drain.wait()
    outbox.put_nowait(WorkerServiceLinkRequest(drain=WorkerDrain()))
    await asyncio.Event().wait()
