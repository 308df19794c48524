"""CUDA graphs for steps with decodes only.

There is one graph for each of several batch sizes (graph_sizes()). A step runs in the smallest graph with enough rows,
padded to its size. One call then launches all kernels of a step, instead of some hundreds of calls."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gpu_worker.steps.step_arrays import StepArrays

# Queues the captured work. The results are at the same addresses as in the capture.
Replay = Callable[[], None]
# Arguments: graphs captured so far, graphs in all.
CaptureProgress = Callable[[int, int], None]


class Capture(Protocol):
    """Captures a graph."""

    def __call__(self, run: Callable[[], object]) -> Replay:
        """Record the work that `run` queues. `run` may run more than once. Its inputs and outputs must not move."""


def graph_sizes(largest: int) -> list[int]:
    """Batch sizes, close together so that padding is cheap: 1, 2, 4, then every 8th, from 256 on every 16th, and always
    `largest`. Empty if `largest` is 0."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)]
    return sorted({*(size for size in sizes if size < largest), largest}) if largest else []


@dataclass(frozen=True, slots=True)
class GraphOutput:
    """What a graph computes, at the same addresses in each replay."""

    logits: Tensor  # [size, vocab]
    drawn: tuple[Tensor, Tensor] | None  # tokens and failed rows, as of sample_rows() in fused.py; None: not sampled


class DecodeGraphs:
    """The captured graphs, by batch size."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = sorted(sizes)
        self._replays: dict[int, tuple[Replay, GraphOutput]] = {}

    @property
    def sizes(self) -> list[int]:
        return list(self._sizes)

    def capture(
        self,
        prepare: Callable[[int, Tensor], Callable[[], GraphOutput]],
        logits: Tensor,
        capture: Capture,
        progress: CaptureProgress | None = None,
    ) -> None:
        """`prepare(size, out)`: stages a step of `size` dummy rows, and returns a function that computes their logits
        into `out`, and perhaps samples their tokens.

        logits: [largest size, vocab]. All graphs share it, so a replay overwrites the last result."""
        # The largest graph first: the other graphs reuse its scratch memory.
        for done, size in enumerate(reversed(self._sizes)):
            if progress is not None:
                progress(done, len(self._sizes))
            run, outputs = prepare(size, logits[:size]), list[GraphOutput]()
            replay = capture(lambda run=run, outputs=outputs: outputs.append(run()))  # type: ignore[misc]
            self._replays[size] = replay, outputs[-1]
        if progress is not None:
            progress(len(self._sizes), len(self._sizes))

    def size_for(self, arrays: StepArrays) -> int | None:
        """The size of the graph for this step; None: run the step eagerly."""
        if not arrays.decodes_only or arrays.num_rows > self._sizes[-1]:
            return None
        return self._sizes[bisect.bisect_left(self._sizes, arrays.num_rows)]

    def replay(self, size: int) -> GraphOutput:
        """The results are valid until the next replay."""
        replay, output = self._replays[size]
        replay()
        return output


class CudaCapture:
    """Captures on the current device. All graphs share scratch memory, because they run one after the other."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], object]) -> Replay:
        # Run once without a capture: the first use loads kernels and allocates library workspaces, which a capture does
        # not allow. torch.cuda.graph() waits for this run.
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        replay: Replay = graph.replay
        return replay
