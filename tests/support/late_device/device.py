"""Streams, events, memory and host waits of the simulated GPU."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

DEVICE = torch.device("cuda", 0)
# CUDA copies up to 64 KiB of pageable memory at once into memory of its own. For more, the host may wait for the
# device.
STAGED_BYTES = 64 << 10
_BURSTS = (1, 8, 64, 512)  # the largest number of operations that a stream runs before another stream may run
# Returns whether it ran. If not, its stream has to wait.
Work = Callable[[], bool]


class HostWaits(AssertionError):
    """The host would wait for the device where it must not."""


class DeviceFault(RuntimeError):
    """An operation failed on the device. As with CUDA, the host learns of it later, and nothing works any more."""


class LateStream:
    """Runs its operations in order."""

    def __init__(self) -> None:
        self.queue: deque[Work] = deque()


class GraphPool:
    """Memory that graphs share. `free`: the contents of its freed allocations."""

    def __init__(self) -> None:
        self.free: list[Tensor] = []


class Allocation:
    """Memory of the device. `content`: on the CPU."""

    def __init__(self, content: Tensor, stream: LateStream, pool: GraphPool | None) -> None:
        self.content, self.stream = content, stream
        self.pool = pool  # None: it was not allocated in a capture
        self.is_free = False


class DeviceMemory:
    """Owns an allocation. The tensors on it keep it alive; queued operations and graphs do not."""

    def __init__(self, device: LateDevice, allocation: Allocation) -> None:
        self.device, self.allocation = device, allocation

    def __del__(self) -> None:
        self.device.freed(self.allocation)


class Recorder(Protocol):
    """A graph that is being captured."""

    pool: GraphPool

    def record(self, work: Callable[[], object], used: Sequence[Allocation]) -> None: ...

    def allocated(self, allocation: Allocation) -> None: ...


class LateEvent:
    """torch.cuda.Event."""

    def __init__(self, device: LateDevice, blocking: bool) -> None:
        self._device, self._blocking = device, blocking
        self._recorded = self._passed = 0
        self._stretch = -1  # the device's `stretch` when the event was recorded

    def record(self) -> None:
        self._device.refuse_in_capture("record() of an event")
        self._recorded += 1
        self._stretch = self._device.stretch
        number = self._recorded
        self._device.put(lambda: setattr(self, "_passed", number))

    def query(self) -> bool:
        self._device.check()
        return self._passed >= self._recorded

    def synchronize(self) -> None:
        self._device.refuse_in_capture("synchronize()")
        if self._device.may_not_wait and self._stretch == self._device.stretch:
            raise HostWaits("the host waits for an event that it has just recorded")
        if self._device.may_not_wait and not (self._blocking or self.query()):
            raise HostWaits("the host spins until the device has passed an event")
        self._device.on_wait()
        self._device.run_until(self.query)

    def wait(self) -> None:
        """Make the current stream wait."""
        number = self._recorded
        self._device.put_wait(lambda: self._passed >= number)


class LateDevice:
    """The queues of the streams. The seed decides which stream runs when."""

    def __init__(self, seed: int = 0, eagerness: float = 0.0, staged_bytes: int = STAGED_BYTES) -> None:
        """eagerness: how often the device runs an operation on its own when the host queues one, 0 to 1 (excluded).
        staged_bytes: STAGED_BYTES, or less for a small model."""
        assert 0 <= eagerness < 1
        self.staged_bytes = staged_bytes
        self._rng = random.Random(seed)
        self._eagerness = eagerness
        self.stream = LateStream()
        self._streams = [self.stream]
        self._turn, self._burst = self.stream, 0
        self._fault: BaseException | None = None
        self._pinned: list[Tensor] = []  # so that no address is used twice
        self._pinned_ranges: list[tuple[int, int]] = []
        self.recorder: Recorder | None = None
        self.may_not_wait = False
        self.stretch = 0  # how often no_waits() was entered
        self.num_queued = 0  # operations so far
        self.num_replays = 0
        self.num_replayed = 0  # operations of graphs
        self.on_wait: Callable[[], None] = lambda: None  # called before the host waits for an event

    # ── the queues ────────────────────────────────────────────────────────────────────────────────────────────────────

    def put(self, work: Callable[[], object], used: Sequence[Allocation] = ()) -> None:
        """Queue an operation that uses this memory on the current stream, or record it for a captured graph."""
        if self.recorder is not None:
            self.recorder.record(work, used)
            return
        self.check()
        self.stream.queue.append(lambda: _ran(work))
        self.num_queued += 1
        if self._rng.random() < self._eagerness:
            with _on_device():
                while self._advance() and self._rng.random() < self._eagerness:
                    pass

    def put_wait(self, is_over: Callable[[], bool]) -> None:
        """The current stream waits here."""
        self.refuse_in_capture("a wait for another stream")
        self.stream.queue.append(is_over)

    def new_stream(self) -> LateStream:
        self._streams.append(LateStream())
        return self._streams[-1]

    @contextmanager
    def on(self, stream: LateStream) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def run_until(self, is_over: Callable[[], bool]) -> None:
        with _on_device():
            while not is_over():
                assert self._advance(), "the host waits for an event that never comes"

    def synchronize(self, why: str = "synchronize()") -> None:
        """Run everything. Raises HostWaits inside of no_waits()."""
        self.wait_for(why)
        with _on_device():
            while self._advance():
                pass
        assert not any(stream.queue for stream in self._streams), "the streams wait for each other"
        self.check()

    def check(self) -> None:
        if self._fault is not None:
            raise DeviceFault(f"CUDA error: device-side assert triggered ({self._fault})") from self._fault

    def _advance(self) -> bool:
        """Run one operation; False if no stream can run."""
        self.check()
        self._burst -= 1
        if self._burst < 0:
            self._turn, self._burst = self._rng.choice(self._streams), self._rng.randint(1, self._rng.choice(_BURSTS))
        others = [stream for stream in self._streams if stream is not self._turn]
        self._rng.shuffle(others)
        for stream in (self._turn, *others):
            if stream.queue and self._run(stream.queue[0]):
                stream.queue.popleft()
                return True
        return False

    def _run(self, work: Work) -> bool:
        try:
            return work()
        except Exception as error:
            self._fault = error
            self.check()
            raise AssertionError("check() raises") from error

    # ── when the host may wait ────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def no_waits(self) -> Iterator[None]:
        """Inside, the host may wait only for events that were recorded before. Then it must sleep, not spin."""
        self.stretch += 1
        self.may_not_wait = True
        try:
            yield
        finally:
            self.may_not_wait = False

    def wait_for(self, what: str) -> None:
        """Call this where the host waits for all queued work."""
        self.refuse_in_capture(what)
        if self.may_not_wait:
            raise HostWaits(f"{what} waits for the device")

    def refuse_in_capture(self, what: str) -> None:
        if self.recorder is not None:
            raise HostWaits(f"{what} is not allowed while a graph is captured")

    # ── memory ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def allocate(self, content: Tensor) -> DeviceMemory:
        """Memory on the device with this content, which gets poisoned."""
        poison(content)
        allocation = Allocation(content, self.stream, None if self.recorder is None else self.recorder.pool)
        if self.recorder is not None:
            self.recorder.allocated(allocation)
        return DeviceMemory(self, allocation)

    def freed(self, allocation: Allocation) -> None:
        """The allocator may give the memory to the next operation on the stream that it was allocated on. A graph's
        memory goes to later operations of the capture, and to the pool's other graphs."""
        content, pool = allocation.content, allocation.pool
        allocation.is_free = True
        if pool is None:
            allocation.stream.queue.append(lambda: _ran(partial(poison, content)))
            return
        pool.free.append(content)
        if self.recorder is not None and self.recorder.pool is pool:
            self.recorder.record(lambda: poison(content), ())

    def pin(self, tensor: Tensor) -> Tensor:
        """Lock the memory of a tensor on the CPU. It stays locked, and is never reused."""
        self._pinned.append(tensor)
        self.pin_range(tensor.data_ptr(), tensor.nbytes)
        return tensor

    def pin_range(self, start: int, num_bytes: int) -> None:
        self._pinned_ranges.append((start, start + num_bytes))

    def is_pinned(self, tensor: Tensor) -> bool:
        start = tensor.data_ptr()
        end = start + _extent_bytes(tensor)
        return tensor.numel() == 0 or any(first <= start and end <= last for first, last in self._pinned_ranges)


@contextmanager
def _on_device() -> Iterator[None]:
    with torch.inference_mode(), torch._C.DisableTorchFunction():
        yield


def _ran(work: Callable[[], object]) -> bool:
    work()
    return True


def poison(*tensors: Tensor) -> None:
    """Fill them with NaN, or with numbers that are no index."""
    with _on_device():
        for tensor in tensors:
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.fill_(torch.nan)
            elif tensor.dtype == torch.bool:
                tensor.fill_(True)
            else:
                tensor.fill_(torch.iinfo(tensor.dtype).max - 5)


def _extent_bytes(tensor: Tensor) -> int:
    """From the first to the last element."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in sizes)) * tensor.element_size()
