"""Measurements of a worker's model on a device. Two steps are in flight: the device has no more at a time."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from bench.device.load import GREEDY, Load, LoadRequest, PlannedStep
from gpu_worker.steps.inputs import StepInput
from gpu_worker.steps.launched import LaunchedStep
from gpu_worker.steps.runner import ModelRunner
from gpu_worker.steps.step_arrays import StepArrays
from paceline.v1.common_pb2 import SamplingParams

# With a third one, launch() waits until the first one is over (gpu_worker/attention/flashinfer.py).
WINDOW = 2
WARM_STEPS = 8


class Clock:
    """Takes timestamps between the device's kernels; on a CPU, the times of the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def stamp(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def sync(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def ms(self, start: Any, end: Any) -> float:
        """How long the device took between two timestamps. Call sync() first."""
        return float(start.elapsed_time(end)) if self._cuda else 1e3 * (end - start)

    def median_ms(self, work: Callable[[], object], times: int = 20) -> float:
        """The median time of a call, after a warm-up."""
        for _ in range(3):
            work()
        pairs = []
        for _ in range(times):
            start = self.stamp()
            work()
            pairs.append((start, self.stamp()))
        self.sync()
        return statistics.median(self.ms(*pair) for pair in pairs)


@dataclass(frozen=True, slots=True)
class Measured:
    """One step of a run."""

    step: PlannedStep
    began: Any  # when the device reaches the step's first kernel, after the copies of the inputs
    ended: Any  # when the device has finished the step
    launched_s: float  # when the host begins to launch the step
    host_ms: float  # how long the launch takes the host
    result_s: float  # when the host has the step's result


def play(
    runner: ModelRunner, requests: list[LoadRequest], concurrency: int, clock: Clock, sampling: SamplingParams = GREEDY
) -> list[Measured]:
    """Run the requests to their end."""
    runner.reset()
    prepare, began = runner._prepare, list[Any]()

    def prepare_and_stamp(arrays: StepArrays, captured: bool) -> StepInput:
        prepared = prepare(arrays, captured)
        began.append(clock.stamp())
        return prepared

    runner._prepare = prepare_and_stamp  # type: ignore[method-assign]
    try:
        return _play(runner, Load(runner.limits, requests, sampling), concurrency, clock, began)
    finally:
        runner._prepare = prepare  # type: ignore[method-assign]


def _play(runner: ModelRunner, load: Load, concurrency: int, clock: Clock, stamps: list[Any]) -> list[Measured]:
    """`stamps` gets one timestamp for each step that computes anything."""
    in_flight: deque[tuple[PlannedStep, LaunchedStep, Any, Any, float, float]] = deque()
    measured = []

    def finish() -> None:
        step, launched, began, ended, launched_s, host_ms = in_flight.popleft()
        launched.result()
        measured.append(Measured(step, began, ended, launched_s, host_ms, time.perf_counter()))

    for step in load.steps(concurrency):
        launched_s = time.perf_counter()
        stamps.clear()
        launched = runner.launch(step.plan)
        began = stamps[0] if stamps else clock.stamp()
        in_flight.append((step, launched, began, clock.stamp(), launched_s, 1e3 * (time.perf_counter() - launched_s)))
        if len(in_flight) == WINDOW:
            finish()
    while in_flight:
        finish()
    clock.sync()
    return measured


def decode(
    runner: ModelRunner, batch: int, context_tokens: int, steps: int, clock: Clock, sampling: SamplingParams = GREEDY
) -> dict[str, Any]:
    """Measures a batch of decodes around `context_tokens`: the time of a step, and the gap from one step's last kernel
    to the next step's first kernel. In the gap the device is idle, except that it zeroes new blocks and copies inputs.

    The KV of the prompts is leftover content of the pool (zeros, or an earlier run's). Attention takes the same time
    with any content."""
    half = (steps + WARM_STEPS) // 2
    prompt = max(2, context_tokens - half)
    requests = [LoadRequest(prompt, prompt - 1, steps + WARM_STEPS)] * batch
    measured = [m for m in play(runner, requests, batch, clock, sampling) if m.step.decodes_only][WARM_STEPS:]
    step_ms = [1e3 * (b.result_s - a.result_s) for a, b in pairwise(measured)]
    gap_ms = [max(0.0, clock.ms(a.ended, b.began)) for a, b in pairwise(measured)]
    report: dict[str, Any] = {
        "batch": batch,
        "context_tokens": context_tokens,
        "step_ms": statistics.median(step_ms),
        "device_ms": statistics.median(clock.ms(m.began, m.ended) for m in measured),
        "gap_ms": statistics.median(gap_ms),
        "idle_share": sum(gap_ms) / max(sum(step_ms), 1e-9),
        "host_ms": statistics.median(m.host_ms for m in measured),
    }
    graphs = runner.graphs
    size = graphs and next((size for size in graphs.sizes if size >= batch), None)
    if graphs and size:
        # The graph's kernels alone, without gaps. The rest of a step is staging, and sampling that is not in the graph.
        graph_ms = clock.median_ms(lambda: graphs.replay(size))
        report |= {"graph_ms": graph_ms, "beside_the_graph_share": max(0.0, 1 - graph_ms / report["step_ms"])}
    return report


def prefill(runner: ModelRunner, prompts: list[int], clock: Clock, times: int = 5) -> dict[str, Any]:
    """Measures all prompts together, in one step or in as few steps as the token budget allows."""
    took_ms = []
    for _ in range(times + 1):
        measured = play(runner, [LoadRequest(n, 0, 1) for n in prompts], len(prompts), clock)
        computing = [m for m in measured if m.step.rows]
        took_ms.append(clock.ms(computing[0].began, computing[-1].ended))
    median_ms = statistics.median(took_ms[1:])
    return {
        "prompts": len(prompts),
        "tokens": sum(prompts),
        "ms": median_ms,
        "tokens_per_s": 1e3 * sum(prompts) / median_ms,
    }


def serving(
    runner: ModelRunner, concurrency: int, requests: int, prompt: int, output: int, clock: Clock
) -> dict[str, Any]:
    """A closed loop of equal requests, in this process: the worker without the services around it."""
    measured = play(runner, [LoadRequest(prompt, 0, output)] * requests, concurrency, clock)
    placed: dict[int, float] = {}
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for m in measured:
        for number in m.step.placed:
            placed[number] = m.launched_s
        for number in m.step.sampled:
            first.setdefault(number, m.result_s)
            last[number] = m.result_s
    wall_s = measured[-1].result_s - measured[0].launched_s
    ttft_ms = sorted(1e3 * (first[n] - placed[n]) for n in first)
    tpot_ms = [1e3 * (last[n] - first[n]) / max(1, output - 1) for n in first]
    return {
        "concurrency": concurrency,
        "requests": requests,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "wall_s": wall_s,
        "output_tokens_per_s": requests * output / wall_s,
        "ttft_ms_median": statistics.median(ttft_ms),
        "ttft_ms_max": ttft_ms[-1],
        "tpot_ms_mean": statistics.mean(tpot_ms),
        "steps": len(measured),
    }


def machine(device: torch.device, clock: Clock, gib: float = 4.0, width: int = 8192) -> dict[str, float]:
    """The limits of the device: bytes that it reads and copies per second, and the speed of a matmul."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return {**_memory(device, clock, dtype, gib), "product_tflop_per_s": _product(device, clock, dtype, width)}


def _memory(device: torch.device, clock: Clock, dtype: torch.dtype, gib: float) -> dict[str, float]:
    source = torch.ones(int(gib * 2**30) // dtype.itemsize, dtype=dtype, device=device)
    target = torch.empty_like(source)
    num_bytes = source.numel() * dtype.itemsize
    read_ms = clock.median_ms(lambda: source.sum(dtype=torch.float32))
    copy_ms = clock.median_ms(lambda: target.copy_(source))
    return {"read_gb_per_s": num_bytes / read_ms / 1e6, "copy_gb_per_s": 2 * num_bytes / copy_ms / 1e6}


def _product(device: torch.device, clock: Clock, dtype: torch.dtype, width: int) -> float:
    left, right = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    return 2.0 * width**3 / clock.median_ms(lambda: left.mm(right), 10) / 1e9
