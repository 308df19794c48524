"""Runs uvicorn inside our event loop, with our sockets, signals and connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import uvicorn
from starlette.types import ASGIApp

from services.gateway.errors import ApiError
from services.gateway.http.connection import AdmissionHook, Config, HttpConnection, whole_answer
from services.gateway.http.listener import ConnectionCounts, Listener
from services.gateway.http.slow_clients import LOOKS
from services.runtime.service import max_open_files

# How long a connection may stay open between two requests. Data that begins no request (an empty line, the rest of an
# answered request's body) does not restart this time.
_REST_TIMEOUT_S = 75
_BACKLOG = 4096
# Open files other than connections.
_RESERVED_FILES = 256
# The minimum of the default limit per client: a low max_connections is meant for tests and small machines.
_LEAST_PER_CLIENT = 64


class _Server(uvicorn.Server):
    """Accepts connections with our listener, and installs no signal handlers: the service's runner has them."""

    listener: Listener

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        self.listener.start(_BACKLOG)
        self.servers = [self.listener]  # type: ignore[list-item]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves an ASGI app until `stop`.

    A connection is closed if the head of its request is incomplete `head_timeout_s` after the request (or the
    connection) began. It is also closed if its client reads nothing of an answer for `send_timeout_s`, while `watch`
    runs.

    A client may have `max_per_client` connections (default: half of `max_connections`); one more gets 429. At
    `max_connections` (never more than the process may open files besides `other_connections`), a new connection
    replaces a connection that waits for a request, of the client with the most connections. If the new connection's own
    client has as many, it gets 503.
    `costly` and `on_gone`: see Listener.

    A request that `admission_hook` rejects gets its answer at its head.
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
        costly: tuple[bytes, ...] = (),
        on_gone: Callable[[], None] = lambda: None,
        admission_hook: AdmissionHook = lambda target, headers: None,
    ) -> None:
        config = self._config = Config(
            app,
            http=HttpConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            date_header=False,
            timeout_keep_alive=_REST_TIMEOUT_S,
            timeout_graceful_shutdown=1,
        )
        config.head_timeout_s = head_timeout_s
        if (open_files := max_open_files()) is not None:
            max_connections = min(max_connections, max(1, open_files - other_connections - _RESERVED_FILES))
        config.max_connections = max_connections
        config.clients = ConnectionCounts(max_per_client or max(max_connections // 2, _LEAST_PER_CLIENT))
        config.admission_hook = admission_hook
        self._server = _Server(config)
        self._host, self._port, self._send_timeout_s = host, port, send_timeout_s
        self._costly, self._on_gone = costly, on_gone
        self._task: asyncio.Task[Any] | None = None

    @property
    def num_running(self) -> int:
        """Requests without a complete answer."""
        return len(self._server.server_state.tasks)

    @property
    def num_connections(self) -> int:
        """Open connections, with or without a request."""
        return len(self._server.server_state.connections)

    @property
    def has_unsent(self) -> bool:
        """Whether a client has not read all of its answer."""
        return any(connection.transport.get_write_buffer_size() for connection in self._server.server_state.connections)

    async def start(self) -> int:
        """Listen, and return the bound port. Raises OSError if the port is taken."""
        sock = _bind(self._host, self._port)
        clients = self._config.clients
        message = f"your address has {clients.most} connections, and may have no more (--max-connections-per-client)"
        self._server.listener = Listener(
            sock,
            self._protocol,
            clients,
            refusal=whole_answer(
                b"429 Too Many Requests",
                ApiError(429, message, code="too_many_connections"),
                [("connection", "close")],
            ),
            costly=self._costly,
            on_gone=self._on_gone,
        )
        self._task = asyncio.create_task(self._server.serve())
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise RuntimeError("the HTTP server ended while it started")
            await asyncio.sleep(0.005)
        port: int = sock.getsockname()[1]
        return port

    async def watch(self) -> NoReturn:
        """Close connections of slow clients, until cancelled."""
        while True:
            await asyncio.sleep(self._send_timeout_s / LOOKS)
            for connection in tuple(self._server.server_state.connections):
                assert isinstance(connection, HttpConnection)
                connection.look()

    async def close_listener(self) -> None:
        """Refuse new connections, so that clients and balancers go elsewhere at once.

        Open connections are served. Each gets `connection: close` with its next answer.
        """
        self._config.closing = True
        listener = self._server.listener
        listener.accept_all()
        listener.close()
        await listener.wait_closed()

    def _protocol(self, sock: socket.socket, client: str) -> HttpConnection:
        server = self._server
        return HttpConnection(
            sock, client, config=self._config, server_state=server.server_state, app_state=server.lifespan.state
        )

    async def stop(self) -> None:
        """Close the listener. Running answers get one second to complete."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task


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
