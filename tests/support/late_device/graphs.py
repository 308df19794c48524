"""CUDA graphs of the simulated GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tests.support.late_device.device import Allocation, GraphPool, LateDevice, poison


class StaleGraph(AssertionError):
    """A graph uses memory that was freed after its capture."""


class LateGraph:
    """torch.cuda.CUDAGraph. A replay runs the recorded operations on the memory, and with the numbers, of the
    capture."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._tape: list[Callable[[], object]] = []
        self._own: list[Allocation] = []  # allocated in the capture
        self.inputs: set[Allocation] = set()  # other memory that the operations read or write
        self.pool = GraphPool()

    @contextmanager
    def capturing(self, pool: GraphPool | None = None) -> Iterator[None]:
        """torch.cuda.graph(), which first waits for the device."""
        assert not self._tape, "a graph is captured once"
        self._device.synchronize("a capture")
        self.pool = pool or self.pool
        self._device.recorder = self
        try:
            yield
        finally:
            self._device.recorder = None
            self.inputs.difference_update(self._own)

    def replay(self) -> None:
        """First poisons the graph's memory and its pool's free memory, because other graphs may have used both."""
        self._device.refuse_in_capture("replay()")
        if any(allocation.is_free for allocation in self.inputs):
            raise StaleGraph("a graph uses memory that was freed after its capture")
        self._device.num_replays += 1
        contents = [*(allocation.content for allocation in self._own), *self.pool.free]
        self._device.put(lambda: poison(*contents))
        self._device.num_replayed += 1 + len(self._tape)
        for work in self._tape:
            self._device.put(work)

    def record(self, work: Callable[[], object], used: Sequence[Allocation]) -> None:
        self._tape.append(work)
        self.inputs.update(used)

    def allocated(self, allocation: Allocation) -> None:
        self._own.append(allocation)
