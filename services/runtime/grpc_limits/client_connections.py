"""A limit of the gRPC connections of one client.

gRPC accepts connections itself and knows no limit per client, only one for all. So ClientConnections looks at the
sockets of the process, and shuts down the connections of a client above its limit. To gRPC it looks as if the client
had closed them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from services.runtime.clients import client_of
from services.runtime.logs import get_logger

_log = get_logger(__name__)

# The time between two looks: short after one that has found too many connections. A look takes about 5 us of CPU for
# each open file, and at most 5 % of the time.
_CALM_S, _BUSY_S, _MAX_SHARE = 1.0, 0.1, 0.05
_LOG_EVERY_S = 10.0
_FILES = "/dev/fd"
_Peer = tuple[str, int]  # a client's address and port


class ClientConnections:
    """Bounds the connections of each client to one port of this process."""

    def __init__(self, port: int, most: int) -> None:
        """`most`: the limit for one client. Connections belong to one client if client_of() returns the same for their
        addresses."""
        self._port, self._most = port, most
        self._known: set[_Peer] = set()  # of the last look
        self._logged_s = -_LOG_EVERY_S

    async def watch(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            began_s, num_closed = time.monotonic(), 0
            try:
                num_closed = await asyncio.to_thread(self.close_surplus)
            except OSError as error:  # no file descriptor is free to list the connections
                self._warn("the limit of gRPC connections of a client is not watched", error=str(error))
            spent_s = time.monotonic() - began_s
            await asyncio.sleep(max(_BUSY_S if num_closed else _CALM_S, spent_s / _MAX_SHARE))

    def close_surplus(self) -> int:
        """Shut down the surplus connections of each client. Returns how many.

        Connections that the last call kept are the first to stay. If the process has at most `most` open files, the
        call examines none of them, and the next call takes all connections as new.
        """
        files = os.listdir(_FILES)
        if len(files) <= self._most:  # no client can have too many
            self._known.clear()
            return 0
        of_client: defaultdict[str, list[tuple[_Peer, int]]] = defaultdict(list)
        for name in files:
            with _open(int(name)) as connection:
                if connection is not None and (peer := self._peer(connection)) is not None:
                    of_client[client_of(peer[0])].append((peer, int(name)))
        num_closed, known = 0, set()
        for client, connections in of_client.items():
            connections.sort(key=lambda each: each[0] not in self._known)  # the kept ones first
            known |= {peer for peer, _ in connections[: self._most]}
            surplus = connections[self._most :]
            num_closed += sum(self._shut_down(peer, file) for peer, file in surplus)
            if surplus:
                self._warn("a client has reached its limit of gRPC connections", client=client, connections=self._most)
        self._known = known
        return num_closed

    def _peer(self, connection: socket.socket) -> _Peer | None:
        """The client's address and port. None for another socket than a connection to the port."""
        try:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.getsockname()[1] != self._port:
                return None
            host, port, *_ = connection.getpeername()
        except OSError:  # it listens, or has ended
            return None
        return host, port

    def _shut_down(self, peer: _Peer, file: int) -> bool:
        with _open(file) as connection:
            if connection is None or self._peer(connection) != peer:  # closed since
                return False
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            return True

    def _warn(self, what: str, **details: Any) -> None:
        if time.monotonic() - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = time.monotonic()
            _log.warning(what, **details)


@contextlib.contextmanager
def _open(file: int) -> Iterator[socket.socket | None]:
    """The socket of a file descriptor, which stays open. None if the descriptor is not a socket.

    It does not duplicate the descriptor. If the descriptor is a file of SQLite by now, closing a duplicate would
    release the process's locks on that file.
    """
    try:
        is_socket = stat.S_ISSOCK(os.fstat(file).st_mode)
        borrowed = socket.socket(fileno=file) if is_socket else None
    except OSError:  # closed since
        borrowed = None
    try:
        yield borrowed
    finally:
        if borrowed is not None:
            borrowed.detach()
