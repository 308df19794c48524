"""Decides when a running child that does not answer is killed, so that it starts again."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.runtime.rpc import open_channel

PROBE_EVERY_S, PROBE_TIMEOUT_S = 1.0, 2.0


@dataclass(slots=True)
class Watchdog:
    """The health record of one process. A process that has never answered is not killed: it may be loading."""

    hang_s: float  # 0: never kill it
    _has_answered: bool = False
    _silent_s: float = 0.0

    def probed(self, answered: bool, seconds: float) -> bool:
        """A probe has ended, `seconds` after the last one. Returns whether to kill the process.

        At most the duration of a probe counts, because a stopped `up` has not received the answers.
        """
        if answered:
            self._has_answered, self._silent_s = True, 0.0
        elif self._has_answered:
            self._silent_s += min(seconds, PROBE_EVERY_S + PROBE_TIMEOUT_S)
        return bool(self.hang_s) and self._silent_s >= self.hang_s


class HealthState(enum.Enum):
    """The result of a health check."""

    SILENT = enum.auto()  # no answer in time: the event loop is stuck
    ANSWERS = enum.auto()
    SERVING = enum.auto()


async def check_health(target: str) -> HealthState:
    """Ask the service at host:port for its health. Any answer shows that its event loop runs."""
    async with open_channel(target) as channel:
        try:
            reply = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S, wait_for_ready=True
            )
        except grpc.aio.AioRpcError as error:
            is_silent = error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
            return HealthState.SILENT if is_silent else HealthState.ANSWERS
    return HealthState.SERVING if reply.status == health_pb2.HealthCheckResponse.SERVING else HealthState.ANSWERS
