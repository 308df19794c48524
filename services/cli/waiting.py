"""Shows on a terminal that a command waits, for what, and for how long."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

# A shorter wait shows nothing.
QUIET_S = 1.0


@contextlib.contextmanager
def waiting(console: Console, what: str) -> Iterator[None]:
    """After QUIET_S, shows a line with a spinner, `what` and the time. The line disappears when the block ends. Without
    a terminal it is not shown."""
    if not console.is_terminal:
        yield
        return
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    progress = Progress(*columns, console=console, transient=True)
    progress.add_task(what, total=None)
    lock, is_over = threading.Lock(), False

    def show() -> None:
        with lock:
            if not is_over:
                progress.start()

    timer = threading.Timer(QUIET_S, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            is_over = True
        timer.cancel()
        if progress.live.is_started:  # otherwise stop() would print a line on a dumb terminal
            progress.stop()
