"""One HTTP connection: uvicorn's protocol with bounds, OpenAI's error shape also for invalid HTTP, and an admission
hook."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import httptools
import orjson
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle as Cycle

from services.gateway.errors import ApiError
from services.gateway.http.listener import ConnectionCounts, has_gone
from services.gateway.http.slow_clients import Reader

# Size limit of the request line and the headers together.
_MAX_HEAD_BYTES = 64 * 1024
# After its answer the server reads and drops what the client still sends, for this long. A close with unread data would
# make the kernel discard the answer.
_REFUSAL_LINGER_S = 1.0
_BODY_LINGER_S = 5.0
# After a read of this many dropped bytes the next read waits this long: the connection drops 25 to 128 MB/s.
_LARGE_READ_BYTES, _DROP_PAUSE_S = 64 * 1024, 0.002
# How long the rest of a rejected request may take, on a connection that stays open.
_SKIP_TIMEOUT_S = 60.0
# How many pipelined requests may wait behind the running one.
_MAX_PIPELINED = 64
# The headers that give the length of a body.
_FRAMING = (b"content-length", b"transfer-encoding")
# The ASGI scope key of the request's ClientSocket.
CLIENT_SOCKET = "paceline.client_socket"
# The ASGI scope key of the AdmissionTicket, if the admission hook returned one.
TICKET = "paceline.admission_ticket"


class RejectedRequest(NamedTuple):
    """The only answer to a request that is rejected at its head."""

    error: ApiError
    request_id: str


class AdmissionTicket:
    """Counts an admitted request until it is submitted or has failed."""

    __slots__ = ("_on_end",)

    def __init__(self, on_end: Callable[[], object]) -> None:
        self._on_end: Callable[[], object] | None = on_end

    def end(self) -> None:
        """Stop counting the request. Safe to call again."""
        if self._on_end is not None:
            self._on_end()
            self._on_end = None


# Arguments: the target and the headers (names in lower case) of a POST, before its body is read.
AdmissionHook = Callable[[bytes, Sequence[tuple[bytes, bytes]]], RejectedRequest | AdmissionTicket | None]


class ClientSocket:
    """The client's end of a connection."""

    __slots__ = ("_sock", "_transport")

    def __init__(self, sock: socket.socket, transport: asyncio.Transport) -> None:
        self._sock = sock
        self._transport = transport

    def has_gone(self) -> bool:
        """Whether the client has closed its end. Knows it before the event loop does."""
        return has_gone(self._sock)

    def drop(self) -> None:
        """Close the connection at once, because no client reads the answer."""
        self._transport.abort()


class _CloseAfterBody:
    """A transport that closes only after the request's body has arrived. For the last exchange of a connection."""

    def __init__(self, protocol: HttpConnection) -> None:
        self._protocol = protocol

    def __getattr__(self, name: str) -> Any:
        return getattr(self._protocol.transport, name)

    def close(self) -> None:
        # Requests behind this one may still be unread in the kernel.
        if self._protocol.body_is_here and not self._protocol.pipeline and not self._protocol.is_full:
            self._protocol.transport.close()
        else:
            self._protocol.refuse(_BODY_LINGER_S)


class _Flow(FlowControl):
    """Stops reading while more than one request waits behind the running one, also when uvicorn resumes reading."""

    def __init__(self, connection: HttpConnection) -> None:
        super().__init__(connection.transport)
        self._connection = connection

    def resume_reading(self) -> None:
        if len(self._connection.pipeline) <= 1:
            super().resume_reading()


class Config(uvicorn.Config):
    """uvicorn's configuration with the limits of this server."""

    closing = False  # True: each connection ends after the answer to its next request
    max_connections: int
    clients: ConnectionCounts
    head_timeout_s: float
    admission_hook: AdmissionHook


class HttpConnection(HttpToolsProtocol):
    """Limits the size and the time of a request's head, and the number of connections.

    Requests that cannot be parsed get an error in OpenAI's shape. A rejected request gets its answer without a task, a
    queue or an ASGI call.
    """

    config: Config
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _refused = False
    # The rest of a rejected request is dropped.
    _skipping = False
    _skip_timer: asyncio.TimerHandle | None = None
    _has_begun = False  # a request began in the data just received
    _last = False
    _ticket: AdmissionTicket | None = None
    _served: Cycle | None = None  # the running request; uvicorn's `cycle` is the newest one, perhaps in the pipeline
    body_is_here = False
    _heeds_heads = True
    is_full = False  # the pipeline is full: data behind the newest request is dropped

    def __init__(self, sock: socket.socket, client: str, **options: Any) -> None:
        super().__init__(**options)
        self._sock = sock
        self._client = client

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(self)
        self._client_socket = ClientSocket(self._sock, transport)
        self._reader = Reader(self._sock, transport)
        if len(self.connections) > self.config.max_connections and not self._evict_connection():
            message = f"the server has {self.config.max_connections} connections, and takes no more"
            self._answer(b"503 Service Unavailable", ApiError(503, message, code="too_many_connections"))
        else:
            self._expect_head()

    def _evict_connection(self) -> bool:
        """Close a connection that waits for a request, of the client with the most connections. False if there is no
        such connection, or if this connection's own client has as many."""
        client = self.config.clients.largest(but=self._client)
        for other in self.connections:
            assert isinstance(other, HttpConnection)
            if other._client == client and not other.transport.is_closing() and other.awaits_request:
                other.transport.abort()
                return True
        return False

    @property
    def awaits_request(self) -> bool:
        """No complete request has arrived."""
        return not self._is_answering or not self.body_is_here

    def connection_lost(self, exc: Exception | None) -> None:
        self.config.clients.leave(self._client)
        self._head_is_here()
        self._skip_ends()
        self._end_ticket()
        # uvicorn tells only the newest request.
        for cycle in [self._served, *(cycle for cycle, _ in self.pipeline)]:
            if cycle is not None:
                _end(cycle)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn does this only after a clean end

    def look(self) -> None:
        """Call this now and then. Closes the connection if its client does not read, or if reading is paused and the
        client has gone."""
        self._reader.look()
        if self.flow.read_paused and self._client_socket.has_gone():
            self._client_socket.drop()

    def data_received(self, data: bytes) -> None:
        if self._refused or (self.is_full and self.body_is_here):
            self._drop(len(data))
            return
        # uvicorn would stop this timer at any data, and start it again only after an answer.
        rest_timer, self.timeout_keep_alive_task, self._has_begun = self.timeout_keep_alive_task, None, False
        self._parse(data)
        if rest_timer is not None:
            if self._has_begun or self.timeout_keep_alive_task is not None:
                rest_timer.cancel()
            else:
                self.timeout_keep_alive_task = rest_timer
        if self._last and not self._refused:
            self.refuse(_BODY_LINGER_S)
        elif self._skipping and not self.body_is_here:
            self._drop(len(data))
            if self._skip_timer is None:
                self._skip_timer = self.loop.call_later(_SKIP_TIMEOUT_S, self.transport.close)

    def _drop(self, num_bytes: int) -> None:
        """Pause after a large read of dropped data. Otherwise a fast sender would occupy the event loop."""
        if num_bytes >= _LARGE_READ_BYTES and not self.transport.is_closing():
            self.flow.pause_reading()
            self.loop.call_later(_DROP_PAUSE_S, self._read_on)

    def _read_on(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def _parse(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = self._parse_to_offer(rest)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _parse_to_offer(self, data: memoryview) -> memoryview:
        """Parse up to an offer of another protocol ("Upgrade: h2c", as Java's HttpClient sends) and ignore the offer
        (RFC 9110 §7.8). The parser treats an offer as the end of HTTP, so a new parser continues. Returns the data that
        is left for the new parser."""
        try:
            self.parser.feed_data(data)
            return data[:0]
        except httptools.HttpParserUpgrade as offer:
            length: int = offer.args[0]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        # The new parser gets a head with the same body length.
        framing = [b"%s: %s\r\n" % (name, value) for name, value in self.headers if name in _FRAMING]
        self._heeds_heads = False
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % b"".join(framing))
        self._heeds_heads = True
        return data[length:]

    def on_message_begin(self) -> None:
        if not self._heeds_heads:
            return
        self._head_bytes = 0
        self._has_begun = True
        self._skipping = False
        self._unset_keepalive_if_required()
        if self._head_timer is None:  # the second or a later request of this connection
            self._expect_head()
        super().on_message_begin()
        self.scope[CLIENT_SOCKET] = self._client_socket  # type: ignore[literal-required]

    def on_url(self, url: bytes) -> None:
        if not self._heeds_heads:
            return
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._heeds_heads:
            return
        self._count(len(name) + len(value) + len(b": \r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._heeds_heads:
            return
        self._has_begun = True  # also if the first bytes of the head came before the last answer
        self._head_is_here()
        if self.is_full:
            self._skipping = True
            return
        self.body_is_here = False
        if self._last or self._rejected_at_head():
            self._skipping = True
            return
        super().on_headers_complete()
        if self.cycle is not None and self.config.closing:
            self.cycle.keep_alive = False
        if self.cycle is not None and not self.cycle.keep_alive:
            self.cycle.transport = _CloseAfterBody(self)  # type: ignore[assignment]
        if len(self.pipeline) >= _MAX_PIPELINED:  # the last request of this connection
            self.is_full = True
            self.cycle.keep_alive = False
            self.cycle.transport = _CloseAfterBody(self)  # type: ignore[assignment]
        if self.pipeline:
            self.flow.resume_reading()  # uvicorn stays paused, and a paused connection does not notice a gone client

    def _start_asgi_task(self, cycle: Cycle, app: Any) -> None:
        self._served = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        if not self._skipping:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # the body is still to come
        self.body_is_here = True
        if not self._skipping:
            super().on_message_complete()
            return
        self._skip_ends()
        if self.is_full:
            return
        if not self._last:
            later = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
            self.timeout_keep_alive_task = later
        elif not self._refused:
            self._refused = True
            self.transport.close()

    def on_response_complete(self) -> None:
        self._end_ticket()
        assert self._served is not None
        self._served.body = bytearray()  # frees the unread rest now; the next request may come late
        super().on_response_complete()

    def _end_ticket(self) -> None:
        """The request has ended in any way."""
        if self._ticket is not None:
            self._ticket.end()
            self._ticket = None

    def _rejected_at_head(self) -> bool:
        """Answer a request above the limits at its head. False if the request is to be served."""
        # Behind another request, or behind unread answers, the request takes the normal path, which has backpressure.
        busy = self.flow.write_paused or self._is_answering
        if busy or self.expect_100_continue or self.parser.get_method() != b"POST":
            return False
        verdict = self.config.admission_hook(self.url, self.headers)
        if not isinstance(verdict, RejectedRequest):
            if verdict is not None:
                self._ticket = self.scope[TICKET] = verdict  # type: ignore[literal-required]
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
        return self._served is not None and not self._served.response_complete

    def _answer(self, status: bytes, error: ApiError) -> None:
        if self.is_full and self.body_is_here:
            return
        if self._is_answering:
            assert self._served is not None
            if self.pipeline or self._served.response_started:  # the error would stand inside, or replace, that answer
                self.transport.close()
                return
            _end(self._served)  # the error is its answer
        self._write(status, error, [("connection", "close")])
        self.refuse(_REFUSAL_LINGER_S)

    def _write(self, status: bytes, error: ApiError, headers: Sequence[tuple[str, str]]) -> None:
        self.transport.write(whole_answer(status, error, headers))

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
        if not self._head_bytes:  # no request has begun
            self.transport.close()
            return
        message = f"the headers did not arrive within {self.config.head_timeout_s:g} s"
        self._answer(b"408 Request Timeout", ApiError(408, message, code="request_timeout"))

    def refuse(self, linger_s: float) -> None:
        """Close our side. The client's data is dropped for `linger_s` seconds."""
        self._refused = True
        self._head_is_here()  # stop the timer
        self.pipeline.clear()  # no waiting request starts
        self.flow.resume_reading()  # read to drop
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(linger_s, self.transport.close)

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > _MAX_HEAD_BYTES:
            # The parser wraps this in its own error, which leads to send_400_response.
            raise ValueError("the head is too large")


def whole_answer(status: bytes, error: ApiError, headers: Sequence[tuple[str, str]]) -> bytes:
    """The bytes of an error answer."""
    body = orjson.dumps(error.body())
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers]).encode()
    head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%s\r\n"
    return head % (status, len(body), lines) + body


def _end(cycle: Cycle) -> None:
    """End a request as if its client had gone: its task gets a disconnect, and its output is dropped."""
    if not cycle.response_complete:
        cycle.disconnected = True
        cycle.waiting_for_100_continue = False
        cycle.message_event.set()
