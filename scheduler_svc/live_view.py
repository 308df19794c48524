"""LiveViewService: snapshots of what the scheduler does, and why a request waited, for gateways that show it."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import grpc

from paceline.v1.admin_pb2 import PolicyChoice
from paceline.v1.live_pb2 import (
    GetTimelineRequest,
    GetTimelineResponse,
    LiveSequence,
    LiveStep,
    LiveTenant,
    LiveWorker,
    TraceRequest,
    TraceResponse,
    WatchRequest,
    WatchResponse,
)
from paceline.v1.live_pb2_grpc import LiveViewServiceServicer
from scheduler_svc.admin import Admin, encodable
from scheduler_svc.core.output.timeline import WAITING, Record
from scheduler_svc.core.scheduler import SchedulerCore
from scheduler_svc.core.step.step_log import EndedStep
from scheduler_svc.core.step.trace_log import microseconds
from scheduler_svc.core.workers.state import WorkerState

MAX_WATCHERS = 64
MAX_TRACES = 16
MAX_TENANTS = 32
MAX_LIVE_SEQUENCES, MAX_ENDED_SEQUENCES = 48, 16
MAX_DETAIL_CHARS = 200
INTERVALS_MS = 100, 10_000
DEFAULT_INTERVAL_MS = 500

Context = grpc.aio.ServicerContext[Any, Any]


class LiveView(LiveViewServiceServicer):
    """The servicer. A call of Watch makes the core note its steps."""

    def __init__(self, core: SchedulerCore, admin: Admin, core_s: Callable[[], float]) -> None:
        """`core_s` returns the seconds that were spent in the core."""
        self._core, self._admin, self._core_s = core, admin, core_s

    async def Watch(self, request: WatchRequest, context: Context) -> AsyncIterator[WatchResponse]:
        core, log = self._core, self._core.step_log
        least, most = INTERVALS_MS
        interval_ms = request.interval_ms or DEFAULT_INTERVAL_MS
        if not least <= interval_ms <= most:
            message = f"interval_ms: must be between {least} and {most}, or 0"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)
        if log.num_readers >= MAX_WATCHERS:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"there are {MAX_WATCHERS} watchers, which is the limit"
            )
        with log.reading():
            num_seen, num_owners = log.num_steps, 0
            while True:
                steps = log.since(num_seen)
                now_s = time.monotonic()
                answer = snapshot(core, self._admin.policies, steps, now_s, time.time() - now_s)
                answer.core_s, answer.num_missed_steps = self._core_s(), log.num_steps - num_seen - len(steps)
                num_seen = log.num_steps
                for namespace, tenant in core.namespaces.owners_since(num_owners):
                    answer.namespaces.add(namespace=namespace, tenant=tenant)
                num_owners = core.namespaces.num_owners
                yield answer
                await asyncio.sleep(interval_ms / 1000)

    async def Trace(
        self, request_iterator: AsyncIterator[TraceRequest], context: Context
    ) -> AsyncIterator[TraceResponse]:
        log = self._core.trace_log
        if log.num_readers >= MAX_TRACES:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_TRACES} traces are being recorded, which is the limit"
            )
        with log.reading() as seen:
            async for _ in request_iterator:
                received_us = microseconds(time.monotonic())
                seen, steps, exchanges, runs, num_missed = log.since(seen)
                answer = TraceResponse(
                    received_us=received_us, epoch=self._core.epoch, steps=steps, exchanges=exchanges, runs=runs
                )
                answer.num_missed, answer.sent_us = num_missed, microseconds(time.monotonic())
                yield answer

    async def GetTimeline(self, request: GetTimelineRequest, context: Context) -> GetTimelineResponse:
        return GetTimelineResponse(explained=await self._admin.Explain(request.explain, context))


def snapshot(
    core: SchedulerCore, policies: PolicyChoice, steps: Iterable[EndedStep], now_s: float, unix_s: float
) -> WatchResponse:
    """What the scheduler does at `now_s`, a time of the core. `unix_s`: Unix time at the core's time 0."""
    counters, budgets, queue = core.counters, core.life.budgets, core.queue
    running = budgets.online.tenant_tokens + budgets.offline.tenant_tokens
    waiting = queue.online.tenant_tokens + queue.offline.tenant_tokens
    tenants = running.keys() | waiting.keys()
    largest = heapq.nlargest(MAX_TENANTS, sorted(tenants), key=lambda name: running[name] + waiting[name])
    return WatchResponse(
        at_s=now_s + unix_s,
        epoch=core.epoch,
        load=core.load(now_s),
        policies=policies,
        failed_policies=sorted(core.policy_failures.by_kind),
        cache_connected=core.has_cache,
        num_sessions=len(core.sessions),
        num_offline_running=sum(len(worker.batch.offline) for worker in core.workers.values()),
        num_offline_waiting=len(queue.offline),
        num_finished=sum(counters.finished.values()),
        num_rejected=counters.rejected,
        num_generated_tokens=counters.tokens,
        num_steps=counters.steps,
        num_failures=counters.failures,
        workers=[_worker(worker, now_s) for worker in core.workers.values()],
        tenants=[
            LiveTenant(tenant=name, running_tokens=running[name], waiting_tokens=waiting[name]) for name in largest
        ],
        num_tenants=len(tenants),
        steps=[_step(step, unix_s) for step in steps],
        sequences=[
            _sequence(record, unix_s) for record in core.timeline.recent(MAX_LIVE_SEQUENCES, MAX_ENDED_SEQUENCES)
        ],
        num_live_sequences=core.timeline.num_live,
    )


def _sequence(record: Record, unix_s: float) -> LiveSequence:
    reason, detail, _, at_s = record.events[-1]
    if reason in WAITING and record.looks and (look := record.looks[-1]).to_s >= at_s:
        detail = f"{look.reason}: {look.detail}"
    return LiveSequence(
        request_id=record.request_id,
        answer_id=record.answer_id,
        tenant=record.tenant,
        reason=encodable(reason),
        detail=encodable(detail[:MAX_DETAIL_CHARS]),
        arrived_s=record.arrival_s + unix_s,
        since_s=at_s + unix_s,
    )


def _worker(worker: WorkerState, now_s: float) -> LiveWorker:
    batch, fitted = worker.batch, worker.step_fit.time
    return LiveWorker(
        worker=worker.id,
        name=worker.registration.name,
        num_slots=worker.registration.max_num_seqs,
        num_running=len(batch.running),
        num_prefilling=len(batch.prefills),
        num_offline=len(batch.offline),
        num_blocks=worker.num_blocks,
        num_available_blocks=worker.available_blocks,
        num_free_host_blocks=worker.host.free_blocks,
        num_swapped_out=len(worker.host.swapped),
        in_flight=len(worker.in_flight),
        window=worker.window,
        draining=worker.draining,
        base_s=fitted.base_s,
        token_s=fitted.token_s,
        context_s=fitted.context_s,
        row_s=fitted.row_s,
        linked_s=max(now_s - worker.linked_s, 0.0),
        incarnation=worker.incarnation,
    )


def _step(step: EndedStep, unix_s: float) -> LiveStep:
    return LiveStep(
        worker=step.worker,
        step=step.step,
        planned_s=step.planned_s + unix_s,
        sent_s=step.sent_s + unix_s,
        ended_s=step.ended_s + unix_s,
        computed_s=step.computed_s,
        num_decodes=step.num_decodes,
        num_prefills=step.num_prefills,
        new_tokens=step.new_tokens,
        context_tokens=step.context_tokens,
    )
