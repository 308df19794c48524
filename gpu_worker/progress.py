"""What a person sees while weights are read: a bar on a terminal, a line every tenth otherwise. On stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from gpu_worker.models.loader import Progress as Report

# A load that takes less needs no lines.
_QUIET_S = 1.0


@contextmanager
def load_progress(model: str) -> Iterator[Report]:
    """A callback for load_model()."""
    if not sys.stderr.isatty():
        yield _line_report(model)
        return
    columns = (TextColumn("loading {task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(model, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _line_report(model: str) -> Report:
    began = time.monotonic()
    last_tenth = 0

    def report(done: int, total: int) -> None:
        nonlocal last_tenth
        tenth = 10 * done // max(total, 1)
        if tenth > last_tenth and time.monotonic() - began > _QUIET_S:
            last_tenth = tenth
            print(f"loading {model}: {10 * tenth} % of {total / 2**20:.0f} MiB", file=sys.stderr, flush=True)

    return report
