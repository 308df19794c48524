"""Progress on standard error: one changing line on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import asyncio
import statistics

from rich.console import Console
from rich.status import Status

from services.cli.bench.runner import StageRun

TERMINAL_PERIOD_S, PLAIN_PERIOD_S = 0.25, 5.0
# The line shows the median TTFT of this many of the last requests.
RECENT = 50


class ProgressScreen:
    """Progress on a terminal; plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    async def follow(self, run: StageRun, title: str) -> None:
        """Show the stage until cancelled."""
        if not self._console.is_terminal:
            while True:
                await asyncio.sleep(PLAIN_PERIOD_S)
                self.say(f"{title}: {progress(run)}")
        with Status("", console=self._console) as status:
            while True:
                status.update(f"{title}: {progress(run)}")
                await asyncio.sleep(TERMINAL_PERIOD_S)


def progress(run: StageRun) -> str:
    """The stage in one line."""
    elapsed_s = run.elapsed_s
    failed = sum(bool(record.error) for record in run.records)
    parts = [f"{len(run.records) - failed} done", f"{run.running} running"]
    if failed:
        parts.append(f"{failed} failed")
    tokens = sum(record.output_tokens for record in run.records)
    parts.append(f"{tokens / elapsed_s:.0f} tok/s" if elapsed_s > 0 else "")
    ttfts = [record.ttft_s for record in run.records[-RECENT:] if record.ttft_s is not None and not record.error]
    if ttfts:
        parts.append(f"TTFT p50 {statistics.median(ttfts) * 1000:.0f} ms")
    if elapsed_s < run.limits.duration_s:
        parts.append(f"{elapsed_s:.0f} of {run.limits.duration_s:.0f} s")
    else:
        parts.append(f"draining, at most {run.limits.drain_s:.0f} s")
    return ", ".join(filter(None, parts))
