"""Takes connections in: many at once, and of those that have gone only who asked for little."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable

from services.runtime.logs import get_logger

_log = get_logger(__name__)

# A turn of the event loop takes in so many (each costs some 0.1 ms, and its request as much in the turns that follow),
# or drops so many times as many.
_PER_TURN = 16
_DROPPED = 8
# How long nobody is taken in when the system has no more files or memory for it.
_OUT_OF_FILES_S = 0.5
# The first byte of Linux's struct tcp_info is the state: include/net/tcp_states.h.
_CLOSED_STATES = frozenset({7, 8})  # TCP_CLOSE, TCP_CLOSE_WAIT


def has_gone(sock: socket.socket) -> bool:
    """Whether the other side has closed its end, even if what it had sent before is not read yet. (Who only will not
    send any more is taken to be gone, as everywhere here.) Without Linux, False until a read has told it."""
    if sys.platform != "linux":
        return sock.fileno() < 0
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _CLOSED_STATES
    except OSError:  # closed here as well
        return True


class Listener:
    """Accepts on a listening socket from `start` to `close`, and closes it then.

    uvloop's own server takes one connection in a turn of the event loop. When turns become long, as under load, new
    connections wait behind thousands of others in the kernel, whose clients have given up meanwhile.
    """

    def __init__(
        self,
        sock: socket.socket,
        make_protocol: Callable[[socket.socket], asyncio.Protocol],
        *,
        costly: tuple[bytes, ...] = (),
        on_gone: Callable[[], None] = lambda: None,
    ) -> None:
        """`costly`: beginnings of requests. A connection that has one on it is dropped (and `on_gone` called) if its
        client has gone when it is taken in."""
        self._sock = sock
        self._make_protocol = make_protocol
        self._costly = costly
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._open = False

    def start(self, backlog: int) -> None:
        self._sock.listen(backlog)
        self._open = True
        self._resume()

    def close(self) -> None:
        """Take nobody in from now on. Safe to call again."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._sock)
            self._sock.close()

    async def wait_closed(self) -> None:
        """Until all that were taken in have become connections."""
        if self._opening:
            await asyncio.wait(self._opening)

    def accept_all(self) -> None:
        """Who waits in the kernel would be reset when the listener closes."""
        while self._open and self._accept():
            pass

    def _resume(self) -> None:
        if self._open:
            self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> bool:
        """Whether there may be more."""
        budget = _PER_TURN * _DROPPED
        while budget > 0:
            try:
                connection, _ = self._sock.accept()
            except ConnectionAbortedError:
                continue
            except BlockingIOError:
                return False
            except OSError as error:
                _log.error("cannot take connections", error=str(error))
                self._loop.remove_reader(self._sock)
                self._loop.call_later(_OUT_OF_FILES_S, self._resume)
                return False
            connection.setblocking(False)
            if self._costly and has_gone(connection) and self._is_costly(connection):
                budget -= 1
                self._on_gone()
                connection.close()
                continue
            budget -= _DROPPED
            task = self._loop.create_task(self._connect(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        return True

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: self._make_protocol(connection), connection)
        except OSError:  # gone already
            connection.close()

    def _is_costly(self, connection: socket.socket) -> bool:
        try:
            return connection.recv(max(map(len, self._costly)), socket.MSG_PEEK).startswith(self._costly)
        except OSError:  # reset, or nothing was asked
            return False
