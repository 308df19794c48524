"""Claims of memory that the workers of this machine have yet to fill.

Memory that a worker needs, and has not filled yet, still counts as free. So each worker writes what it needs to a file
before it allocates anything, and subtracts the claims of the others. Files of ended processes do not count.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

from services.runtime.logs import get_logger
from services.runtime.memory.available import GIB, KIB, AvailableMemory, available_memory
from services.runtime.processes import machine, started

_log: structlog.stdlib.BoundLogger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Claim:
    pid: int
    started: str
    machine: str
    num_bytes: int
    before_bytes: int  # memory that the process used when it claimed

    @property
    def left_bytes(self) -> int:
        """Bytes of the claim that the process has yet to fill."""
        return max(0, self.num_bytes - (_used_bytes(self.pid) - self.before_bytes))

    @property
    def holds(self) -> bool:
        return self.machine == machine() and started(self.pid) == self.started


class MemoryClaims:
    """The claims of other processes, and this one's, under a lock: see lock()."""

    def __init__(self, folder: Path | None) -> None:
        """`folder`: the folder of the claims. None if it cannot be written: then no other claim is known."""
        self._folder = folder

    def available(self) -> AvailableMemory | None:
        """Memory that this process may still take. None if it is unknown."""
        available, claimed = available_memory(), self._claimed_by_others()
        if available is None or not claimed:
            return available
        limit = f"{available.limit}, less {claimed / GIB:.1f} GiB that other workers have yet to fill"
        return AvailableMemory(max(0, available.num_bytes - claimed), limit)

    def claim(self, num_bytes: int) -> None:
        """Claim this many bytes beyond what the process uses now. Replaces its earlier claim."""
        claim = _Claim(os.getpid(), started(os.getpid()), machine(), num_bytes, _used_bytes(os.getpid()))
        if self._folder is not None:
            try:
                (self._folder / f"{claim.pid}.json").write_text(json.dumps(asdict(claim)), encoding="utf-8")
            except OSError as error:  # a full disk
                _log.warning("other workers do not know how much memory this worker will take", reason=str(error))

    def _claimed_by_others(self) -> int:
        total = 0
        for path in self._folder.glob("*.json") if self._folder is not None else ():
            claim = _read(path)
            if claim is None or (claim.machine == machine() and not claim.holds):
                with contextlib.suppress(OSError):
                    path.unlink()
            elif claim.pid != os.getpid() and claim.holds:
                total += claim.left_bytes
        return total


def default_folder() -> Path:
    """The folder of this user's claims, in the folder for temporary files, which containers do not share."""
    return Path(tempfile.gettempdir()) / f"paceline-memory-{os.getuid()}"


@contextlib.contextmanager
def lock() -> Iterator[MemoryClaims]:
    """No other process of this user checks or claims memory while the block runs.

    If the folder cannot be written, as in a container of one worker with a read-only disk, or if another user may
    change it, nothing is locked, and the claims of other processes are not known.
    """
    with contextlib.ExitStack() as stack:
        folder: Path | None = None
        try:
            folder = default_folder()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_owner(folder)
            file = stack.enter_context(open(folder / "lock", "w", encoding="utf-8"))
            fcntl.flock(file, fcntl.LOCK_EX)  # ends with the file, or with the process
        except OSError as error:
            # A read-only disk is the operator's choice. A missing permission is a mistake, which needs a warning.
            log = _log.warning if isinstance(error, PermissionError) else _log.info
            log("it is not known how much memory other workers will take", reason=str(error))
            folder = None
        yield MemoryClaims(folder)


def _check_owner(folder: Path) -> None:
    """Raises PermissionError if the folder is another user's, or open to other users, or a link. Another user could
    have made it, with links in it to files of this user, which would be overwritten."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{folder} is not a folder of this user alone (mode 700)")


def _read(path: Path) -> _Claim | None:
    try:
        claim = _Claim(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    are_numbers = all(type(number) is int for number in (claim.pid, claim.num_bytes, claim.before_bytes))
    return claim if are_numbers else None


def _used_bytes(pid: int) -> int:
    """Memory that the kernel cannot drop. 0 if it is unknown."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(KIB * int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
