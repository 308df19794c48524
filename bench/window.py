"""Measures how long a worker waits between its steps, by the number of steps in flight.

Real processes and real gRPC: a cache, a scheduler, and a worker that computes nothing (bench/null_workers.py). A step
takes as long as a step of a small model on a GPU. The loop is the way of a step's result to the scheduler and of the
next plan back to the worker. A window covers the loop if the worker does not wait for plans. One session keeps all
slots taken. With short answers, more plans have admissions.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from bench.ceiling import Shape, measure
from bench.machine import python_speed

STEP_MS = 2.0
WINDOWS = (1, 2, 3, 4)
SHAPES = (
    Shape(slots=32, step_ms=STEP_MS, max_tokens=1000, staggered=True),
    Shape(slots=128, step_ms=STEP_MS, max_tokens=1000, staggered=True),
    Shape(slots=32, step_ms=STEP_MS, max_tokens=100, staggered=True),
)


def windows() -> dict[str, Any]:
    """Rows by load and window."""
    rows = [
        row_of(shape, window, measure(1, shape, ["--window", str(window)])) for shape in SHAPES for window in WINDOWS
    ]
    return {"step_ms": STEP_MS, "loop_us": python_speed(), "rows": rows}


def row_of(shape: Shape, window: int, found: dict[str, float]) -> dict[str, Any]:
    """`found`: what `measure` returns for one worker. `wait_us`: the mean wait between two steps. `wait_us` and
    `idle_share` of a worker that never waits may be slightly below 0, because whole steps are counted."""
    steps_per_s = found["steps_per_s"]
    return {
        "slots": shape.slots,
        "answer_tokens": shape.max_tokens,
        "window": window,
        "steps_per_s": steps_per_s,
        "wait_us": 1e6 / steps_per_s - 1000 * shape.step_ms,
        "idle_share": 1 - steps_per_s * shape.step_ms / 1000,
        "requests_per_s": found["requests_per_s"],
        "rows_per_step": found["rows_per_step"],
        "scheduler_us_per_step": 1e6 * found["scheduler_s"] / found["steps"],
    }


def show(report: dict[str, Any], console: Console) -> None:
    table = Table(title=f"A worker with steps of {report['step_ms']:g} ms, by steps in flight", title_justify="left")
    heads = ["slots", "tokens/answer", "window", "steps/s", "wait µs/step", "idle %", "requests/s", "rows a step"]
    for head in [*heads, "tokens/s"]:
        table.add_column(head, justify="right")
    for row in report["rows"]:
        table.add_row(
            *(str(row[name]) for name in ("slots", "answer_tokens", "window")),
            f"{row['steps_per_s']:,.0f}",
            f"{max(0.0, row['wait_us']):,.0f}",
            f"{max(0.0, 100 * row['idle_share']):.1f}",
            f"{row['requests_per_s']:,.0f}",
            f"{row['rows_per_step']:.1f}",
            f"{row['steps_per_s'] * row['rows_per_step']:,.0f}",
        )
    console.print(table)
