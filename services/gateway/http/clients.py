"""Clients of connections: how many connections each has, and whether it has gone."""

from __future__ import annotations

import socket
import sys
import time
from collections import Counter

from services.runtime.logs import get_logger

_log = get_logger(__name__)

_LOG_EVERY_S = 10.0
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
