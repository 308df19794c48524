"""Shows the progress of reading weights and capturing CUDA graphs on stderr: a bar on a terminal, otherwise a first
line after a second, then a line per tenth, or every five seconds if a tenth takes longer."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TransferSpeedColumn

from gpu_worker.models.loader import Progress as Report
from gpu_worker.steps.graphs import CaptureProgress

# A shorter load prints no lines.
_QUIET_S = 1.0
# Without a terminal, a tenth of a large load may take minutes. Then there is a line after this time.
_LINE_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Reports:
    """Callbacks for build_worker()."""

    load: Report
    capture: CaptureProgress


@contextmanager
def build_progress(model: str) -> Iterator[Reports]:
    if not sys.stderr.isatty():
        yield Reports(
            _line_report(f"loading {model}", lambda total: f"{total / 2**20:.0f} MiB"),
            _line_report("capturing CUDA graphs", str),
        )
        return
    console = Console(stderr=True)
    text, bar = TextColumn("{task.description}"), BarColumn()
    loading = Progress(text, bar, DownloadColumn(), TransferSpeedColumn(), console=console, transient=True)
    capturing = Progress(text, bar, MofNCompleteColumn(), console=console, transient=True)
    try:
        yield Reports(_bar_report(loading, f"loading {model}"), _bar_report(capturing, "capturing CUDA graphs"))
    finally:  # after a failure the bar is still on the screen
        loading.stop()
        capturing.stop()


def _bar_report(progress: Progress, what: str) -> Report:
    """Shows the bar from the first report to the report that all is done."""
    task = progress.add_task(what, total=None)

    def report(done: int, total: int) -> None:
        progress.start()
        progress.update(task, completed=done, total=total)
        if done == total:
            progress.stop()

    return report


def _line_report(what: str, show: Callable[[int], str]) -> Report:
    began: float | None = None
    last_s, last_percent = 0.0, 0

    def report(done: int, total: int) -> None:
        nonlocal began, last_s, last_percent
        now_s = time.monotonic()
        if began is None or done == 0:  # piece graphs are captured after whole graphs, with the same callback
            began, last_percent = now_s, 0
        percent = 100 * done // max(total, 1)
        is_due = percent // 10 > last_percent // 10 or (percent > last_percent and now_s - last_s > _LINE_EVERY_S)
        if is_due and now_s - began > _QUIET_S:
            last_s, last_percent = now_s, percent
            print(f"{what}: {percent} % of {show(total)}", file=sys.stderr, flush=True)

    return report
