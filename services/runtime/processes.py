"""Tells whether a process that wrote a file still runs."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def started(pid: int) -> str:
    """When the process started, in kernel ticks since the boot. Empty if it does not run."""
    try:
        # The process name, in parentheses, may contain spaces and parentheses.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except FileNotFoundError:
        pass
    except (OSError, IndexError):
        return ""
    if Path("/proc/self/stat").exists():
        return ""
    try:  # not Linux
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except OSError:
        pass
    return "unknown"


def machine() -> str:
    """The boot and the pid namespace, within which a pid is unique."""
    parts = []
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)
