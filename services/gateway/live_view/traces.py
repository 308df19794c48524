"""The records of a trace: those of the scheduler (LiveViewService.Trace), and those of the gateway itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, cast

import grpc.aio

from paceline.v1 import live_pb2, live_pb2_grpc
from services.gateway.errors import ApiError, invalid
from services.gateway.live_view.trace_records import SchedulerAnswer, records
from services.gateway.openai.gateway import Gateway
from services.gateway.telemetry.trace_log import now_us
from services.runtime.logs import get_logger

_log = get_logger(__name__)

# Each question to the scheduler is also a sample of its clock.
INTERVAL_S = 0.1
MAX_SECONDS = 60.0
# A reader that has not read the whole trace this long after the trace's end loses its connection, and so the only slot.
MAX_BEHIND_S = 10.0
# After this long without an answer, the scheduler counts as gone.
_ANSWER_S = 2.0
_RETRY_S = 5


class LiveTraces:
    """At most one trace at a time."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._closing = asyncio.Event()

    def close(self) -> None:
        """End the trace. A drain would otherwise wait for it."""
        self._closing.set()

    def begin(self, seconds: float) -> RunningTrace:
        """Takes the slot at once, so that a second request of the same instant finds it taken. Raises ApiError 429 and
        503."""
        if self._closing.is_set():
            raise ApiError(503, "the server is shutting down", retry_after_s=1.0)
        if self._gateway.session.trace.recording:
            message = "a trace is recorded already"
            raise ApiError(429, message, code="too_many_traces", retry_after_s=_RETRY_S)
        return RunningTrace(self._gateway, self._closing, seconds)


class RunningTrace:
    """The trace that is recorded now. `closing`: the gateway stops."""

    def __init__(self, gateway: Gateway, closing: asyncio.Event, seconds: float) -> None:
        self._gateway = gateway
        self._log = gateway.session.trace
        self._closing = closing
        self._seconds = seconds
        self._is_over = False
        self._log.start()

    def close(self) -> None:
        """Gives the slot back."""
        if not self._is_over:
            self._is_over = True
            self._log.stop()

    async def items(self) -> AsyncGenerator[bytes]:
        """Records as JSON, until the time of the trace is over or the gateway stops."""
        end_s = asyncio.get_running_loop().time() + self._seconds
        async with aclosing(self._scheduler_records()) as found:
            async for of_scheduler in found:
                for record in records(of_scheduler, self._log.take(), now_us()):
                    yield record
                    await asyncio.sleep(0)  # other requests' tokens go out before the next record is converted
                left_s = end_s - asyncio.get_running_loop().time()
                if left_s <= 0 or await self._stops_within(min(INTERVAL_S, left_s)):
                    return

    async def _stops_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._closing.wait()
        except TimeoutError:
            return False
        return True

    async def _scheduler_records(self) -> AsyncGenerator[SchedulerAnswer | None]:
        """Without end. None: the scheduler does not answer; the next record is of a new call."""
        while True:
            call: Any = None
            try:
                # Called without an iterator of requests, for read() and write(). The cast: the type stubs lack both.
                call = cast(Any, live_pb2_grpc.LiveViewServiceStub(self._gateway.session.channel)).Trace()
                while True:
                    asked_us = now_us()
                    await call.write(live_pb2.TraceRequest())
                    async with asyncio.timeout(_ANSWER_S):
                        answer = await call.read()
                    if not isinstance(answer, live_pb2.TraceResponse):  # grpc.aio.EOF
                        break
                    yield SchedulerAnswer(answer, asked_us, now_us())
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


def check_seconds(given: str | None) -> float:
    """The length of a trace. Raises ApiError 400."""
    try:
        seconds = float(given) if given is not None else 0.0
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_SECONDS:
        raise invalid("seconds", f"seconds must be a number above 0 and at most {MAX_SECONDS:g}")
    return seconds
