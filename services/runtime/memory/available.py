"""How much more memory this process may use, and how often the kernel killed a process for lack of memory.

Sources: /proc/meminfo (proc(5)), control groups version 2 (memory.max, memory.current, memory.stat, memory.events) and
version 1 (memory.limit_in_bytes, memory.usage_in_bytes, memory.stat, memory.oom_control), as the kernel's
admin-guide/cgroup-v2.rst and admin-guide/cgroup-v1/memory.rst document them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KIB, GIB = 2**10, 2**30
# Version 1 shows "no limit" as the largest multiple of the page size below 2^63.
_V1_UNLIMITED_BYTES = 2**62


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """How much more memory this process may use."""

    num_bytes: int
    limit: str  # the name of the limit, for an error message


@dataclass(frozen=True, slots=True)
class _Version:
    """The file names of one version of control groups."""

    limit: str
    usage: str
    reclaimable: str  # the line of memory.stat: file cache that the kernel drops first
    events: str  # the file with the line "oom_kill N"


_V2 = _Version("memory.max", "memory.current", "inactive_file", "memory.events")
_V1 = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control")


def available_memory(root: Path = Path("/")) -> AvailableMemory | None:
    """The smallest of what the machine and each control group of this process still allow. None if it is unknown.

    `root`: the folder that holds `proc` and `sys` (tests).
    """
    found = []
    meminfo = _fields(root / "proc/meminfo")
    if "MemAvailable" in meminfo:
        found.append(AvailableMemory(KIB * meminfo["MemAvailable"], "the machine's memory"))
    for version, group in _groups(root):
        limit_bytes, used_bytes = _number(group / version.limit), _number(group / version.usage)
        if limit_bytes is None or used_bytes is None or limit_bytes >= _V1_UNLIMITED_BYTES:
            continue
        reclaimable_bytes = _fields(group / "memory.stat").get(version.reclaimable, 0)
        left_bytes = max(0, limit_bytes - used_bytes + reclaimable_bytes)
        found.append(AvailableMemory(left_bytes, f"a cgroup limit of {limit_bytes / GIB:.1f} GiB"))
    return min(found, key=lambda available: available.num_bytes, default=None)


def oom_kills(root: Path = Path("/")) -> int | None:
    """The number of processes that the kernel killed for lack of memory: in the control group of this process, or else
    on the machine.

    This is a counter; compare two readings. None if the system does not count.
    """
    for version, group in _groups(root):
        if (count := _fields(group / version.events).get("oom_kill")) is not None:
            return count
    return _fields(root / "proc/vmstat").get("oom_kill")


def _groups(root: Path) -> Iterator[tuple[_Version, Path]]:
    """The memory control groups of this process, innermost first."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        mounts: tuple[Path, ...]
        if not controllers:
            version, mounts = _V2, (root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified")
        elif "memory" in controllers.split(","):
            version, mounts = _V1, (root / "sys/fs/cgroup/memory",)
        else:
            continue
        for mount in mounts:
            # A container may see the host's path, which does not exist below its own mount.
            group = mount / path.lstrip("/")
            while group != mount.parent:
                if (group / version.usage).exists() or (group / version.events).exists():
                    yield version, group
                group = group.parent


def _fields(path: Path) -> dict[str, int]:
    """Lines like "name 12" or "name: 12 kB". Empty for a file that cannot be read."""
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _number(path: Path) -> int | None:
    """None for "max" and for a file that cannot be read."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
