"""TLS of HTTP connections: accepts them, limits handshakes, and takes new certificates while running."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any

from services.gateway.errors import ApiError
from services.gateway.http.connection import HttpConnection, last_answer
from services.runtime.logs import get_logger
from services.runtime.tls.credentials import server_context
from services.runtime.tls.files import TlsError, TlsFiles

_log = get_logger(__name__)

# How long a connection that the server closes may wait until the client ends TLS (close_notify).
_SHUTDOWN_S = 5.0
# Unsent bytes at which the app has to wait: as without TLS. asyncio's default with TLS is 512 KiB.
_HIGH_WATER_BYTES = 64 * 1024
_ACCEPTED_PER_TURN = 8
# Errors of accept() that need time: too many open files, or no memory.
_EXHAUSTED, _EXHAUSTED_PAUSE_S = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}), 1.0
_LOG_EVERY_S = 10.0
# At most this many handshakes at once can tell a client that it speaks plain HTTP. Each needs one more open file.
_MAX_TOLD = 64
_PLAIN_HTTP = ("HTTP_REQUEST", "HTTPS_PROXY_REQUEST")  # OpenSSL's reasons
_ANSWER = last_answer(ApiError(400, "this port speaks HTTPS only", code="needs_tls"))


class ServerTls:
    """The TLS context of new connections."""

    def __init__(self, files: TlsFiles, handshake_timeout_s: float) -> None:
        """Raises TlsError."""
        self.handshake_timeout_s = handshake_timeout_s
        self._files = files
        self._certificates = files.current()
        self._context = server_context(files)

    def context(self) -> ssl.SSLContext:
        """The context with the newest certificates that can be used."""
        if (certificates := self._files.current()) is not self._certificates:
            try:
                self._context, self._certificates = server_context(self._files), certificates
            except TlsError as error:  # the files have just changed again: the next connection tries again
                _log.warning("the new certificates cannot be used yet", reason=str(error))
        return self._context


class TlsListener:
    """Accepts connections of a listening socket, and does their handshakes.

    A connection counts from its beginning. A handshake takes about 1 ms of CPU, so a connection above the limits is
    closed without one, and without an answer. uvicorn's own listener would count connections after their handshakes:
    any number of clients without a handshake could take all open files.
    """

    def __init__(self, sock: socket.socket, tls: ServerTls, make_connection: Callable[[], HttpConnection]) -> None:
        """`sock`: it is non-blocking, and listens."""
        self._sock, self._tls, self._make_connection = sock, tls, make_connection
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._num_told = 0
        self._num_failed, self._noted_s = 0, -_LOG_EVERY_S  # failures since the last log line, and its time
        self._resuming: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._loop.add_reader(sock.fileno(), self._accept)

    def close(self) -> None:
        """Accept no more connections. Handshakes go on."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._sock.fileno())
            if self._resuming is not None:
                self._resuming.cancel()

    def abort(self) -> None:
        """End all handshakes."""
        self.close()
        for task in self._handshakes:
            task.cancel()

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_PER_TURN):
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                _log.error("cannot accept a connection", reason=error.strerror)
                self._loop.remove_reader(self._sock.fileno())
                self._resuming = self._loop.call_later(_EXHAUSTED_PAUSE_S, self._resume)
                return
            self._begin(sock)

    def _resume(self) -> None:
        self._loop.add_reader(self._sock.fileno(), self._accept)

    def _begin(self, sock: socket.socket) -> None:
        connection, pending = self._make_connection(), _Pending(sock)
        if connection.enter(pending) is not None:
            connection.leave()
            sock.close()
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pending.task = self._loop.create_task(self._shake(sock, connection))
        self._handshakes.add(pending.task)
        pending.task.add_done_callback(partial(self._ended, sock, connection))

    async def _shake(self, sock: socket.socket, connection: HttpConnection) -> None:
        told = self._keep_open(sock)
        try:
            # Calls connection_made() after the handshake.
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: connection,
                sock,
                ssl=self._tls.context(),
                ssl_handshake_timeout=self._tls.handshake_timeout_s,
                ssl_shutdown_timeout=_SHUTDOWN_S,
            )
            transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES)
        except OSError as error:  # no certificate, plain text, gone, too late (ssl.SSLError is an OSError, too)
            reason = getattr(error, "reason", None) or str(error) or type(error).__name__
            self._note_failure(connection.client, reason)
            if told is not None and reason in _PLAIN_HTTP:
                with contextlib.suppress(OSError):
                    os.write(told, _ANSWER)
        finally:
            if told is not None:
                self._num_told -= 1
                os.close(told)

    def _ended(self, sock: socket.socket, connection: HttpConnection, task: asyncio.Task[None]) -> None:
        self._handshakes.discard(task)
        if not connection.is_open:
            connection.leave()
            sock.close()  # the task may have been cancelled before its beginning

    def _note_failure(self, client: str, reason: str) -> None:
        self._num_failed += 1
        if self._loop.time() - self._noted_s >= _LOG_EVERY_S:
            _log.info("TLS handshakes failed", num_failed=self._num_failed, last_client=client, last_reason=reason)
            self._num_failed, self._noted_s = 0, self._loop.time()

    def _keep_open(self, sock: socket.socket) -> int | None:
        """A second file descriptor of the socket, which stays open when a failed handshake closes the first. None at
        the limit _MAX_TOLD, or without a free descriptor."""
        if self._num_told >= _MAX_TOLD:
            return None
        try:
            told = os.dup(sock.fileno())
        except OSError:
            return None
        self._num_told += 1
        return told


class _Pending(asyncio.Transport):
    """The transport of a connection during its handshake."""

    task: asyncio.Task[None] | None = None

    def __init__(self, sock: socket.socket) -> None:
        try:
            peer: Any = sock.getpeername()
        except OSError:  # gone already
            peer = None
        super().__init__({"socket": sock, "peername": peer})

    def abort(self) -> None:
        if self.task is not None:
            self.task.cancel()

    def close(self) -> None:
        self.abort()

    def is_closing(self) -> bool:
        return self.task is not None and self.task.cancelling() > 0

    def get_write_buffer_size(self) -> int:
        return 0
