"""Asks the running services whether they answer, and whether they can serve."""

from __future__ import annotations

import asyncio
import enum
import json
import ssl
import urllib.error
import urllib.request
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.cli.up.settings import UpSettings
from services.runtime.rpc import open_channel, transport_options
from services.runtime.tls.credentials import pinned_context, pinned_credentials
from services.runtime.tls.files import TlsError
from services.runtime.tls.opening import open_files, open_tls

PROBE_TIMEOUT_S = 2.0


class HealthState(enum.Enum):
    """The result of a health check."""

    SILENT = enum.auto()  # no answer in time: the event loop is stuck
    ANSWERS = enum.auto()
    SERVING = enum.auto()


class Dialler:
    """Dials the services of one `up`, with TLS where they have it."""

    def __init__(self, settings: UpSettings) -> None:
        """Raises CannotStart if the certificates cannot be used."""
        self._own = open_tls(settings.tls_dir, "cli")
        self._public = open_files(paths) if (paths := settings.public_tls) is not None else None

    def open(self, service: str, target: str) -> grpc.aio.Channel:
        if service != "gateway":
            return open_channel(target, tls=self._own)
        if self._public is None:
            return open_channel(target)
        # The gateway's certificate may be of another CA, and need not have the name under which `up` dials.
        credentials, options = pinned_credentials(self._public.current().cert, self._own)
        return open_channel(target, [*transport_options(), *options], credentials=credentials)

    def http_context(self) -> ssl.SSLContext | None:
        """For requests to the gateway. None: without TLS."""
        return None if self._public is None else pinned_context(self._public.current().cert, self._own)


async def check_health(target: str, dialler: Dialler | None = None, service: str = "") -> HealthState:
    """Ask the service at host:port for its health. Any answer shows that its event loop runs."""
    async with dialler.open(service, target) if dialler is not None else open_channel(target) as channel:
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

    def __init__(self, url: str, dialler: Dialler | None = None) -> None:
        self.url = url
        self._dialler = dialler

    def is_ready(self) -> bool:
        """Whether some worker can serve."""
        try:
            with self._get("/ready", 2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError, TlsError):
            return False

    def model_name(self) -> str:
        """The name that clients use."""
        # /ready needs no API key. While the gateway is not ready, its status is 503.
        try:
            with self._get("/ready", 5) as answer:
                return str(json.load(answer)["model"])
        except urllib.error.HTTPError as error:
            with error:
                return str(json.load(error)["model"])

    def _get(self, path: str, timeout_s: float) -> Any:
        context = self._dialler.http_context() if self._dialler is not None else None
        return urllib.request.urlopen(f"{self.url}{path}", timeout=timeout_s, context=context)
