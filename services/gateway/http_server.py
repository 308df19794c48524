"""uvicorn inside our event loop: our sockets, our signals, our error shape even for what is not HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import orjson
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.gateway.errors import ApiError
from services.gateway.listener import Listener, has_gone
from services.gateway.stalled import LOOKS, Reader

# Request line and headers together.
_MAX_HEAD_BYTES = 64 * 1024
# How long what a client still sends after our answer is read and dropped: a close with unread data would tear the
# answer away.
_REFUSAL_LINGER_S = 1.0
_BODY_LINGER_S = 5.0
# How long the rest of a request that was turned away may take, on a connection that is used on.
_SKIP_TIMEOUT_S = 60.0
# How long a connection may rest between two requests. What is no beginning of one (the rest of a body whose request is
# answered, an empty line) does not begin it anew.
_REST_TIMEOUT_S = 75
# In the scope of a request: its Peer.
PEER = "paceline.peer"
# If the doorkeeper gave one: its Entry.
ENTRY = "paceline.entry"
_BACKLOG = 4096
# Open files that are no HTTP connections.
_RESERVED_FILES = 256


class TurnedAway(NamedTuple):
    """A request that gets no more than this."""

    error: ApiError
    request_id: str


class Entry:
    """A request that was let in, until it has been submitted or has failed."""

    __slots__ = ("_on_end",)

    def __init__(self, on_end: Callable[[], object]) -> None:
        self._on_end: Callable[[], object] | None = on_end

    def end(self) -> None:
        """Safe to call again."""
        if self._on_end is not None:
            self._on_end()
            self._on_end = None


# By the target and the headers (names in lower case) of a POST whose body is not read yet.
DoorKeeper = Callable[[bytes, Sequence[tuple[bytes, bytes]]], TurnedAway | Entry | None]


class Peer:
    """The other end of a connection."""

    __slots__ = ("_sock", "_transport")

    def __init__(self, sock: socket.socket, transport: asyncio.Transport) -> None:
        self._sock = sock
        self._transport = transport

    def has_gone(self) -> bool:
        """Even before the event loop has noticed."""
        return has_gone(self._sock)

    def drop(self) -> None:
        """There is nobody to answer: close at once."""
        self._transport.abort()


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
    doorkeeper: DoorKeeper


class _Protocol(HttpToolsProtocol):
    """Bounds the head of a request in size and time, and the number of connections; answers what cannot be parsed in
    OpenAI's error shape, and who is turned away without any of what a request has else (a task, a queue, layers)."""

    config: _Config
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _refused = False
    # Of a request that is turned away the rest is dropped.
    _skipping = False
    _skip_timer: asyncio.TimerHandle | None = None
    _has_begun = False  # a request, in what has just come
    _last = False
    _entry: Entry | None = None
    body_is_here = False

    def __init__(self, sock: socket.socket, **options: Any) -> None:
        super().__init__(**options)
        self._sock = sock

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._peer = Peer(self._sock, transport)
        self.reader = Reader(self._sock, transport)
        if len(self.connections) > self.config.max_connections:
            message = f"the server has {self.config.max_connections} connections, and takes no more"
            self._answer(b"503 Service Unavailable", ApiError(503, message, code="too_many_connections"))
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        self._skip_ends()
        self._entry_ends()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        # uvicorn would stop it for whatever comes, and begin it again for an answer only.
        rest_timer, self.timeout_keep_alive_task, self._has_begun = self.timeout_keep_alive_task, None, False
        super().data_received(data)
        if rest_timer is not None:
            if self._has_begun or self.timeout_keep_alive_task is not None:
                rest_timer.cancel()
            else:
                self.timeout_keep_alive_task = rest_timer
        if self._last and not self._refused:
            self.refuse(_BODY_LINGER_S)
        elif self._skipping and not self.body_is_here and self._skip_timer is None:
            self._skip_timer = self.loop.call_later(_SKIP_TIMEOUT_S, self.transport.close)

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        self._has_begun = True
        self._skipping = False
        self._unset_keepalive_if_required()
        if self._head_timer is None:  # not the first request of this connection
            self._expect_head()
        super().on_message_begin()
        self.scope[PEER] = self._peer  # type: ignore[literal-required]

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + len(b": \r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._has_begun = True  # also if its first bytes came before the answer after which the connection rests
        self.body_is_here = False
        self._head_is_here()
        if self._last or self._turn_away():
            self._skipping = True
            return
        super().on_headers_complete()
        if self.cycle is not None and self.config.closing:
            self.cycle.keep_alive = False
        if self.cycle is not None and not self.cycle.keep_alive:
            self.cycle.transport = _CloseAfterBody(self)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        if not self._skipping:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self.body_is_here = True
        if not self._skipping:
            super().on_message_complete()
            return
        self._skip_ends()
        if not self._last:
            later = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
            self.timeout_keep_alive_task = later
        elif not self._refused:
            self._refused = True
            self.transport.close()

    def on_response_complete(self) -> None:
        self._entry_ends()
        super().on_response_complete()

    def _entry_ends(self) -> None:
        """Whatever has become of its request."""
        if self._entry is not None:
            self._entry.end()
            self._entry = None

    def _turn_away(self) -> bool:
        """Answer a request for which there is no room, at its head; False if it is to be served."""
        # With the request before it, or with answers that are not read: in what a request has else there is a brake.
        busy = self.flow.write_paused or self._is_answering
        if busy or self.expect_100_continue or self.parser.get_method() != b"POST":
            return False
        verdict = self.config.doorkeeper(self.url, self.headers)
        if not isinstance(verdict, TurnedAway):
            if verdict is not None:
                self._entry = self.scope[ENTRY] = verdict  # type: ignore[literal-required]
            return False
        error, request_id = verdict
        http_version = self.parser.get_http_version()
        self._last = self.config.closing or http_version == "1.0" or not self.parser.should_keep_alive()
        headers = [("x-request-id", request_id), *error.headers.items()]
        if self._last:
            headers.append(("connection", "close"))
        self._write(b"429 Too Many Requests", error, headers)
        return True

    def _skip_ends(self) -> None:
        if self._skip_timer is not None:
            self._skip_timer.cancel()
            self._skip_timer = None

    def send_400_response(self, msg: str) -> None:
        too_large = self._head_bytes > _MAX_HEAD_BYTES
        status = b"431 Request Header Fields Too Large" if too_large else b"400 Bad Request"
        message = f"the request line and headers are larger than {_MAX_HEAD_BYTES} bytes" if too_large else msg
        error = ApiError(431 if too_large else 400, message, code="invalid_http")
        self._answer(status, error)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _answer(self, status: bytes, error: ApiError) -> None:
        if self._is_answering and self.cycle.response_started:  # it would stand in the middle of that answer
            self.transport.close()
            return
        self._write(status, error, [("connection", "close")])
        self.refuse(_REFUSAL_LINGER_S)

    def _write(self, status: bytes, error: ApiError, headers: Sequence[tuple[str, str]]) -> None:
        body = orjson.dumps(error.body())
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers]).encode()
        self.transport.write(
            b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%s\r\n%s"
            % (status, len(body), lines, body)
        )

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self.config.head_timeout_s, self._head_is_late)

    def _head_is_here(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._is_answering:
            self._expect_head()
            return
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
    """Takes connections in with our listener, and leaves the process's signals alone: the service's runner owns
    them."""

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

    A connection whose request's head is not there `head_timeout_s` after it began (or after the connection was made) is
    closed; so is one whose client reads nothing of its answer for `send_timeout_s`, while `watch` runs. One more than
    `max_connections`, or than files may be open, gets 503. `costly`, `on_gone`: see Listener.
    Whom the `doorkeeper` turns away has its answer before anything else is done for it.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        max_connections: int = 16384,
        head_timeout_s: float = 30.0,
        send_timeout_s: float = 60.0,
        costly: tuple[bytes, ...] = (),
        on_gone: Callable[[], None] = lambda: None,
        doorkeeper: DoorKeeper = lambda target, headers: None,
    ) -> None:
        config = self._config = _Config(
            app,
            http=_Protocol,
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
        open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if open_files != resource.RLIM_INFINITY:
            max_connections = min(max_connections, max(1, open_files - _RESERVED_FILES))
        config.max_connections = max_connections
        config.doorkeeper = doorkeeper
        self._server = _Server(config)
        self._host, self._port, self._send_timeout_s = host, port, send_timeout_s
        self._costly, self._on_gone = costly, on_gone
        self._task: asyncio.Task[Any] | None = None

    @property
    def num_running(self) -> int:
        """Requests whose answers have not ended."""
        return len(self._server.server_state.tasks)

    @property
    def num_connections(self) -> int:
        """Open ones, with or without a request."""
        return len(self._server.server_state.connections)

    @property
    def has_unsent(self) -> bool:
        """Whether anything that was answered waits to be read by its client."""
        return any(connection.transport.get_write_buffer_size() for connection in self._server.server_state.connections)

    async def start(self) -> int:
        """Listen; returns the port really bound. Raises OSError if it is taken."""
        sock = _bind(self._host, self._port)
        self._server.listener = Listener(sock, self._protocol, costly=self._costly, on_gone=self._on_gone)
        self._task = asyncio.create_task(self._server.serve())
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise RuntimeError("the HTTP server ended while it started")
            await asyncio.sleep(0.005)
        port: int = sock.getsockname()[1]
        return port

    async def watch(self) -> NoReturn:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(self._send_timeout_s / LOOKS)
            for connection in tuple(self._server.server_state.connections):
                assert isinstance(connection, _Protocol)
                connection.reader.look()

    async def close_listener(self) -> None:
        """From now on connections are refused, so that clients and balancers go elsewhere at once. Those that are open
        already are served: each gets `connection: close` with its next answer."""
        self._config.closing = True
        listener = self._server.listener
        listener.accept_all()
        listener.close()
        await listener.wait_closed()

    def _protocol(self, sock: socket.socket) -> _Protocol:
        server = self._server
        return _Protocol(sock, config=self._config, server_state=server.server_state, app_state=server.lifespan.state)

    async def stop(self) -> None:
        """Close the listener; answers that still run get a second to end."""
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
