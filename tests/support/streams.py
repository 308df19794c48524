"""CUDA streams and events on a CPU: what is queued runs later, in any order that the streams and events allow."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_WRITES = {_aten.copy_.default, _aten.index_copy_.default, _aten.index_fill_.int_Scalar, _aten.fill_.Scalar}


class Streams(TorchDispatchMode):
    """While this mode is entered, writes to tensors go into the current stream's queue. Views are made at once."""

    def __init__(self) -> None:
        super().__init__()
        self._queues: list[deque[Callable[[], bool]]] = [deque()]
        self._current = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _WRITES:
            self.queue(lambda: func(*args, **(kwargs or {})))
            return args[0]
        if func is _aten.index_select.out:
            self.queue(lambda: func(*args, **kwargs))
            return kwargs["out"]
        if func is _aten.index_select.default:
            source, dim, index = args
            out = source.new_empty([*source.shape[:dim], len(index), *source.shape[dim + 1 :]])
            self.queue(lambda: out.copy_(func(*args)))
            return out
        return func(*args, **(kwargs or {}))

    def queue(self, work: Callable[[], object]) -> None:
        self._queues[self._current].append(lambda: (work(), True)[1])

    def queue_wait(self, is_over: Callable[[], bool]) -> None:
        self._queues[self._current].append(is_over)

    def new_stream(self) -> int:
        self._queues.append(deque())
        return len(self._queues) - 1

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def run(self, seed: int) -> None:
        """Runs all queued work. Call it after the mode has been left."""
        rng = random.Random(seed)
        idle = 0
        while waiting := [queue for queue in self._queues if queue]:
            queue = rng.choice(waiting)
            idle += 1
            # A stream runs up to 12 entries, unless it has to wait; then another stream may run.
            for _ in range(rng.randint(1, 12)):
                if not queue or not queue[0]():
                    break
                queue.popleft()
                idle = 0
            assert idle < 1000, "the streams wait for each other"


class SimulatedDeviceEvent:
    """gpu_worker.device.DeviceEvent on simulated streams."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._recorded = self._passed = 0

    def record(self) -> None:
        self._recorded += 1
        number = self._recorded
        self._streams.queue(lambda: setattr(self, "_passed", number))

    def hold(self) -> None:
        number = self._recorded
        self._streams.queue_wait(lambda: self._passed >= number)


class SimulatedSideStream:
    def __init__(self, streams: Streams) -> None:
        self._streams, self._stream = streams, streams.new_stream()

    def use(self) -> Any:
        return self._streams.on(self._stream)
