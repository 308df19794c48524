"""The peak memory of a server's processes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil

SAMPLE_S = 0.25


class PeakMemory:
    """The most memory that these processes and their children have taken together in a sample: `num_bytes`. A page that
    several processes share counts once (proportional set size)."""

    def __init__(self, roots: Callable[[], Iterable[int]]) -> None:
        self.num_bytes = 0
        self._roots = roots

    def sample(self) -> None:
        pids: set[int] = set()
        for root in self._roots():
            with contextlib.suppress(psutil.NoSuchProcess):
                pids |= {root, *(child.pid for child in psutil.Process(root).children(recursive=True))}
        self.num_bytes = max(self.num_bytes, sum(map(pss_bytes, pids)))

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Samples every SAMPLE_S seconds, and at the end. A sample takes some ms, so nothing is timed meanwhile."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(SAMPLE_S):
                self.sample()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
        self.sample()


def pss_bytes(pid: int) -> int:
    """The process's proportional set size; 0 for a process that has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(1024 * int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
