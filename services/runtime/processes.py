"""What processes of a machine share: the folder of the user's state, and cores. Also tells whether a process still
runs, for files that name the process which wrote them."""

from __future__ import annotations

import contextlib
import os
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


# A worker of a model this large or larger is faster with both cores of a machine that has two (docs/adr/0001).
LARGE_WEIGHTS_BYTES = 32 * 2**20


def default_threads(weights_bytes: int = 0, local_workers: int = 1) -> int:
    """The threads of each worker on a CPU without --threads: one core is for the other services, unless the model is
    large and the machine has two cores. Several workers share all cores, because their waiting threads spin."""
    cores = usable_cores()
    if local_workers > 1:
        return max(1, cores // local_workers)
    return cores if cores == 2 and weights_bytes >= LARGE_WEIGHTS_BYTES else max(1, cores - 1)
