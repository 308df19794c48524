"""The memory that the captured graphs of a worker read and write. A part that gets a new buffer is noticed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch

from gpu_worker.steps.runner import ModelRunner
from tests.contract.worker.late_device.rig import gpu_runner
from tests.support.late_device.device import Allocation
from tests.support.late_device.graphs import LateGraph, StaleGraph
from tests.support.late_device.tensors import LateTensor
from tests.support.late_device.worker import late_gpu
from tests.unit.worker.families import Reference

# The places in a runner that keep these buffers; `*`: each graph, window or layer has its own.
_WRAPPERS = "_decoder._attention._wrappers[*]"
_OF_A_GRAPH = ("_int_workspace_buffer", "_qo_indptr_buf")
_OF_A_LAYER = ("input_norm", "qkv", "output", "mlp_norm", "gate_up", "down")
BUFFERS = {
    "_last_tokens",
    "_decoder._attention._slots",  # a view of _inputs._block
    "_graphs._replays[*][*].logits",
    "_decoder._attention._zeros",  # and _ones
    "_decoder._attention._row_ids",
    "_decoder._attention._kv[*][*]",  # the KV pool
    f"{_WRAPPERS}._workspace",
    *(f"{_WRAPPERS}._captured_decode[*].{name}" for name in _OF_A_GRAPH),
    "flashinfer.utils._cache_buf[*]",
    "_decoder._ops._cos_sin",
    *(f"_decoder._weights.{name}" for name in ("embedding", "final_norm", "head")),
    *(f"_decoder._weights.layers[*].{name}" for name in _OF_A_LAYER),
}
# What passes between captured pieces and attention.
PASSED = {f"_pieces._passed.{name}" for name in ("hidden", "projected", "mixed")}


def graphs_of(runner: ModelRunner) -> list[LateGraph]:
    assert runner.graphs is not None
    replays = [replay for replay, _ in runner.graphs._replays.values()]
    if runner._pieces is not None:
        replays += chain(*(pieces for pieces, *_ in runner._pieces._replays.values()))
    return [replay.__self__ for replay in replays]  # type: ignore[attr-defined]


def fields(value: Any) -> Iterator[tuple[str, Any]]:
    """The named parts of an object of the worker or of FlashInfer."""
    if type(value).__module__.split(".")[0] not in ("gpu_worker", "flashinfer"):
        return
    names = [
        *getattr(value, "__dict__", {}),
        *(name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())),
    ]
    for name in names:
        if hasattr(value, name):
            yield name, getattr(value, name)


def visit(value: Any, path: str, change: Callable[[str, LateTensor], Any], seen: set[int]) -> Any:
    """Call `change` for each tensor on the device, and put its result there. Returns the value with the changes."""
    if isinstance(value, LateTensor):
        return change(path, value)
    if isinstance(value, tuple):
        parts = [visit(one, f"{path}[*]", change, seen) for one in value]
        return value if all(a is b for a, b in zip(parts, value, strict=True)) else type(value)(parts)
    if id(value) in seen:
        return value
    seen.add(id(value))
    if isinstance(value, list):
        value[:] = [visit(one, f"{path}[*]", change, seen) for one in value]
    elif isinstance(value, dict):
        for key, one in list(value.items()):
            value[key] = visit(one, f"{path}[*]", change, seen)
    else:
        for name, one in fields(value):
            if (changed := visit(one, f"{path}.{name}", change, seen)) is not one:
                object.__setattr__(value, name, changed)
    return value


def visit_all(runner: ModelRunner, change: Callable[[str, LateTensor], Any]) -> None:
    visit(runner, "", change, set())
    visit(importlib.import_module("flashinfer.utils")._cache_buf, "flashinfer.utils._cache_buf", change, set())


def captured(runner: ModelRunner) -> dict[Allocation, str]:
    """The buffers of all graphs, and where each one is named first."""
    inputs = set().union(*(graph.inputs for graph in graphs_of(runner)))
    found: dict[Allocation, str] = {}

    def note(path: str, tensor: LateTensor) -> LateTensor:
        if tensor.memory.allocation in inputs:
            found.setdefault(tensor.memory.allocation, path.removeprefix("."))
        return tensor

    visit_all(runner, note)
    assert set(found) == inputs, "a graph uses memory that no part of the worker keeps"
    return found


@torch.inference_mode()
def replace(runner: ModelRunner, buffer: Allocation) -> None:
    """Give all parts of the worker a new buffer with the same content."""

    def change(path: str, tensor: LateTensor) -> Any:
        return tensor.clone() if tensor.memory.allocation is buffer else tensor

    visit_all(runner, change)


def replay_all(runner: ModelRunner) -> None:
    for graph in graphs_of(runner):
        graph.replay()


@pytest.mark.parametrize(("graph_max_tokens", "expected"), [(0, BUFFERS), (32, BUFFERS | PASSED)])
def test_every_buffer_that_is_replaced_is_noticed(
    graph_max_tokens: int, expected: set[str], reference: Callable[[str], Reference]
) -> None:
    folder = reference("mistral").folder
    with late_gpu():
        runner = gpu_runner(folder, graph_max_tokens=graph_max_tokens)
        buffers = captured(runner)
        for buffer, name in buffers.items():
            replace(runner, buffer)
            assert buffer.is_free, f"{name} is kept elsewhere"
            with pytest.raises(StaleGraph):
                replay_all(runner)
            buffer.is_free = False  # as if it had not been replaced
    assert set(buffers.values()) == expected
