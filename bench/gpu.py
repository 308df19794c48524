"""`make bench-gpu`: how fast a worker's model runs on an NVIDIA GPU, beside the GPU's own limits in the same run.

Models with dummy weights: decode steps at several batch sizes and contexts with the memory roofline, the device's idle
share, prefill of 8,192 tokens, and a closed loop of 1024/1024 requests. A table on the terminal, JSON in bench/results/
(written after every figure, so that an interrupted run leaves its figures). It ends within --budget seconds: it leaves
out and names the parts that do not fit. `--tiny` runs the same driver with a tiny model on a CPU, which measures
nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.device import measure as gpu_measure
from bench.device.choices import choices
from bench.device.load import GREEDY, SAMPLED, NoRoom
from bench.device.measure import Clock
from bench.device.shapes import SHAPES, decode_bytes, prefill_flops, write_checkpoint
from gpu_worker.attention.flashinfer import load_flashinfer
from gpu_worker.build import build_worker
from gpu_worker.models.config import DecoderConfig, read_config
from gpu_worker.settings import WorkerSettings
from gpu_worker.steps.runner import ModelRunner
from paceline.v1.common_pb2 import SamplingParams

RESULTS = Path(__file__).parent / "results" / "gpu.json"
MODELS = [name for name in SHAPES if name != "tiny"]
BATCHES, CONTEXTS = (1, 32, 64, 128, 256), (1024, 4096)
# Seconds that each measurement may take. A measurement that does not fit into the rest of the budget is left out.
SETUP_S, DECODE_S, PREFILL_S, SERVING_S, CHOICES_S = 60.0, 8.0, 6.0, {32: 30.0, 128: 50.0}, 30.0
NO_GPU = (
    "bench-gpu: no NVIDIA GPU here (torch {version} sees no CUDA device). It measures nothing without one; "
    "--tiny runs its driver on a CPU"
)

Part = tuple[str, float, Callable[[], dict[str, Any]]]


class Report:
    """Writes the results, after every figure."""

    def __init__(self, path: Path | None, head: dict[str, Any]) -> None:
        self._path = path
        self.data: dict[str, Any] = {**head, "models": {}, "left_out": []}

    def add(self, model: str, part: str, row: dict[str, Any]) -> None:
        self.data["models"].setdefault(model, {}).setdefault(part, []).append(row)
        print(f"{model} {part}: {_line(row)}", flush=True)
        self.write()

    def leave_out(self, what: str) -> None:
        self.data["left_out"].append(what)
        print(f"left out: {what}", flush=True)
        self.write()

    def write(self) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self.data, indent=1) + "\n")


def parts(
    runner: ModelRunner, config: DecoderConfig, element_bytes: int, best: dict[str, float], clock: Clock, tiny: bool
) -> Iterator[Part]:
    """The measurements of a model, the most important ones first."""

    def decode(batch: int, context: int, sampling: SamplingParams = GREEDY) -> dict[str, Any]:
        row = gpu_measure.decode(runner, batch, context, 4 if tiny else 48, clock, sampling)
        roofline_ms = decode_bytes(config, element_bytes, batch, context) / best["read_gb_per_s"] / 1e6
        return {**row, "roofline_ms": roofline_ms, "roofline_share": roofline_ms / row["step_ms"]}

    def prefill(prompts: list[int]) -> dict[str, Any]:
        row = gpu_measure.prefill(runner, prompts, clock, 1 if tiny else 5)
        floor_ms = prefill_flops(config, prompts) / best["product_tflop_per_s"] / 1e9
        return {**row, "floor_ms": floor_ms}

    def serving(concurrency: int, requests: int, prompt: int, output: int) -> dict[str, Any]:
        return gpu_measure.serving(runner, concurrency, requests, prompt, output, clock)

    batches, contexts = ((1, 3), (24, 40)) if tiny else (BATCHES, CONTEXTS)
    yield "sampled_decode", DECODE_S, partial(decode, 3 if tiny else 128, contexts[0], SAMPLED)
    for context in contexts:
        for batch in batches:
            yield "decode", DECODE_S, partial(decode, batch, context)
    whole = 48 if tiny else 8192
    for prompts in ([whole], [whole // 8] * (4 if tiny else 8)):
        yield "prefill", PREFILL_S, partial(prefill, prompts)
    loops = {2: (5, 9, 4)} if tiny else {32: (64, 1024, 1024), 128: (256, 1024, 1024)}
    for concurrency, loop in loops.items():
        needed_s = SERVING_S.get(concurrency, 1.0)
        yield "serving", needed_s, partial(serving, concurrency, *loop)


def measure_model(
    name: str, folder: Path, report: Report, best: dict[str, float], tiny: bool, deadline_s: float
) -> None:
    """deadline_s: on time.monotonic()."""
    checkpoint = write_checkpoint(name, folder)
    sizes: dict[str, Any] = {"max_num_seqs": max(BATCHES), "max_batched_tokens": 8192, "max_model_len": 8192}
    if tiny:
        sizes = {"max_num_seqs": 4, "max_batched_tokens": 64, "max_model_len": 128, "num_blocks": 64, "threads": 1}
    settings = WorkerSettings(model=str(checkpoint), load_format="dummy", device="cpu" if tiny else "cuda", **sizes)
    began_s = time.monotonic()
    built = build_worker(settings)
    runner, config = built.runner, read_config(checkpoint)
    element_bytes = getattr(torch, built.info.dtype).itemsize
    start = {"start_s": time.monotonic() - began_s, "num_blocks": runner.limits.num_blocks, "dtype": built.info.dtype}
    report.add(name, "start", {**start, "graphs": runner.graphs.sizes if runner.graphs else []})
    clock = Clock(runner.device)
    for part, needed_s, run in parts(runner, config, element_bytes, best, clock, tiny):
        if time.monotonic() + needed_s > deadline_s:
            report.leave_out(f"{name} {part}: no time")
            continue
        try:
            report.add(name, part, run())
        except NoRoom:
            report.leave_out(f"{name} {part}: does not fit into {runner.limits.num_blocks} blocks")


def measure_choices(report: Report, deadline_s: float) -> None:
    if time.monotonic() + CHOICES_S > deadline_s:
        report.leave_out("choices: no time")
        return
    device = torch.device("cuda")
    for row in choices(load_flashinfer(), Clock(device), device, torch.bfloat16):
        report.add("llama-3.1-8b", "choices", row)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench-gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--budget", type=float, default=560.0, help="seconds for all of it")
    parser.add_argument("--out", type=Path, help=f"default: {RESULTS.relative_to(Path(__file__).parent.parent)}")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU: tries the driver, measures nothing")
    options = parser.parse_args(argv)
    deadline_s = time.monotonic() + options.budget
    if not options.tiny and not torch.cuda.is_available():
        print(NO_GPU.format(version=torch.__version__), file=sys.stderr)
        return 2
    device = torch.device("cpu" if options.tiny else "cuda")
    best = gpu_measure.machine(device, Clock(device), *((0.001, 64) if options.tiny else ()))
    head = {
        "date": time.strftime("%Y-%m-%d"),
        "device": "cpu" if options.tiny else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": best,
    }
    report = Report(options.out or (None if options.tiny else RESULTS), head)
    print(_line(best), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in ["tiny"] if options.tiny else options.models:
            if time.monotonic() + SETUP_S > deadline_s:
                report.leave_out(f"{name}: no time")
                continue
            measure_model(name, Path(folder), report, best, options.tiny, deadline_s)
            gc.collect()
            torch.cuda.empty_cache()
    if not options.tiny:
        measure_choices(report, deadline_s)
    print(table(report.data))
    return 0 if report.data["models"] else 1


def table(data: dict[str, Any]) -> str:
    """The decode steps, which are the main result. The other rows were printed when they were measured."""
    columns = ("batch", "context_tokens", "step_ms", "graph_ms", "roofline_ms", "roofline_share", "gap_ms", "host_ms")
    lines = ["  ".join(["model".ljust(14), *(column.rjust(14) for column in columns)])]
    for model, measured in data["models"].items():
        for row in measured.get("decode", []):
            cells = (_cell(row.get(column)).rjust(14) for column in columns)
            lines.append("  ".join([model.ljust(14), *cells]))
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    return ", ".join(f"{key} {_cell(value)}" for key, value in row.items())


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
