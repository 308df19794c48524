"""Accepts connections: many per event-loop turn, and without costly requests of clients that have gone."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable

from services.runtime.logs import get_logger

_log = get_logger(__name__)

# One event-loop turn accepts this many connections (each costs about 0.1 ms, and its request as much in later turns),
# or drops _DROPPED times as many.
_PER_TURN = 16
_DROPPED = 8
# How long the listener pauses when the system has no file or memory for a connection.
_OUT_OF_FILES_S = 0.5
# The first byte of Linux's struct tcp_info is the state: include/net/tcp_states.h.
_CLOSED_STATES = frozenset({7, 8})  # TCP_CLOSE, TCP_CLOSE_WAIT


def has_gone(sock: socket.socket) -> bool:
    """Whether the client has closed its end, even if data that it sent before is still unread.

    A client that has only shut down its sending side counts as gone, as everywhere in this server. On systems other
    than Linux the answer is False until a read has noticed the close.
    """
    if sys.platform != "linux":
        return sock.fileno() < 0
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _CLOSED_STATES
    except OSError:  # we have closed it
        return True


_LOG_EVERY_S = 10.0
_PEEKED_BYTES = 64 * 1024


def client_of(host: str) -> str:
    """The client that a connection counts for: the IPv4 address, or the /64 network of an IPv6 address."""
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    mapped = address.ipv4_mapped
    return str(mapped) if mapped is not None else f"{ipaddress.IPv6Address(int(address) >> 64 << 64)}/64"


class ConnectionCounts:
    """The number of connections of each client. A client is what client_of() returns for its address."""

    def __init__(self, most: int) -> None:
        """`most`: the limit for one client."""
        self.most = most
        self._counts: Counter[str] = Counter()
        self._logged_s = -_LOG_EVERY_S

    def enter(self, client: str) -> bool:
        """Count one more connection. False if the client is at its limit."""
        if self._counts[client] >= self.most:
            if time.monotonic() - self._logged_s >= _LOG_EVERY_S:
                self._logged_s = time.monotonic()
                _log.warning("a client has reached its connection limit", client=client, connections=self.most)
            return False
        self._counts[client] += 1
        return True

    def leave(self, client: str) -> None:
        """A connection of this client has ended."""
        self._counts[client] -= 1
        if not self._counts[client]:
            del self._counts[client]

    def largest(self, but: str) -> str | None:
        """The client with the most connections. None if that is `but`, or if `but` has as many."""
        [(client, count)] = self._counts.most_common(1) or [("", 0)]
        return client if count > self._counts[but] else None


class Listener:
    """Accepts connections on a listening socket from `start` to `close`, and closes the socket then.

    uvloop's own server accepts one connection per event-loop turn. When turns become long under load, new connections
    wait in the kernel behind thousands of connections that their clients have given up.
    """

    def __init__(
        self,
        sock: socket.socket,
        make_protocol: Callable[[socket.socket, str], asyncio.Protocol],
        clients: ConnectionCounts,
        *,
        refusal: bytes = b"",
        costly: tuple[bytes, ...] = (),
        on_gone: Callable[[], None] = lambda: None,
    ) -> None:
        """`make_protocol`: makes the protocol of a connection and its client. The protocol calls `clients.leave` when
        the connection ends.

        `refusal`: the answer to a client with too many connections. `costly`: how costly requests begin. A connection
        with such a request is dropped (and `on_gone` called) if its client has gone before it is accepted.
        """
        self._sock = sock
        self._make_protocol = make_protocol
        self._clients = clients
        self._refusal = refusal
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
        """Accept no more connections. Safe to call again."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._sock)
            self._sock.close()

    async def wait_closed(self) -> None:
        """Wait until each accepted connection has its protocol."""
        if self._opening:
            await asyncio.wait(self._opening)

    def accept_all(self) -> None:
        """Accept every waiting connection. The kernel resets waiting connections when the listener closes."""
        while self._open and self._accept():
            pass

    def _resume(self) -> None:
        if self._open:
            self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> bool:
        """Accept for one turn. Returns whether more connections may wait."""
        budget = _PER_TURN * _DROPPED
        while budget > 0:
            try:
                connection, address = self._sock.accept()
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
            client = client_of(address[0])
            if not self._clients.enter(client):
                budget -= 1
                self._refuse(connection)
                continue
            budget -= _DROPPED
            task = self._loop.create_task(self._connect(connection, client))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        return True

    async def _connect(self, connection: socket.socket, client: str) -> None:
        protocol = self._make_protocol(connection, client)
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, connection)
        except OSError:  # the client has gone
            self._clients.leave(client)
            connection.close()

    def _refuse(self, connection: socket.socket) -> None:
        """Answer without a protocol and without waiting for the client: thousands per second may come."""
        with contextlib.suppress(OSError):  # no data has come yet
            connection.recv(_PEEKED_BYTES)  # a close with unread data would make the kernel discard the answer
        with contextlib.suppress(OSError):
            connection.send(self._refusal)
        connection.close()

    def _is_costly(self, connection: socket.socket) -> bool:
        try:
            return connection.recv(max(map(len, self._costly)), socket.MSG_PEEK).startswith(self._costly)
        except OSError:  # reset, or no data yet
            return False
