"""How long the host takes to launch a decode step of a graph, measured without a GPU.

The worker's own code runs with FlashInfer's Python; its kernels and the graph do nothing. A GPU's driver would add its
part for each queued operation (tests/contract/worker/late_device/test_steps.py counts these)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from bench.device.load import GREEDY, SAMPLED, Load, LoadRequest
from demo import CHECKPOINT
from gpu_worker.steps.graphs import Replay
from paceline.v1.common_pb2 import SamplingParams
from tests.support.flashinfer_kernels import Fa2, reference_kernels
from tests.support.gpu_twin import twin

STEPS = 230
SAMPLINGS = {"greedy": GREEDY, "sampled": SAMPLED}


def launch_ms(rows: int) -> dict[str, float]:
    """The median for steps of `rows` decodes, by sampling."""
    with reference_kernels(make_attention=_NoAttention) as flashinfer:
        runner = twin(
            flashinfer, CHECKPOINT, num_blocks=rows * STEPS // 8, max_num_seqs=rows, graph_sizes=(rows,),
            capture=_capture_nothing, fused_sampling=True,
        )  # fmt: skip
        return {name: _measure(runner, rows, sampling) for name, sampling in SAMPLINGS.items()}


def _measure(runner: Any, rows: int, sampling: SamplingParams) -> float:
    runner.reset()
    took_ms = []
    for step in Load(runner.limits, [LoadRequest(20, 0, STEPS) for _ in range(rows)], sampling).steps(rows):
        began = time.perf_counter()
        launched = runner.launch(step.plan)
        if step.decodes_only and step.rows == rows:
            took_ms.append(1e3 * (time.perf_counter() - began))
        launched.result()
    return statistics.median(took_ms)


class _NoAttention(Fa2):
    def plan(self, *args: Any) -> Any:
        return (0,)

    def paged_run(self, *args: Any) -> None:
        pass


def _capture_nothing(run: Callable[[], object]) -> Replay:
    run()
    return lambda: None
