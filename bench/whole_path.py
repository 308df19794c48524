"""The whole path on this machine, with the demo model: tokens per second over HTTP at 1, 32 and 128 streams.

The table also shows times per step: of the scheduler's core, of the cache, of the worker's step (from its beginning
until its tokens are ready), and the rest of the wall time. With two steps in flight they overlap.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from tests.support.stack import Stack

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 64
REQUESTS = {1: 16, 32: 192, 128: 512}
COUNTERS = {
    "scheduler_s": ("scheduler", "paceline_scheduler_core_seconds_total"),
    "steps": ("scheduler", "paceline_scheduler_steps_total"),
    "cache_s": ("cache", "paceline_cache_exchange_duration_seconds_sum"),
    "exchanges": ("cache", "paceline_cache_exchange_duration_seconds_count"),
    "worker_s": ("worker-1", "paceline_worker_step_seconds_sum"),
    "worker_steps": ("worker-1", "paceline_worker_step_seconds_count"),
}


def snapshot(stack: Stack) -> dict[str, float]:
    values = {key: stack.metric(name, of=service) or 0.0 for key, (service, name) in COUNTERS.items()}
    for name, process in stack.processes.items():
        times = psutil.Process(process.pid).cpu_times()
        values[f"cpu_{name}"] = times.user + times.system
    return values


def run_client(stack: Stack, concurrency: int, requests: int) -> dict[str, float]:
    arguments = [stack.url, concurrency, requests, PROMPT_TOKENS, OUTPUT_TOKENS]
    command = [sys.executable, "-m", "bench.client", *map(str, arguments)]
    result: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=300).stdout)
    return result


def measure(stack: Stack, concurrency: int) -> dict[str, Any]:
    """One row: the client's figures, and the services' own per step."""
    run_client(stack, concurrency, concurrency)  # warm
    before = snapshot(stack)
    load = run_client(stack, concurrency, REQUESTS[concurrency])
    change = {key: value - before[key] for key, value in snapshot(stack).items()}
    steps, worker_steps = max(1.0, change["steps"]), max(1.0, change["worker_steps"])
    # Figures of the first worker. The control plane's figures are per step of any worker.
    step_us, worker_us = 1e6 * load["wall_s"] / worker_steps, 1e6 * change["worker_s"] / worker_steps
    return {
        "running": concurrency,
        **load,
        "step_us": step_us,
        "worker_us": worker_us,
        "between_steps_us": step_us - worker_us,
        "scheduler_core_us": 1e6 * change["scheduler_s"] / steps,
        "cache_us": 1e6 * change["cache_s"] / steps,
        "exchanges_per_step": change["exchanges"] / steps,
        "cpu_us_per_token": {
            name.removeprefix("cpu_"): 1e6 * value / load["tokens"]
            for name, value in change.items()
            if name.startswith("cpu_")
        },
    }


def serve_and_measure(threads: int, window: int, workers: int, concurrencies: list[int]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        stack = Stack(Path(folder))
        stack.worker_flags = ["--threads", str(threads), "--log-level", "warning"]
        stack.scheduler_flags = ["--window", str(window)]
        try:
            stack.up(workers)
            way = {"threads": threads, "window": window, "workers": workers}
            return [way | measure(stack, concurrency) for concurrency in concurrencies]
        finally:
            stack.down()


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title=f"Whole path, demo model, {PROMPT_TOKENS} tokens in, {OUTPUT_TOKENS} out; times per step in µs")
    columns = [
        "threads",
        "window",
        "workers",
        "running",
        "tokens/s",
        "TTFT p50 ms",
        "step",
        "worker",
        "between",
        "scheduler",
        "cache",
    ]
    for column in [*columns, "CPU µs/token"]:
        table.add_column(column, justify="right")
    for row in rows:
        cpu = " ".join(f"{name[:5]} {value:.0f}" for name, value in row["cpu_us_per_token"].items())
        names = ("step_us", "worker_us", "between_steps_us", "scheduler_core_us", "cache_us")
        numbers = [f"{row[name]:,.0f}" for name in ("tokens_per_s", "ttft_p50_ms", *names)]
        table.add_row(*(str(row[name]) for name in ("threads", "window", "workers", "running")), *numbers, cpu)
    console.print(table)
