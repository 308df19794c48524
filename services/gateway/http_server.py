"""uvicorn inside our event loop: our sockets, our signals, our error shape even for what is not HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Iterator
from typing import Any

import orjson
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.gateway.errors import ApiError

# Request line and headers together.
_MAX_HEAD_BYTES = 64 * 1024
# How long what a client still sends after our answer is read and dropped: a close with unread data would tear the
# answer away.
_REFUSAL_LINGER_S = 1.0
_BODY_LINGER_S = 5.0
# Open files that are no HTTP connections.
_RESERVED_FILES = 256


class _CloseAfterBody:
    """The transport of an exchange on a connection that ends with it, while its request may still be arriving."""

    def __init__(self, protocol: _Protocol) -> None:
        self._protocol = protocol

    def __getattr__(self, name: str) -> Any:
        return getattr(self._protocol.transport, name)

    def close(self) -> None:
        if self._protocol.body_is_here:
            self._protocol.transport.close()
        else:
            self._protocol.refuse(_BODY_LINGER_S)


class _Config(uvicorn.Config):
    """With what uvicorn has not."""

    closing = False  # no connection outlives the answer to its next request
    max_connections: int
    head_timeout_s: float


class _Protocol(HttpToolsProtocol):
    """Bounds the head of a request in size and time, and the number of connections; answers what cannot be parsed in
    OpenAI's error shape."""

    config: _Config
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _refused = False
    body_is_here = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.config.max_connections:
            message = f"the server has {self.config.max_connections} connections, and takes no more"
            self._answer(b"503 Service Unavailable", ApiError(503, message, code="too_many_connections"))
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        if self._head_timer is None:  # not the first request of this connection
            self._expect_head()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + len(b": \r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self.body_is_here = False
        self._head_is_here()
        super().on_headers_complete()
        if self.cycle is not None and self.config.closing:
            self.cycle.keep_alive = False
        if self.cycle is not None and not self.cycle.keep_alive:
            self.cycle.transport = _CloseAfterBody(self)  # type: ignore[assignment]

    def on_message_complete(self) -> None:
        self.body_is_here = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        too_large = self._head_bytes > _MAX_HEAD_BYTES
        status = b"431 Request Header Fields Too Large" if too_large else b"400 Bad Request"
        message = f"the request line and headers are larger than {_MAX_HEAD_BYTES} bytes" if too_large else msg
        error = ApiError(431 if too_large else 400, message, code="invalid_http")
        self._answer(status, error)

    def _answer(self, status: bytes, error: ApiError) -> None:
        body = orjson.dumps(error.body())
        self.transport.write(
            b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
            % (status, len(body), body)
        )
        self.refuse(_REFUSAL_LINGER_S)

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self.config.head_timeout_s, self._head_is_late)

    def _head_is_here(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self._head_bytes:  # nothing was asked
            self.transport.close()
            return
        message = f"the headers did not arrive within {self.config.head_timeout_s:g} s"
        self._answer(b"408 Request Timeout", ApiError(408, message, code="request_timeout"))

    def refuse(self, linger_s: float) -> None:
        """Close, but for the client's side, whose data is dropped for a while."""
        self._refused = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(linger_s, self.transport.close)

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > _MAX_HEAD_BYTES:
            # The parser turns it into its own error, which ends in send_400_response.
            raise ValueError("the head is too large")


class _Server(uvicorn.Server):
    """Leaves the process's signals alone: the service's runner owns them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves an ASGI app until `stop`.

    A connection whose request's head is not there `head_timeout_s` after it began (or after the connection was made) is
    closed. One more than `max_connections`, or than files may be open, gets 503.
    """

    def __init__(
        self, app: ASGIApp, host: str, port: int, *, max_connections: int = 16384, head_timeout_s: float = 30.0
    ) -> None:
        config = self._config = _Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=1,
            backlog=4096,
        )
        config.head_timeout_s = head_timeout_s
        open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if open_files != resource.RLIM_INFINITY:
            max_connections = min(max_connections, max(1, open_files - _RESERVED_FILES))
        config.max_connections = max_connections
        self._server = _Server(config)
        self._host, self._port = host, port
        self._task: asyncio.Task[Any] | None = None
        self._socket: socket.socket | None = None

    @property
    def num_running(self) -> int:
        """Requests whose answers have not ended."""
        return len(self._server.server_state.tasks)

    @property
    def num_connections(self) -> int:
        """Open ones, with or without a request."""
        return len(self._server.server_state.connections)

    async def start(self) -> int:
        """Listen; returns the port really bound. Raises OSError if it is taken."""
        self._socket = sock = _listen(self._host, self._port)
        self._task = asyncio.create_task(self._server.serve(sockets=[sock]))
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise RuntimeError("the HTTP server ended while it started")
            await asyncio.sleep(0.005)
        port: int = sock.getsockname()[1]
        return port

    async def close_listener(self) -> None:
        """From now on connections are refused, so that clients and balancers go elsewhere at once. Those that are open
        already are served: each gets `connection: close` with its next answer."""
        assert self._socket is not None, "start() comes first"
        self._config.closing = True
        # Connections that wait for us to accept them would be reset.
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self._socket.accept()
                await asyncio.get_running_loop().connect_accepted_socket(self._protocol, connection)
        for server in self._server.servers:
            server.close()

    def _protocol(self) -> _Protocol:
        state = self._server.lifespan.state
        return _Protocol(config=self._config, server_state=self._server.server_state, app_state=state)

    async def stop(self) -> None:
        """Close the listener; answers that still run get a second to end."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task


def _listen(host: str, port: int) -> socket.socket:
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
