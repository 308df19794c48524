"""Records of what all services do, for a trace: the scheduler's LiveViewService.Trace, and what the gateway noted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, cast

import grpc.aio
from google.protobuf.json_format import MessageToDict

from paceline.v1 import live_pb2, live_pb2_grpc
from services.gateway.errors import ApiError, invalid
from services.gateway.live_view.trace_schema import (
    EndedTrace,
    GatewayTrace,
    SchedulerTrace,
    ToldTrace,
    TraceRecord,
    WrittenTrace,
)
from services.gateway.openai.gateway import Gateway
from services.gateway.telemetry.trace_log import Ended, now_us
from services.runtime.logs import get_logger

_log = get_logger(__name__)

# Each question to the scheduler is also a sample of its clock.
INTERVAL_S = 0.1
MAX_SECONDS = 60.0
# No answer for so long: the scheduler is gone.
_ANSWER_S = 2.0
_RETRY_S = 5


class LiveTraces:
    """At most one trace at a time."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._log = gateway.session.trace
        self._closing = asyncio.Event()

    def close(self) -> None:
        """End the trace. A drain would otherwise wait for it."""
        self._closing.set()

    def check_room(self) -> None:
        """Raises ApiError 429 and 503."""
        if self._closing.is_set():
            raise ApiError(503, "the server is shutting down", retry_after_s=1.0)
        if self._log.recording:
            message = "a trace is recorded already"
            raise ApiError(429, message, code="too_many_traces", retry_after_s=_RETRY_S)

    async def records(self, seconds: float) -> AsyncGenerator[bytes]:
        """Records as JSON, for so long or until the gateway stops. Call check_room() in the same turn of the loop."""
        end_s = asyncio.get_running_loop().time() + seconds
        with self._log.reading():
            async with aclosing(self._scheduler_records()) as found:
                async for of_scheduler in found:
                    yield self._record(of_scheduler).model_dump_json().encode()
                    left_s = end_s - asyncio.get_running_loop().time()
                    if left_s <= 0 or await self._stops_within(min(INTERVAL_S, left_s)):
                        return

    async def _stops_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._closing.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def _scheduler_records(self) -> AsyncGenerator[SchedulerTrace | None]:
        """Without end. None: the scheduler does not answer; the next record is of a new call."""
        while True:
            call: Any = None
            try:
                # Without an iterator, because read() and write() are missing in the stubs.
                call = cast(Any, live_pb2_grpc.LiveViewServiceStub(self._gateway.session.channel)).Trace()
                while True:
                    asked_us = now_us()
                    await call.write(live_pb2.TraceRequest())
                    answer = await asyncio.wait_for(call.read(), _ANSWER_S)
                    if not isinstance(answer, live_pb2.TraceResponse):  # grpc.aio.EOF
                        break
                    yield _of_scheduler(answer, asked_us, now_us())
            except (ApiError, grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError) as error:
                _log.debug("no trace of the scheduler", error=str(error))
            except asyncio.CancelledError:
                # The session has closed its channel, which cancels the call and not this task.
                if (task := asyncio.current_task()) is None or task.cancelling():
                    raise
            finally:
                if call is not None:
                    call.cancel()
            yield None

    def _record(self, of_scheduler: SchedulerTrace | None) -> TraceRecord:
        told, written, ended = self._log.take()
        return TraceRecord(
            gateway=GatewayTrace(
                at_us=now_us(),
                told=[ToldTrace(**asdict(one)) for one in told],
                written=[WrittenTrace(**asdict(one)) for one in written],
                requests=[_request(one) for one in ended],
            ),
            scheduler=of_scheduler,
        )


def check_seconds(given: str | None) -> float:
    """The length of a trace. Raises ApiError 400."""
    try:
        seconds = float(given) if given is not None else 0.0
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_SECONDS:
        raise invalid("seconds", f"seconds must be a number above 0 and at most {MAX_SECONDS:g}")
    return seconds


def _of_scheduler(answer: live_pb2.TraceResponse, asked_us: int, got_us: int) -> SchedulerTrace:
    # protobuf's JSON has 64-bit numbers as text; the model makes numbers of them
    fields = MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return SchedulerTrace.model_validate({**fields, "asked_us": asked_us, "got_us": got_us})


def _request(one: Ended) -> EndedTrace:
    outcome = one.outcome
    return EndedTrace(
        request_id=outcome.request_id,
        answer_id=outcome.answer_id,
        endpoint=outcome.endpoint,
        tenant=outcome.tenant,
        finish_reason=outcome.finish_reason,
        ended_us=one.ended_us,
        latency_s=outcome.latency_s,
        queue_s=outcome.timing.queue_s if outcome.timing is not None else None,
        ttft_s=outcome.ttft_s,
        prompt_tokens=outcome.prompt_tokens,
        cached_tokens=outcome.cached_tokens,
        output_tokens=outcome.output_tokens,
    )
