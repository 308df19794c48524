"""Runs uvicorn inside our event loop, with our sockets, signals and connections."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any, NoReturn

import uvicorn
from starlette.types import ASGIApp

from services.gateway.http.connection import Connections, Edge, HttpConnection
from services.gateway.http.handshake import ServerTls, TlsListener
from services.gateway.http.slow_clients import LOOKS
from services.runtime.service import max_open_files
from services.runtime.tls.exposed import warn_without_tls

_BACKLOG = 4096
# uvloop accepts one connection per listening socket and event-loop turn. When turns become long under load, new
# connections would wait in the kernel behind thousands that their clients have given up. So the server listens with
# this many copies of one socket.
_ACCEPTED_PER_TURN = 8
# asyncio's server must not close before each accepted connection has its protocol, which takes up to two turns.
_ACCEPTING_TURNS = 2
# HttpConnection has its own timeout between requests, so uvicorn's timeout must never end.
_NEVER_S = 10**6
# File descriptors that are reserved for other files than connections, but at most a quarter of the limit. A gateway at
# rest has about 40 open files.
_RESERVED_FILES = 256
# The minimum of the default limit per client: a low max_connections is meant for tests and small machines.
_LEAST_PER_CLIENT = 64


class _Server(uvicorn.Server):
    """Installs no signal handlers: the service's runner has them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves an ASGI app until `stop`.

    A connection is closed if the head of its request is incomplete `head_timeout_s` after the request (or the
    connection) began. It is also closed if its client reads nothing of an answer for `send_timeout_s`, while `watch`
    runs.

    A client may have `max_per_client` connections (default: half of `max_connections`, at least 64); one more gets 429.
    At `max_connections`, a new connection closes an idle one (it waits for a request and has sent its answers) of the
    client with the most connections. If that client has no such connection, or if the new connection's own client has
    as many connections, the new connection gets 503. `max_connections` is lowered if the limit of open files does not
    leave room for so many besides `other_connections`.

    With `tls`, it speaks HTTPS only, and closes a connection above the limits without an answer.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        max_connections: int = 16384,
        max_per_client: int | None = None,
        other_connections: int = 0,
        head_timeout_s: float = 30.0,
        send_timeout_s: float = 60.0,
        tls: ServerTls | None = None,
    ) -> None:
        if (open_files := max_open_files()) is not None:
            reserved = min(_RESERVED_FILES, open_files // 4)
            max_connections = min(max_connections, max(1, open_files - other_connections - reserved))
        max_per_client = max_per_client or max(max_connections // 2, _LEAST_PER_CLIENT)
        self.connections = Connections(max_connections, max_per_client, head_timeout_s)
        config = uvicorn.Config(
            Edge(app),
            http=partial(HttpConnection, self.connections),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            date_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_NEVER_S,
            timeout_graceful_shutdown=1,
        )
        self._config, self._server = config, _Server(config)
        self._tls = tls
        self._listener: TlsListener | None = None
        self._host, self._port, self._send_timeout_s = host, port, send_timeout_s
        self._task: asyncio.Task[Any] | None = None

    @property
    def num_running(self) -> int:
        """Requests without a complete answer."""
        return sum(connection.is_running for connection in self.connections.open)

    @property
    def num_connections(self) -> int:
        """Open connections, with or without a request."""
        return len(self.connections.open)

    @property
    def has_unsent(self) -> bool:
        """Whether a client has not read all of its answer."""
        return any(connection.num_unsent for connection in self.connections.open)

    async def start(self) -> int:
        """Listen, and return the bound port. Raises OSError if the port is taken."""
        self._sock = _bind(self._host, self._port)
        self._sockets = [self._sock.dup() for _ in range(_ACCEPTED_PER_TURN)] if self._tls is None else []
        self._task = asyncio.create_task(self._server.serve(self._sockets))
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise RuntimeError("the HTTP server ended while it started")
            await asyncio.sleep(0.005)
        if self._tls is not None:
            self._sock.listen(_BACKLOG)
            self._listener = TlsListener(self._sock, self._tls, self._make_connection)
        port: int = self._sock.getsockname()[1]
        if self._tls is None:
            warn_without_tls(self._host, "http", f"{self._host}:{port}")
        return port

    def _make_connection(self) -> HttpConnection:
        """As uvicorn makes them for its own listener."""
        server = self._server
        state = server.lifespan.state
        return HttpConnection(self.connections, config=self._config, server_state=server.server_state, app_state=state)

    async def watch(self) -> NoReturn:
        """Close connections of slow clients, until cancelled."""
        while True:
            await asyncio.sleep(self._send_timeout_s / LOOKS)
            for connection in tuple(self.connections.open):
                connection.look()

    async def close_listener(self) -> None:
        """Refuse new connections, so that clients and balancers go elsewhere at once.

        Open connections are served. Each gets `connection: close` with its next answer.
        """
        self.connections.closing = True
        waiting = select.poll()
        waiting.register(self._sock, select.POLLIN)
        num_empty = 0
        for _ in range(_BACKLOG):  # the kernel would reset connections that wait
            num_empty = 0 if waiting.poll(0) else num_empty + 1
            if num_empty > _ACCEPTING_TURNS:
                break
            await asyncio.sleep(0)
        for server in self._server.servers:
            server.close()
        if self._listener is not None:
            self._listener.close()
        for sock in (*self._sockets, self._sock):
            sock.close()

    async def stop(self) -> None:
        """Close the listening sockets. Running answers get one second to complete."""
        if self._listener is not None:
            self._listener.abort()
        self._server.should_exit = True
        if self._task is not None:
            await self._task
            self._sock.close()


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock
