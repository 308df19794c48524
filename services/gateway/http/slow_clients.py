"""Gives up clients that do not read their answers."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys

from services.runtime.logs import get_logger

_log = get_logger(__name__)

# While an answer waits to be read it is looked so often whether any of it was, in the time that this may take. (Looks
# are counted, not seconds: a gateway that was stalled itself must not judge others.)
LOOKS = 8
# Linux's struct tcp_info, include/uapi/linux/tcp.h: where the 64 bits of tcpi_bytes_acked are.
_BYTES_ACKED = 120


class Reader:
    """The client of one connection."""

    __slots__ = ("_idle_looks", "_sock", "_taken", "_transport")

    def __init__(self, sock: socket.socket, transport: asyncio.Transport) -> None:
        self._sock, self._transport = sock, transport
        self._taken: int | None = None  # by the last look; None: nothing was to be read
        self._idle_looks = 0

    def look(self) -> None:
        """Give it up if it has read nothing of what waits for it by so many looks."""
        num_unsent = self._transport.get_write_buffer_size()
        if not num_unsent:
            self._taken = None
            return
        # What the transport holds moves in steps of what the kernel does, megabytes, and grows with what is written.
        acked = _num_acked(self._sock)
        taken = -num_unsent if acked is None else acked
        self._idle_looks = 0 if self._taken is None or taken > self._taken else self._idle_looks + 1
        self._taken = taken
        if self._idle_looks >= LOOKS:
            _log.info("a client does not read its answer", num_unsent=num_unsent)
            self._transport.abort()


def _num_acked(sock: socket.socket) -> int | None:
    """How many bytes the other side has taken. None where the system does not tell."""
    if sys.platform != "linux":
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 8)
    except OSError:  # closed
        return None
    if len(info) < _BYTES_ACKED + 8:
        return None
    num_bytes: int = struct.unpack_from("=Q", info, _BYTES_ACKED)[0]
    return num_bytes or None  # who has taken nothing has at least taken what its kernel had room for
