"""Asks the running services whether they answer, and whether they can serve."""

from __future__ import annotations

import asyncio
import enum
import json
import urllib.error
import urllib.request

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.runtime.rpc import open_channel

PROBE_TIMEOUT_S = 2.0


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


async def listens(host: str, port: int) -> bool:
    """Whether the port accepts connections."""
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.close()
    return True


class GatewayProbe:
    """Asks the gateway at `url`. Both calls wait for the answer: do not call them in the event loop."""

    def __init__(self, url: str) -> None:
        self.url = url

    def is_ready(self) -> bool:
        """Whether some worker can serve."""
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def model_name(self) -> str:
        """The name that clients use."""
        # /ready needs no API key. While the gateway is not ready, its status is 503.
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=5) as answer:
                return str(json.load(answer)["model"])
        except urllib.error.HTTPError as error:
            with error:
                return str(json.load(error)["model"])
