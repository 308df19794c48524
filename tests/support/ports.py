"""Ports of loopback for services under test."""

from __future__ import annotations

import os
import socket

# Below the range of which the kernel gives ports to `bind(0)` and to outgoing connections: one that is found free
# here stays free until its service binds it, also across a kill and a restart.
_PORTS = iter(range(20_000 + os.getpid() * 97 % 8_000, 32_000))


def free_port() -> int:
    """A port of loopback that nothing listens on, and that no earlier call of this process returned."""
    for port in _PORTS:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port below 32000")
