"""Limits how many requests a gRPC server receives at once, and so the memory that they take.

gRPC's core buffers at most the flow-control window of a request until the server reads it (measured: 80 unread calls of
16 MB take 24 MB). So the gate decides when a request is read.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

import grpc


class MessageGate:
    """Reads the single request of a call, for `max_reading` calls at once. Further calls wait, first come, first
    served.

    A slow client may take its time only while no other call waits. When all slots are taken, each new call puts
    a limit on the oldest read that has none yet: `patience_s` seconds from the start of the read.
    """

    def __init__(self, *, max_reading: int, max_waiting: int, timeout_s: float = 60.0, patience_s: float = 1.0) -> None:
        """`timeout_s`: the limit for a read while no other call waits."""
        self._places = asyncio.Semaphore(max_reading)
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._timeout_s, self._patience_s = timeout_s, patience_s
        # The reads that `patience_s` does not limit yet, and the start of each.
        self._unlimited: OrderedDict[asyncio.Timeout, float] = OrderedDict()

    async def read(self, context: Any) -> bytes:
        """The request. Aborts the call with RESOURCE_EXHAUSTED if too many calls wait or the request is too slow, and
        with INVALID_ARGUMENT if the call has no request."""
        if self._places.locked():
            await self._wait(context)
        else:
            await self._places.acquire()
        began_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(began_s + self._timeout_s) as limit:
                self._unlimited[limit] = began_s
                message = await context.read()
        except TimeoutError:
            took_s = asyncio.get_running_loop().time() - began_s
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"the request did not arrive as a whole within {took_s:.1f} s"
            )
        finally:
            self._unlimited.pop(limit, None)
            self._places.release()
        if not isinstance(message, bytes):  # grpc.aio.EOF
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no request")
            raise AssertionError("abort raises")
        return message

    async def _wait(self, context: Any) -> None:
        if self._num_waiting >= self._max_waiting:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "the server is receiving too many requests: try again later"
            )
        if self._unlimited:
            limit, began_s = self._unlimited.popitem(last=False)
            limit.reschedule(began_s + self._patience_s)
        self._num_waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._num_waiting -= 1
