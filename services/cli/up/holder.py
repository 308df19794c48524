"""Finds the process that listens on a port of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from services.cli.servers import running_servers

_LISTENS = "0A"  # the state of a listening socket in /proc/net/tcp


def holder_of(port: int, root: Path = Path("/proc")) -> str:
    """The process that listens on the port; empty if unknown, for example a process of another user."""
    for server in running_servers():
        if server.port == port:
            return f"`paceline up` (process {server.pid})"
    sockets = {f"socket:[{inode}]" for inode in _listening(port, root)}
    for process in root.glob("[0-9]*") if sockets else ():
        try:
            if any(os.readlink(file) in sockets for file in (process / "fd").iterdir()):
                return f"{(process / 'comm').read_text().strip()} (process {process.name})"
        except OSError:  # another user's, or ended meanwhile
            continue
    return ""


def _listening(port: int, root: Path) -> Iterator[str]:
    """The inodes of the sockets that listen on the port."""
    for name in ("tcp", "tcp6"):
        try:
            rows = [line.split() for line in (root / "net" / name).read_text().splitlines()[1:]]
        except OSError:
            continue
        for row in rows:
            if row[3] == _LISTENS and int(row[1].rpartition(":")[2], 16) == port:
                yield row[9]
