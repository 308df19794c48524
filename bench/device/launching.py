"""How long the host takes to launch a step, measured without a GPU, and how many operations it queues.

The worker's own code runs with FlashInfer's Python; its kernels and the graphs do nothing. A GPU's driver would add its
part for each queued operation. Times are CPU time of the launching thread, as the median of a run. The lowest of
several runs counts: other work on the machine, and other machines on the same processor, only make a run slower."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.device.load import GREEDY, SAMPLED, Load, LoadRequest, PlannedStep
from bench.device.shapes import SHAPES
from demo import CHECKPOINT
from gpu_worker.build import build_worker
from gpu_worker.models.config import parse_config
from gpu_worker.models.weights import expected_tensors
from gpu_worker.settings import WorkerSettings
from gpu_worker.steps.graphs import Replay
from gpu_worker.steps.runner import ModelRunner
from paceline.v1.common_pb2 import SamplingParams
from tests.support.flashinfer_kernels import Fa2, reference_kernels
from tests.support.gpu_twin import twin
from tests.support.late_device.worker import late_gpu

STEPS = 230
SAMPLINGS = {"greedy": GREEDY, "sampled": SAMPLED}

# For steps with a prompt chunk: a model with as many layers as Llama-3.1-8B. Its matrices are small, because torch
# really multiplies them.
LAYERS, DECODES, ROWS, MIXED_STEPS = 32, 32, 128, 100
DEEP = SHAPES["tiny"] | {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "head_dim": 16, "max_position_embeddings": 16384,
}  # fmt: skip
# By name: the sizes of captured pieces.
MIXED: dict[str, tuple[int, ...]] = {"eager": (), "pieces": (ROWS,)}


def lowest(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: min(run[name] for run in runs) for name in runs[0]}


def run_decodes(rows: int) -> dict[str, float]:
    """The median launch time of a step of `rows` decodes, in ms, for each kind of SAMPLINGS."""
    with reference_kernels(make_attention=_NoAttention) as flashinfer:
        runner = twin(
            flashinfer, CHECKPOINT, num_blocks=rows * STEPS // 8, max_num_seqs=rows, graph_sizes=(rows,),
            capture=_capture_nothing, fused_sampling=True,
        )  # fmt: skip
        return {name: _measure(runner, rows, sampling) for name, sampling in SAMPLINGS.items()}


def _measure(runner: ModelRunner, rows: int, sampling: SamplingParams) -> float:
    runner.reset()
    requests = [LoadRequest(20, 0, STEPS) for _ in range(rows)]
    return _median_ms(
        runner,
        Load(runner.limits, requests, sampling).steps(rows),
        lambda step: step.decodes_only and step.rows == rows,
    )


def run_mixed() -> dict[str, float]:
    """The median launch time of a step of DECODES decodes and a chunk, ROWS rows in all, in ms. Both times contain
    small matmuls that torch computes: the eager time those of all layers, the time with pieces only those after the
    last attention call."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = deep_checkpoint(Path(folder), LAYERS)
        return {name: _measure_mixed(checkpoint, sizes) for name, sizes in MIXED.items()}


def _measure_mixed(checkpoint: Path, piece_sizes: tuple[int, ...]) -> float:
    with reference_kernels(launch=_launch_nothing, make_attention=_NoAttention) as flashinfer:
        runner = twin(
            flashinfer, checkpoint, num_blocks=2000, max_num_seqs=DECODES + 1, piece_sizes=piece_sizes,
            capture=_capture_nothing, max_batched_tokens=ROWS,
        )  # fmt: skip
        return _median_ms(runner, mixed_steps(runner, DECODES, MIXED_STEPS), _is_mixed)


@dataclass(frozen=True, slots=True)
class MixedOperations:
    """Operations that the host queues in a step of decodes and a chunk: launches of kernels and graphs, copies, events.
    The operations inside of graphs do not count."""

    by_layer: int
    others: int

    @property
    def total(self) -> int:
        return LAYERS * self.by_layer + self.others


def mixed_operations() -> dict[str, MixedOperations]:
    """Counted on the simulated GPU, with models of 2 and of 3 layers."""
    counted = {}
    for name, sizes in MIXED.items():
        two, three = (_count_operations(layers, max(sizes, default=0)) for layers in (2, 3))
        counted[name] = MixedOperations(three - two, two - 2 * (three - two))
    return counted


def _count_operations(layers: int, graph_max_tokens: int) -> int:
    """The most that a step queues. With 8 decodes, because more would not be more operations."""
    with tempfile.TemporaryDirectory() as folder, late_gpu() as device:
        settings = WorkerSettings(
            model=str(deep_checkpoint(Path(folder), layers)), device="cuda", dtype="float32", num_blocks=200,
            max_num_seqs=9, max_batched_tokens=ROWS, graph_max_seqs=0, graph_max_tokens=graph_max_tokens,
            attention_backend="flashinfer",
        )  # fmt: skip
        runner = build_worker(settings).runner
        queued = []
        for step in mixed_steps(runner, 8, 4):
            before = device.num_queued - device.num_replayed + device.num_replays
            launched = runner.launch(step.plan)
            if _is_mixed(step):
                queued.append(device.num_queued - device.num_replayed + device.num_replays - before)
            launched.result()
        return max(queued)


def mixed_steps(runner: ModelRunner, decodes: int, count: int) -> Iterator[PlannedStep]:
    """One step that prefills the decoding requests, `count` steps with decodes and one chunk, one with decodes only,
    and a plan that only frees slots."""
    requests = [LoadRequest(ROWS // decodes, 0, count + 2) for _ in range(decodes)]
    requests.append(LoadRequest(count * (ROWS - decodes), 0, 1))
    return Load(runner.limits, requests).steps(decodes + 1)


def deep_checkpoint(folder: Path, layers: int) -> Path:
    """Random weights, in files because the simulated GPU draws no random numbers."""
    raw = DEEP | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(raw))
    shapes = expected_tensors(parse_config(raw, {}))
    save_file({name: torch.randn(shape) / 8 for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


def _is_mixed(step: PlannedStep) -> bool:
    return not step.decodes_only and not step.placed and step.rows == ROWS


def _median_ms(runner: ModelRunner, steps: Iterator[PlannedStep], is_measured: Callable[[PlannedStep], bool]) -> float:
    took_ms = []
    for step in steps:
        began = time.thread_time()
        launched = runner.launch(step.plan)
        if is_measured(step):
            took_ms.append(1e3 * (time.thread_time() - began))
        launched.result()
    return statistics.median(took_ms)


class _NoAttention(Fa2):
    def plan(self, *args: Any) -> Any:
        return (0,)

    def paged_run(self, *args: Any) -> None:
        pass


def _launch_nothing(kernel: Callable[..., None]) -> Callable[..., None]:
    return lambda *args: None


def _capture_nothing(run: Callable[[], object]) -> Replay:
    run()
    return lambda: None
