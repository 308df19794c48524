"""CUDA graphs for steps of decodes alone: captured once for some batch sizes, replayed with the batch filled up to the
next of them. What launches the kernels of a step is then one call instead of some hundreds.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from gpu_worker.step_arrays import StepArrays

# Queues what was captured; the results are where they were then.
Replay = Callable[[], None]
# (captured so far, in all)
CaptureProgress = Callable[[int, int], None]


class Capture(Protocol):
    def __call__(self, run: Callable[[], object]) -> Replay:
        """Records what `run` queues. It may run more than once; what it reads and writes must stay where it is."""


def graph_sizes(largest: int) -> list[int]:
    """Batch sizes up to `largest` itself, so close together that filling up costs little: 1, 2, 4, then every 8th, from
    256 on every 16th."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)]
    return sorted({*(size for size in sizes if size < largest), largest}) if largest else []


class DecodeGraphs:
    def __init__(self, sizes: list[int]) -> None:
        self._sizes = sorted(sizes)
        self._replays: dict[int, tuple[Replay, Tensor]] = {}

    @property
    def sizes(self) -> list[int]:
        return list(self._sizes)

    def capture(
        self,
        prepare: Callable[[int, Tensor], Callable[[], object]],
        logits: Tensor,
        capture: Capture,
        progress: CaptureProgress | None = None,
    ) -> None:
        """`prepare(size, out)`: stages a step of `size` dummy rows, and gives what computes their logits into `out`.

        logits: [largest size, vocab], shared by all graphs: a replay overwrites what the one before left there."""
        # The largest first: the others find the memory that they need in what it leaves.
        for done, size in enumerate(reversed(self._sizes)):
            if progress is not None:
                progress(done, len(self._sizes))
            out = logits[:size]
            self._replays[size] = capture(prepare(size, out)), out
        if progress is not None:
            progress(len(self._sizes), len(self._sizes))

    def size_for(self, arrays: StepArrays) -> int | None:
        """The size to fill the step up to; None if it has to run eagerly."""
        if not arrays.decodes_only or arrays.num_rows > self._sizes[-1]:
            return None
        return self._sizes[bisect.bisect_left(self._sizes, arrays.num_rows)]

    def replay(self, size: int) -> Tensor:
        """Logits [size, vocab], good until the next replay."""
        replay, logits = self._replays[size]
        replay()
        return logits


class CudaCapture:
    """Capture on the current device. All graphs share their scratch memory: they run one after the other."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], object]) -> Replay:
        # First without: kernels are loaded and libraries get their workspaces when they are used for the first time,
        # and neither is allowed in a capture.
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        replay: Replay = graph.replay
        return replay
