"""Ports of loopback for services under test."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path

# Below the range from which the kernel takes ports for `bind(0)` and for outgoing connections: a port that is found
# free here stays free until its service binds it, also across a kill and a restart.
_PORTS = iter(range(20_000 + os.getpid() * 97 % 8_000, 32_000))
# This process locks one file for each port that it gave away, until it ends. Without the lock another test process
# would find a port free that is not bound yet, or that a service is about to bind again.
_FOLDER = Path(tempfile.gettempdir()) / f"paceline-ports-{os.getuid()}"
_LOCKS: list[int] = []


def free_port() -> int:
    """A loopback port on which nothing listens. No test process that still runs has got this port from this
    function."""
    for port in _PORTS:
        if not _is_ours(port):
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port below 32000")


def _is_ours(port: int) -> bool:
    _FOLDER.mkdir(exist_ok=True)
    file = os.open(_FOLDER / str(port), os.O_RDWR | os.O_CREAT, 0o600)  # children do not inherit it
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return False
    _LOCKS.append(file)
    return True
