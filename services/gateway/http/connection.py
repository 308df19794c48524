"""One HTTP connection: limits and timeouts around uvicorn's protocol, and OpenAI's error shape for invalid HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.gateway.errors import ApiError
from services.gateway.http.clients import ConnectionCounts, has_gone
from services.gateway.http.slow_clients import Reader
from services.runtime.clients import client_of

# Size limit of the request line and the headers together. Reading also pauses when this many received bytes wait for
# uvicorn: an unread body, or the next requests.
_MAX_HEAD_BYTES = 64 * 1024
# An unread body up to this size is dropped, and its connection stays open. It costs less than a new connection.
_MAX_SKIPPED_BYTES = 64 * 1024
# uvicorn gets a chunked body in pieces of this size, because more requests may stand behind its end. Only uvicorn knows
# where that is.
_CHUNKED_PIECE_BYTES = 4 * 1024
# What uvicorn writes is sent in the next turn of the event loop, when all streams have written their parts of a step. A
# client of many streams then wakes up once for many of them. More than this is sent at once.
_MOST_WRITTEN_BYTES = 16 * 1024
# How long a connection may stay open between two requests.
_REST_S = 75.0
# After its last answer the server reads and drops what the client still sends, for this long. A close with unread data
# would make the kernel discard the answer. After a large read the next read waits, so that the server reads and drops
# only 25 to 128 MB/s of a connection.
_LINGER_S = 5.0
_LARGE_READ_BYTES, _DROP_PAUSE_S = 64 * 1024, 0.002
_REQUEST_LINE = re.compile(rb"(?!PRI )[A-Z-]{1,20}( |$)")  # PRI: HTTP/2
_CONTINUE = b"HTTP/1.1 100 "  # precedes the answer: the client may send its body
_HEAD_END = re.compile(rb"\n\r?\n")
# The offer of another protocol ("Upgrade: h2c", as Java's HttpClient sends). A server may ignore it (RFC 9110 §7.8).
# uvicorn's parser would end at it, and lose the body.
_OFFER = re.compile(rb"(?i)\nupgrade:[^\n]*")
# The ASGI scope key of the request's HttpConnection.
CONNECTION = "paceline.connection"


class _Transport(asyncio.Transport):
    """uvicorn's end of a connection. HttpConnection decides when to read and how to close."""

    def __init__(self, connection: HttpConnection, transport: asyncio.Transport) -> None:
        super().__init__()
        self._connection, self._transport = connection, transport

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def write(self, data: Any) -> None:
        self._connection.write(data)

    def close(self) -> None:
        self._connection.close()

    def is_closing(self) -> bool:
        return self._connection.is_closing

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class HttpConnection(asyncio.Protocol):
    """Passes data between the network and uvicorn's protocol, which it uses only as an asyncio.Protocol.

    uvicorn gets the head of one request when it is complete, the body when the app reads it, and the next head after
    the answer. So uvicorn holds neither incomplete heads, nor unread bodies, nor pipelined requests. `Edge` reports
    the calls of the app.
    """

    counts = True  # among the client's connections

    def __init__(self, limits: Connections, *, app_state: dict[str, Any], **options: Any) -> None:
        """`options`: what uvicorn gives each protocol."""
        self._limits = limits
        self._uvicorn: asyncio.Protocol = HttpToolsProtocol(app_state={**app_state, CONNECTION: self}, **options)
        self._held = bytearray()  # received, and not yet uvicorn's
        self._written = bytearray()  # by uvicorn, and not yet the transport's
        self._timer: asyncio.TimerHandle | None = None
        self._is_counted = False  # among the open connections
        self.is_open = False  # connection_made() was called
        self._is_feeding = False
        self._is_paused = False
        self._began = False  # a part of a head is here
        self._is_called = False  # a head is uvicorn's, and its answer is not complete
        self._is_read = False  # the app reads the body
        self._body_bytes: float = 0  # of the body that uvicorn has not yet got; infinite: chunks
        self._num_searched = 0  # held bytes without the end of a head
        self._ends = False  # the answer is the connection's last one
        self.is_closing = False

    # -- asyncio.Protocol --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        refusal = None if self._is_counted else self.enter(transport)
        self.transport, self.is_open = transport, True
        self._reader = Reader(self._sock, transport)
        self._uvicorn.connection_made(_Transport(self, transport))
        if refusal is not None:
            self._refuse(refusal)
        else:
            self._wait(self._limits.head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limits.leave(self)
        self._stop_waiting()
        self.is_closing = True
        self._held.clear()
        self._uvicorn.connection_lost(None)  # with `exc`, uvicorn would keep its timer, which keeps this object

    def data_received(self, data: bytes) -> None:
        if self.is_closing:
            self._drop(len(data))
            return
        self._held += data
        self._move()

    def eof_received(self) -> None:
        self._flush()  # the transport closes next

    def pause_writing(self) -> None:
        self._uvicorn.pause_writing()

    def resume_writing(self) -> None:
        self._uvicorn.resume_writing()

    # -- for TlsListener ---------------------------------------------------------------------------

    def enter(self, transport: asyncio.Transport) -> ApiError | None:
        """Count the connection. With TLS, this is called before the handshake, and connection_made() after it. Returns
        why the connection has to be refused; None if it is accepted."""
        self._loop = asyncio.get_running_loop()
        self._is_counted, self.transport = True, transport
        self._sock = transport.get_extra_info("socket")
        self._reader = Reader(self._sock, transport)
        self.client = client_of((transport.get_extra_info("peername") or ("",))[0])  # no name: the connection was reset
        return self._limits.enter(self)

    def leave(self) -> None:
        """The connection has ended without connection_made()."""
        self._limits.leave(self)

    # -- for Edge ----------------------------------------------------------------------------------

    def called(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """The app is called for the request."""
        self._stop_waiting()
        fields = dict(headers)  # uvicorn's parser rejects repeated and contradictory lengths
        self._body_bytes = math.inf if b"transfer-encoding" in fields else int(fields.get(b"content-length", 0))
        # More requests may stand behind chunks in the data that uvicorn has got.
        self._ends = self._body_bytes == math.inf
        self._awaits_100 = b"expect" in fields and self._body_bytes > 0

    def start_reading(self) -> None:
        """The app wants more of the body."""
        self._awaits_100, self._is_read = False, True
        self._move()

    def stop_reading(self, *, at_end: bool) -> None:
        self._is_read = False
        if at_end:
            self._body_bytes = 0

    @property
    def ends(self) -> bool:
        """The answer that starts now is the connection's last one."""
        return self._limits.closing or self._ends or self._awaits_100 or self._body_bytes > _MAX_SKIPPED_BYTES

    def answered(self) -> None:
        """The answer is complete."""
        self._is_called = False
        if not self.is_closing:
            self._wait(_REST_S)
            self._move()

    def has_gone(self) -> bool:
        """Whether the client has closed its end. Knows it before the event loop does."""
        return has_gone(self._sock)

    def drop(self) -> None:
        """Close the connection at once. What the kernel does not take now is lost."""
        self._flush()  # a complete answer may wait for the next turn
        self.is_closing = True
        self.transport.abort()

    # -- for the server ----------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """A request has arrived, and its answer is not complete."""
        return self._is_called and not self.is_closing

    @property
    def awaits_request(self) -> bool:
        """No complete request has arrived."""
        return not self._is_called or self._body_bytes > 0

    @property
    def num_unsent(self) -> int:
        """Bytes of answers that are on their way."""
        return len(self._written) + self._reader.num_unsent

    def look(self) -> None:
        """Call this now and then. Closes the connection if its client does not read, or if reading is paused and the
        client has gone."""
        self._reader.look()
        if self._is_paused and self.has_gone():
            self.drop()

    # -- for uvicorn -------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        if self._is_feeding:  # uvicorn itself answers only what it cannot parse
            self._reject()
        elif not self.is_closing:
            self._started |= not data.startswith(_CONTINUE)
            if not self._written:
                self._loop.call_soon(self._flush)
            self._written += data
            if len(self._written) >= _MOST_WRITTEN_BYTES:
                self._flush()

    def close(self) -> None:
        """Close the connection after everything written has been sent. If the client may still send, this takes up to
        _LINGER_S: what it sends is read and dropped."""
        if self.is_closing:
            return
        self._flush()
        self.is_closing = True
        self._stop_waiting()
        if not self._held and not self._body_bytes:
            self.transport.close()
            return
        self._held.clear()
        self._resume()
        if self.transport.can_write_eof():  # not with TLS: there the client knows the end by the answer's length
            self.transport.write_eof()
        self._loop.call_later(_LINGER_S, self.transport.close)

    # -- inside ------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Send what uvicorn has written."""
        if self._written and not self.transport.is_closing():
            self.transport.write(bytes(self._written))
        self._written.clear()

    def _move(self) -> None:
        """Give uvicorn what it may have now."""
        while self._held and not self.is_closing:
            if not self._is_called and not self._body_bytes:
                if not self._give_head():
                    break
            elif not self._body_bytes or not (self._is_read or not self._is_called):
                break
            elif self._body_bytes == math.inf:
                self._give(_CHUNKED_PIECE_BYTES)
                self._loop.call_soon(self._move)  # after the app has seen this piece, perhaps the last one
                break
            else:
                given = min(len(self._held), int(self._body_bytes))
                self._body_bytes -= given
                self._give(given)
        if len(self._held) < _MAX_HEAD_BYTES:
            self._resume()
        elif not self._is_paused and not self.is_closing:
            self._is_paused = True
            self.transport.pause_reading()

    def _give_head(self) -> bool:
        """Give uvicorn the head if it is complete. Answer with an error if the data cannot become a valid head. Returns
        whether uvicorn got a head."""
        if self._held[0] in b"\r\n":  # empty lines begin no request
            self._held = self._held.lstrip(b"\r\n")
        if self._held and not self._began:
            self._began = True
            self._wait(self._limits.head_timeout_s)
        if self._held and _REQUEST_LINE.match(self._held[:20]) is None:
            self._reject()  # uvicorn would hold what its parser takes for a head, without a limit
            return False
        end = _HEAD_END.search(self._held, max(self._num_searched - 3, 0), _MAX_HEAD_BYTES)
        self._num_searched = 0 if end is not None else len(self._held)
        if end is None:
            if len(self._held) >= _MAX_HEAD_BYTES:
                message = f"the request line and headers are larger than {_MAX_HEAD_BYTES} bytes"
                self._answer(ApiError(431, message, code="invalid_http"))
            return False
        head = _OFFER.sub(b"\nx-upgrade: ignored\r", self._held[: end.end()])
        del self._held[: end.end()]
        self._began, self._is_called, self._started = False, True, False
        self._feed(head)
        return True

    def _give(self, num_bytes: int) -> None:
        data = bytes(self._held[:num_bytes])
        del self._held[:num_bytes]
        self._feed(data)

    def _feed(self, data: bytes) -> None:
        self._is_feeding = True
        try:
            self._uvicorn.data_received(data)
        finally:
            self._is_feeding = False

    def _resume(self) -> None:
        if self._is_paused and not self.transport.is_closing():
            self._is_paused = False
            self.transport.resume_reading()

    def _drop(self, num_bytes: int) -> None:
        """Pause after a large read of dropped data. Otherwise a fast sender would occupy the event loop."""
        if num_bytes >= _LARGE_READ_BYTES and not self.transport.is_closing():
            self._is_paused = True
            self.transport.pause_reading()
            self._loop.call_later(_DROP_PAUSE_S, self._resume)

    def _wait(self, seconds: float) -> None:
        self._stop_waiting()
        self._timer = self._loop.call_later(seconds, self._is_late)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _is_late(self) -> None:
        if self._began or self._is_called:
            message = f"the headers did not arrive within {self._limits.head_timeout_s:g} s"
            self._answer(ApiError(408, message, code="request_timeout"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer and close without waiting for the client: thousands per second may come."""
        self.is_closing = True
        with contextlib.suppress(OSError):  # no data has come yet
            os.read(self._sock.fileno(), _LARGE_READ_BYTES)  # else a close would make the kernel discard the answer
        self.transport.write(last_answer(error))
        self.transport.close()

    def _reject(self) -> None:
        self._answer(ApiError(400, "Invalid HTTP request received.", code="invalid_http"))

    def _answer(self, error: ApiError) -> None:
        """Answer instead of the app, and close. An answer that has begun is cut off."""
        has_answer = self._started if self._is_called else self._body_bytes > 0
        self._flush()  # the answer to the request before
        if not self.is_closing and not has_answer:
            self.transport.write(last_answer(error))
        self._body_bytes = math.inf  # unknown
        self.close()


class Connections:
    """The open connections, and their limits."""

    closing = False  # each connection ends after its next answer

    def __init__(self, most: int, most_per_client: int, head_timeout_s: float) -> None:
        self.most, self.head_timeout_s = most, head_timeout_s
        self.open: set[HttpConnection] = set()
        self.counts = ConnectionCounts(most_per_client)

    def enter(self, connection: HttpConnection) -> ApiError | None:
        """Add a connection. Returns why it has to be refused. Call leave() in either case, when it has ended."""
        self.open.add(connection)
        if not self.counts.enter(connection.client):
            connection.counts = False
            limit = f"{self.counts.most} connections, and may have no more (--max-connections-per-client)"
            return ApiError(429, f"your address has {limit}", code="too_many_connections")
        if len(self.open) > self.most and not self._evict(connection.client):
            message = f"the server has {self.most} connections, and takes no more"
            return ApiError(503, message, code="too_many_connections")
        return None

    def leave(self, connection: HttpConnection) -> None:
        """A connection has ended."""
        self.open.discard(connection)
        if connection.counts:
            self.counts.leave(connection.client)

    def _evict(self, but: str) -> bool:
        """Close a connection that waits for a request and has sent its answers, of the client with the most
        connections. False if there is no such connection, or if the client `but` has as many."""
        client = self.counts.largest(but=but)
        for connection in self.open:
            is_theirs = connection.client == client and not connection.transport.is_closing()
            if is_theirs and connection.awaits_request and not connection.num_unsent:
                connection.drop()
                return True
        return False


class Edge:
    """The outermost ASGI layer. Tells each HttpConnection how far its request has got."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: HttpConnection = scope["state"].pop(CONNECTION)
        scope[CONNECTION] = connection
        connection.called(scope["headers"])

        async def read() -> Message:
            connection.start_reading()
            message: Message = {}
            try:
                message = await receive()
            finally:
                connection.stop_reading(at_end=message.get("type") == "http.request" and not message["more_body"])
            return message

        async def write(message: Message) -> None:
            if message["type"] == "http.response.start" and connection.ends:
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                connection.answered()

        await self._app(scope, read, write)


def last_answer(error: ApiError) -> bytes:
    """An error answer, after which the connection is closed."""
    body = orjson.dumps(error.body())
    status = f"{error.status} {HTTPStatus(error.status).phrase}"
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return b"%scontent-length: %d\r\n\r\n%s" % (head.encode(), len(body), body)
