"""Asks the running services whether they answer, and whether they can serve."""

from __future__ import annotations

import asyncio
import enum
import http.client
import json
import ssl
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

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

    SILENT = enum.auto()  # no answer in time: the service starts, has ended, or its event loop is stuck
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
            status, _ = self._ask_ready(2)
        except (OSError, http.client.HTTPException, ValueError, TlsError):
            return False
        return status == 200

    def model_name(self) -> str:
        """The name that clients use."""
        _, said = self._ask_ready(5)
        return str(said["model"])

    def _ask_ready(self, timeout_s: float) -> tuple[int, Any]:
        """Status and body of /ready, which needs no API key."""
        url = urlsplit(self.url)
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=timeout_s)
        if url.scheme == "https":
            context = self._dialler.http_context() if self._dialler is not None else None
            connection = http.client.HTTPSConnection(url.hostname or "", url.port, timeout=timeout_s, context=context)
        with closing(connection):
            connection.request("GET", "/ready")
            answer = connection.getresponse()
            return answer.status, json.load(answer)
