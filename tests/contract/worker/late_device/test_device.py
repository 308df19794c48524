"""The simulated GPU of tests/support/late_device: it is late, it reuses memory, and it refuses waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_worker.device import DeviceEvent, SideStream, fetch, pin, upload
from gpu_worker.steps.graphs import CudaCapture
from tests.support.late_device.device import DEVICE, DeviceFault, HostWaits, LateDevice
from tests.support.late_device.graphs import StaleGraph
from tests.support.late_device.runtime import simulate
from tests.unit.worker.no_wait import MISTAKES


@pytest.fixture
def device() -> Iterator[LateDevice]:
    with simulate() as made, torch.inference_mode():
        yield made


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, device=DEVICE)


def recorded(blocking: bool = False) -> DeviceEvent:
    event = DeviceEvent(DEVICE, blocking)
    event.record()
    return event


def test_a_result_is_poison_until_the_host_waits_for_an_event_behind_it(device: LateDevice) -> None:
    with device.no_waits():
        host, done = fetch(zeros(3) + 1), recorded()
        assert host.isnan().all()
        assert not done.is_passed()
    done.wait()
    assert host.tolist() == [1, 1, 1]


def test_the_device_stops_at_the_event_that_the_host_waits_for(device: LateDevice) -> None:
    numbers = zeros(2)
    first, early = fetch(numbers + 1), recorded()
    second = fetch(numbers + 2)
    early.wait()
    assert first.tolist() == [1, 1]
    assert second.isnan().all()


def test_an_eager_device_runs_on_its_own() -> None:
    with simulate(seed=1, eagerness=0.9) as device, torch.inference_mode():
        with device.no_waits():
            host = fetch(zeros(3) + 1)
            for _ in range(20):
                zeros(1)
        assert host.tolist() == [1, 1, 1]


def test_a_copy_reads_pinned_memory_when_it_runs(device: LateDevice) -> None:
    host = torch.zeros(3, pin_memory=True)
    there = host.to(DEVICE, non_blocking=True)
    host.fill_(5)
    assert there.tolist() == [5, 5, 5]


def test_registered_memory_is_pinned(device: LateDevice) -> None:
    host = torch.zeros(1 << 15)
    with device.no_waits(), pytest.raises(HostWaits):
        zeros(1 << 15).copy_(host, non_blocking=True)
    pin(host)
    with device.no_waits():
        zeros(1 << 15).copy_(host[:], non_blocking=True)
        host.copy_(zeros(1 << 15), non_blocking=True)


def test_a_small_copy_reads_pageable_memory_at_once(device: LateDevice) -> None:
    host = torch.zeros(3)
    with device.no_waits():
        there = host.to(DEVICE, non_blocking=True)
    host.fill_(5)
    assert there.tolist() == [0, 0, 0]


def test_a_copy_to_pageable_memory_waits(device: LateDevice) -> None:
    with device.no_waits(), pytest.raises(HostWaits):
        torch.zeros(3).copy_(zeros(3), non_blocking=True)


@pytest.mark.parametrize("name", MISTAKES)
def test_an_operation_that_waits_is_noticed(name: str, device: LateDevice) -> None:
    x = zeros(4, 5)
    MISTAKES[name](x)
    with device.no_waits(), pytest.raises(HostWaits):
        MISTAKES[name](x)


def test_the_host_may_not_wait_for_what_it_has_just_queued(device: LateDevice) -> None:
    before, spinning = recorded(blocking=True), recorded()
    with device.no_waits():
        with pytest.raises(HostWaits):
            spinning.wait()
        before.wait()
        after = recorded(blocking=True)
        with pytest.raises(HostWaits):
            after.wait()
        with pytest.raises(HostWaits):
            torch.cuda.synchronize()


def test_tensors_of_host_and_device_do_not_mix(device: LateDevice) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        zeros(3) + torch.ones(3)
    assert (zeros(3) + torch.tensor(2.0)).tolist() == [2, 2, 2]


def test_freed_memory_is_overwritten_after_the_work_that_was_queued_before(device: LateDevice) -> None:
    numbers = zeros(2)
    host, memory = fetch(numbers), numbers.content  # type: ignore[attr-defined]
    del numbers
    torch.cuda.synchronize()
    assert host.tolist() == [0, 0]
    assert memory.isnan().all()


def test_a_view_keeps_its_memory(device: LateDevice) -> None:
    numbers = zeros(4)
    part = numbers[1:].view(1, 3)
    del numbers
    torch.cuda.synchronize()
    assert part.tolist() == [[0, 0, 0]]


def _read_on_a_side_stream(waits: bool, keeps: bool) -> list[float]:
    """waits: the side stream waits for the tensor that it reads. keeps: the host keeps the tensor until the read."""
    side, written, read = SideStream(DEVICE), DeviceEvent(DEVICE), DeviceEvent(DEVICE)
    numbers = zeros(2) + 1
    written.record()
    with side.use():
        if waits:
            written.hold()
        host = fetch(numbers)
        read.record()
    if not keeps:
        del numbers
        zeros(1)
    torch.cuda.synchronize()
    return host.tolist()


@pytest.mark.parametrize(("waits", "keeps"), [(True, True), (False, True), (True, False)])
def test_a_stream_may_run_at_any_time_that_its_events_allow(waits: bool, keeps: bool) -> None:
    """Without `keeps`, the compute stream may get the memory again: torch's record_stream() would prevent that."""
    seen = []
    for seed in range(30):
        with simulate(seed), torch.inference_mode():
            seen.append(_read_on_a_side_stream(waits, keeps) == [1, 1])
    assert any(seen)
    assert all(seen) == (waits and keeps)


def test_a_fault_shows_later_and_stays(device: LateDevice) -> None:
    numbers = zeros(3)
    with device.no_waits():
        numbers.index_select(0, upload(np.array([7]), DEVICE))
        done = recorded()
    with pytest.raises(DeviceFault, match="device-side assert"):
        done.wait()
    with pytest.raises(DeviceFault):
        zeros(1)


# ── graphs ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_graph_uses_the_memory_and_the_numbers_of_its_capture(device: LateDevice) -> None:
    source, target, factor = zeros(2), zeros(2), 3
    replay = CudaCapture()(lambda: target.copy_(source * factor))
    source.fill_(1)
    factor = 4
    replay()
    assert target.tolist() == [3, 3]


def _graph(run: Callable[[Tensor], object]) -> tuple[Callable[[], None], Tensor]:
    target = zeros(2)
    return CudaCapture()(lambda: run(target)), target


def test_a_graph_that_uses_freed_memory_is_noticed(device: LateDevice) -> None:
    holder = {"source": zeros(2)}
    replay, _ = _graph(lambda target: target.copy_(holder["source"]))
    replay()
    holder["source"] = zeros(2)
    with pytest.raises(StaleGraph):
        replay()


def test_a_captured_operation_runs_only_in_a_replay(device: LateDevice) -> None:
    graph, source = torch.cuda.CUDAGraph(), zeros(2)
    with torch.cuda.graph(graph):
        result = source + 1
    assert (result * 2).isnan().tolist() == [True, True]
    graph.replay()
    assert (result * 2).tolist() == [2, 2]


@pytest.mark.parametrize("shared", [False, True])
def test_a_graph_overwrites_the_free_memory_of_the_graphs_that_share_its_pool(shared: bool, device: LateDevice) -> None:
    first, second, pool = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    source, target = zeros(2), zeros(2)
    with torch.cuda.graph(first, pool=pool):
        result = source + 1
    memory = result.content  # type: ignore[attr-defined]
    del result
    with torch.cuda.graph(second, pool=pool if shared else torch.cuda.graph_pool_handle()):
        target.copy_(source)
    first.replay()
    torch.cuda.synchronize()
    assert memory.tolist() == [1, 1]
    second.replay()
    torch.cuda.synchronize()
    assert bool(memory.isnan().all()) == shared


def test_memory_that_is_freed_in_a_capture_is_overwritten_by_the_rest_of_the_graph(device: LateDevice) -> None:
    graph, source = torch.cuda.CUDAGraph(), zeros(2)
    with torch.cuda.graph(graph):
        result = source + 1
        memory = result.content  # type: ignore[attr-defined]
        del result
    graph.replay()
    torch.cuda.synchronize()
    assert memory.isnan().all()


def test_a_capture_refuses_what_cuda_refuses(device: LateDevice) -> None:
    numbers = zeros(2)
    for mistake in (torch.cuda.synchronize, numbers.tolist, recorded, lambda: numbers.copy_(torch.zeros(2), True)):
        with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(HostWaits):
            mistake()
