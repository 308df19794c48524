"""The worker process: loads the model, keeps a link to the scheduler, and leaves without losing a request."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import structlog

from gpu_worker.build import BuiltWorker, build_worker
from gpu_worker.deadline import Allowance, Pace
from gpu_worker.errors import DeviceError, ModelError, ModelTooLarge, RegistrationRefused, StepFailed, StepOverdue
from gpu_worker.link import LinkBroken, SchedulerLink
from gpu_worker.metrics import FAILED_STEPS, KV_BLOCKS, LINK_FAILURES, LINK_UP
from gpu_worker.model_thread import ModelThread
from gpu_worker.progress import build_progress
from gpu_worker.settings import WorkerSettings
from paceline.v1.worker_pb2 import DESCRIPTOR, WorkerRegistered, WorkerRegistration
from services.runtime import exit_status
from services.runtime.fence import Fence
from services.runtime.leaders import find_leader
from services.runtime.logs import get_logger
from services.runtime.metrics import start_metrics_server
from services.runtime.rpc import GrpcServer, link_options, open_channel
from services.runtime.service import Addresses, interruptible
from services.runtime.tls.files import TlsFiles
from services.runtime.tls.opening import open_tls

log: structlog.stdlib.BoundLogger = get_logger(__name__)

# The plans in flight that keep a device busy even with short steps: one that runs, and two that are queued or on their
# way (docs/adr/0001-sharing-two-cores.md).
WINDOW = 3
RETRY_FIRST_S, RETRY_MOST_S = 0.1, 1.0
# How long a worker that must stop waits for the answer to its registration.
REGISTRATION_GRACE_S = 1.0
# How often the log says that the scheduler is away.
REMIND_S = 15.0
WORKER_SERVICE = DESCRIPTOR.services_by_name["WorkerService"].full_name


T = TypeVar("T")


class DeviceLost(DeviceError):
    """The device has worked, and does not work any more."""


async def serve(
    settings: WorkerSettings, stop: asyncio.Event, *, on_ready: Callable[[Addresses], None] | None = None
) -> None:
    """Run until `stop` is set and the worker is drained. `on_ready` is called after the first registration.

    SystemExit, after one line on stderr, if the model cannot be served, does not fit on the device, or the scheduler
    refuses the worker (statuses: services/runtime/exit_status.py). If a step has broken the device, or hangs, the
    process ends at once with status RESTART, because it cannot wait for the device."""
    try:
        await run_worker(settings, stop, on_ready)
    except (DeviceLost, StepOverdue) as error:
        what = f"step {error.first}: {error}" if isinstance(error, StepOverdue) else str(error)
        print(f"paceline worker: {what}; the worker has to be started again", file=sys.stderr, flush=True)
        os._exit(exit_status.RESTART)
    except (ModelError, DeviceError, RegistrationRefused) as error:
        print(f"paceline worker: {error}", file=sys.stderr)
        raise SystemExit(_status_of(error)) from error


def _status_of(error: ModelError | DeviceError | RegistrationRefused) -> int:
    match error:
        case ModelTooLarge():
            return exit_status.NO_MEMORY
        case ModelError():
            return exit_status.CONFIGURATION_ERROR
        case RegistrationRefused():
            return exit_status.REFUSED
    return exit_status.FAILED


async def run_worker(
    settings: WorkerSettings, stop: asyncio.Event, on_ready: Callable[[Addresses], None] | None = None
) -> None:
    """Like serve(), but raises ModelError, DeviceError, RegistrationRefused or StepOverdue."""
    tls = open_tls(settings.tls_dir, settings.section)
    # Only the first worker of a machine gets the default port of the settings.
    was_chosen = "metrics_port" in settings.model_fields_set
    metrics = start_metrics_server(settings.host, settings.metrics_port, or_free=not was_chosen)
    server = GrpcServer(settings.host, settings.port, tls=tls)
    try:
        port = await server.start()
        addresses = Addresses(f"{settings.host}:{port}", None, f"{settings.host}:{metrics.port}")
        log.info("worker listens", grpc=addresses.grpc, metrics=addresses.metrics)
        built = await _build(settings)
        thread = ModelThread(built.runner)
        thread.start()
        try:
            await _keep_link(settings, built, thread, server, tls, stop, lambda: on_ready and on_ready(addresses))
        finally:
            await asyncio.to_thread(thread.stop, 1.0)
    finally:
        await server.stop(0.5)
        metrics.close()


async def _build(settings: WorkerSettings) -> BuiltWorker:
    """Build in a thread, so that health checks get answers while gigabytes are read. The thread must end with the
    build. If it stayed, libgomp would count its threads beside those of the model thread, and find more threads than
    cores. The model's threads would then sleep at each of libgomp's barriers in a step instead of spinning."""
    log.info("loading model", model=settings.model, load_format=settings.load_format)
    loop = asyncio.get_running_loop()
    with build_progress(settings.model) as reports, interruptible(), ThreadPoolExecutor(1) as builder:
        built = await loop.run_in_executor(builder, build_worker, settings, reports.load, reports.capture)
    limits, info = built.runner.limits, built.info
    KV_BLOCKS.set(limits.num_blocks)
    log.info(
        "model loaded",
        name=info.name,
        architecture=info.architecture,
        dtype=info.dtype,
        max_model_len=info.max_model_len,
        kv_blocks=limits.num_blocks,
        host_blocks=limits.num_host_blocks,
        block_size=limits.block_size,
    )
    return built


async def _keep_link(
    settings: WorkerSettings,
    built: BuiltWorker,
    thread: ModelThread,
    server: GrpcServer,
    tls: TlsFiles | None,
    stop: asyncio.Event,
    on_first: Callable[[], object],
) -> None:
    """Dial, register, and serve. Dial again when the link breaks, until `stop` is set and the worker is drained."""
    keeper = _Keeper(settings.scheduler, server, on_first)
    registration = _registration(settings, built)
    allowance = Allowance(
        settings.first_step_deadline_s,
        settings.step_deadline_s,
        settings.step_deadline_token_s,
        settings.max_num_seqs,
        Pace(settings.step_hang_s),
    )
    fence = Fence()
    transport = link_options(settings.ping_timeout_s)

    async def run_link() -> None:
        target = await find_leader(settings.scheduler, WORKER_SERVICE, transport, tls)
        async with open_channel(target, transport, tls) as channel:
            silence_s = settings.heartbeat_timeout_s
            link = SchedulerLink(channel, registration, thread, keeper.registered, allowance, fence, silence_s)
            await link.run(stop)

    try:
        while not stop.is_set():
            del registration.kept[:]
            registration.kept.extend(await _answered(thread.kept(), settings.first_step_deadline_s))
            registration.incarnation = thread.incarnation
            running = asyncio.ensure_future(run_link())
            try:
                await _until_released(running, keeper, stop, settings.drain_s)
                return
            except (LinkBroken, StepFailed) as error:
                await keeper.broken(error, stop)
                if isinstance(error, StepOverdue):
                    raise
                if isinstance(error, StepFailed):
                    await _answered(thread.check(), settings.first_step_deadline_s)
    finally:
        LINK_UP.set(0)


async def _answered(question: Coroutine[Any, Any, T], allowed_s: float) -> T:
    """Wait for an answer of the model thread, which the worker needs to continue. Raises DeviceLost."""
    try:
        async with asyncio.timeout(allowed_s):
            return await question
    except TimeoutError as error:
        raise DeviceLost(f"the device hangs after the link has ended: no answer in {allowed_s:g} s") from error
    except DeviceError as error:
        raise DeviceLost(str(error)) from error


async def _until_released(running: asyncio.Future[None], keeper: _Keeper, stop: asyncio.Event, drain_s: float) -> None:
    """Wait for the end of the link. After `stop`, wait at most for the drain (an unregistered worker has none)."""
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not (running.done() or keeper.is_up):
            # A registration, with work after it, may be on its way.
            await asyncio.wait((running,), timeout=REGISTRATION_GRACE_S)
        if not running.done() and keeper.is_up:
            log.info("draining", at_most_s=drain_s)
            await asyncio.wait((running,), timeout=drain_s)
        if running.done():
            running.result()
            log.info("released by the scheduler")
        elif keeper.is_up:
            log.warning("leaving with running sequences, because the drain took too long", drain_s=drain_s)
    finally:
        stopping.cancel()
        running.cancel()
        await asyncio.gather(running, stopping, return_exceptions=True)


class _Keeper:
    """The state that outlives a link: whether a link is up, the next pause, and what the log has said."""

    def __init__(self, scheduler: str, server: GrpcServer, on_first: Callable[[], object]) -> None:
        self._scheduler = scheduler
        self._server = server
        self._on_first: Callable[[], object] | None = on_first
        self._delay_s = RETRY_FIRST_S
        self._said: tuple[str, float] = ("", 0.0)
        self.is_up = False

    def registered(self, answer: WorkerRegistered) -> None:
        self.is_up = True
        self._delay_s = RETRY_FIRST_S
        self._said = ("", 0.0)
        LINK_UP.set(1)
        self._server.set_serving(True)
        log.info(
            "registered", scheduler=self._scheduler, worker=answer.worker, epoch=answer.epoch, window=answer.window
        )
        if self._on_first is not None:
            self._on_first()
            self._on_first = None

    async def broken(self, error: LinkBroken | StepFailed, stop: asyncio.Event) -> None:
        """Log the reason, and pause before the next link."""
        if self.is_up:
            LINK_FAILURES.inc()
        self.is_up = False
        LINK_UP.set(0)
        self._server.set_serving(False)
        if isinstance(error, StepFailed):
            FAILED_STEPS.inc()
            log.error("step failed", first=error.first, last=error.last, requests=error.requests, exc_info=error)
        else:
            self._say(str(error))
        await _sleep_unless(stop, self._delay_s)
        self._delay_s = min(2 * self._delay_s, RETRY_MOST_S)

    def _say(self, reason: str) -> None:
        now = asyncio.get_running_loop().time()
        what, when = self._said
        if what != reason or now - when > REMIND_S:
            log.warning("no link to the scheduler, retrying", scheduler=self._scheduler, reason=reason)
            self._said = (reason, now)


async def _sleep_unless(stop: asyncio.Event, delay_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(delay_s):
            await stop.wait()


def _registration(settings: WorkerSettings, built: BuiltWorker) -> WorkerRegistration:
    limits = built.runner.limits
    return WorkerRegistration(
        name=settings.name or f"{socket.gethostname()}-{os.getpid()}",
        model=built.info,
        block_size=limits.block_size,
        num_blocks=limits.num_blocks,
        num_host_blocks=limits.num_host_blocks,
        max_num_seqs=limits.max_num_seqs,
        max_batched_tokens=limits.max_batched_tokens,
        heartbeats=True,
        prepares_grammars=True,
        verifies_drafts=built.runner.verifies_drafts,
        window=WINDOW,
    )
