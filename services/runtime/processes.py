"""What processes of a machine share: the folder of the user's state, and cores. Also tells whether a process still
runs, for files that name the process which wrote them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def state_folder() -> Path:
    """$XDG_STATE_HOME/paceline (~/.local/state/paceline by default). Raises OSError if the user has no home."""
    state = os.environ.get("XDG_STATE_HOME", "")
    try:
        home = Path(state) if os.path.isabs(state) else Path("~/.local/state").expanduser()
    except RuntimeError as error:
        raise OSError(str(error)) from error
    return home / "paceline"


def started(pid: int) -> str:
    """When the process started, in kernel ticks since the boot. Empty if it does not run. On systems other than Linux,
    "unknown" for every process that runs."""
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


def usable_cores() -> int:
    """Cores that the system lets this process run on; all cores where the system does not tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def core_quota(root: Path = Path("/")) -> float | None:
    """The smallest CPU limit of this process's control groups, in cores. None: no limit. Sources: cpu.max of
    cgroup-v2.rst, cpu.cfs_quota_us of scheduler/sched-bwc.rst."""
    return min(_quotas(root), default=None)


def _quotas(root: Path) -> Iterator[float]:
    try:
        lines = (root / "proc/self/cgroup").read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        if line.count(":") < 2:
            continue
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        group = mount / path.lstrip("/")
        while group != mount.parent:
            limit = _v1_limit(group) if controllers else _v2_limit(group)
            if limit is not None:
                yield limit
            group = group.parent


def _v2_limit(group: Path) -> float | None:
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _v1_limit(group: Path) -> float | None:
    try:
        quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return quota / period if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def whole_cores() -> int:
    """Cores that this process can use at the same time, at least 1: of its control groups' CPU limit only whole
    ones."""
    cores, quota = usable_cores(), core_quota()
    return cores if quota is None else min(cores, max(1, int(quota)))


# A worker of a model this large or larger is faster with both cores of a machine that has two (docs/adr/0001).
LARGE_WEIGHTS_BYTES = 32 * 2**20


def default_threads(weights_bytes: int = 0, local_workers: int = 1) -> int:
    """The threads of each worker on a CPU without --threads: one core is for the other services, unless the model is
    large and the machine has two cores. Several workers share all cores, because their waiting threads spin. A control
    group with a CPU limit counts as a machine with that many whole cores."""
    cores = whole_cores()
    if local_workers > 1:
        return max(1, cores // local_workers)
    return cores if cores == 2 and weights_bytes >= LARGE_WEIGHTS_BYTES else max(1, cores - 1)
