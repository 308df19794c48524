"""Serves Prometheus /metrics on its own port, for services without HTTP."""

from __future__ import annotations

import contextlib
import errno
import platform
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import REGISTRY, Gauge, make_wsgi_app, start_http_server

_BUILD_INFO = Gauge(
    "paceline_build_info",
    "1, with the versions of the running code as labels",
    ["service", "version", "python_version"],
)


def publish_build_info(service: str) -> None:
    """Name the service of this process, and what it runs, in its metrics."""
    _BUILD_INFO.labels(service, version("paceline"), platform.python_version()).set(1)


@dataclass(frozen=True, slots=True)
class MetricsServer:
    """A running endpoint. `port`: the bound port."""

    port: int
    _server: WSGIServer
    _thread: threading.Thread

    def close(self) -> None:
        """Stop the endpoint at once. The server's thread checks only twice a second whether it must stop. Shutting its
        socket down wakes it at once."""
        with contextlib.suppress(OSError):  # on systems other than Linux
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def start_metrics_server(host: str, port: int, *, or_free: bool = False) -> MetricsServer:
    """Serve the process's registry on a thread, for GET and HEAD. Port 0 takes a free port.

    `or_free`: if the port is in use, take a free port. Raises OSError if the port cannot be opened.
    """
    try:
        server, thread = start_http_server(port, addr=host)
    except OSError as error:
        if not or_free or error.errno != errno.EADDRINUSE:
            raise
        server, thread = start_http_server(0, addr=host)
    server.set_app(_with_head(make_wsgi_app(REGISTRY)))
    return MetricsServer(server.server_port, server, thread)


def _with_head(app: Callable[..., Iterable[bytes]]) -> Callable[[dict[str, Any], Any], Iterable[bytes]]:
    """Answer HEAD like GET without a body, because load generators probe with it."""

    def wrapped(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ.get("REQUEST_METHOD") != "HEAD":
            return app(environ, start_response)
        for _ in app({**environ, "REQUEST_METHOD": "GET"}, start_response):
            pass
        return [b""]

    return wrapped
