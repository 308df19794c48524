"""Closes the connections of clients that do not read their answers."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import sys
import termios

from services.runtime.logs import get_logger

_log = get_logger(__name__)

# How many checks without progress close a connection. The checks spread over the send timeout. Checks are counted, not
# seconds, so that a gateway that was stalled itself does not close connections.
LOOKS = 8
# The offset of tcpi_bytes_acked, 64 bits, in Linux's struct tcp_info (include/uapi/linux/tcp.h).
_BYTES_ACKED = 120


class Reader:
    """Checks the reading progress of one connection's client."""

    __slots__ = ("_idle_looks", "_is_tls", "_sock", "_taken", "_transport")

    def __init__(self, sock: socket.socket, transport: asyncio.Transport) -> None:
        self._sock, self._transport = sock, transport
        self._is_tls = transport.get_extra_info("sslcontext") is not None
        # At the last check: the acknowledged bytes. If the system does not report them: the number of unsent bytes,
        # negated, so that it also grows as the client reads. None: no data waited.
        self._taken: int | None = None
        self._idle_looks = 0

    @property
    def num_unsent(self) -> int:
        """Bytes that wait in the server. With TLS, encrypted bytes wait in a transport below, which cannot be seen; but
        then the kernel's buffer is not empty either, so its bytes count as well."""
        num_bytes = self._transport.get_write_buffer_size()
        return num_bytes + _num_in_kernel(self._sock) if self._is_tls else num_bytes

    def look(self) -> None:
        """Close the connection after LOOKS checks in which the client has read nothing."""
        num_unsent = self.num_unsent
        if not num_unsent:
            self._taken = None
            return
        # The transport's buffer shrinks only in steps of the kernel's buffer (megabytes), and grows with each write.
        acked = _num_acked(self._sock)
        taken = -num_unsent if acked is None else acked
        self._idle_looks = 0 if self._taken is None or taken > self._taken else self._idle_looks + 1
        self._taken = taken
        if self._idle_looks >= LOOKS:
            _log.info("a client does not read its answer", num_unsent=num_unsent)
            self._transport.abort()


def _num_in_kernel(sock: socket.socket) -> int:
    """How many bytes are in the kernel's send buffer: not sent yet, or not acknowledged by the client. 0 if the system
    does not report it."""
    if sys.platform != "linux":
        return 0
    if sock.fileno() < 0:  # closed; with TLS, a turn of the event loop before the connection hears of it
        return 0
    try:
        answer = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
    except OSError:
        return 0
    num_bytes: int = struct.unpack("=i", answer)[0]
    return num_bytes


def _num_acked(sock: socket.socket) -> int | None:
    """How many bytes the client has acknowledged. None if the system does not report it."""
    if sys.platform != "linux":
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 8)
    except OSError:  # closed
        return None
    if len(info) < _BYTES_ACKED + 8:
        return None
    num_bytes: int = struct.unpack_from("=Q", info, _BYTES_ACKED)[0]
    return num_bytes or None  # 0: not reported. Even a client that reads nothing acknowledges what its kernel buffers
