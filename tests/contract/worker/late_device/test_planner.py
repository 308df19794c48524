"""FlashInfer's own planner, compiled for the host, on the simulated GPU: the tiles, chunks and merges that it plans
give the results of a CPU, and a graph's plan keeps its numbers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bench.device.load import LoadRequest
from tests.contract.worker.late_device.rig import check_equal, cpu_runner, gpu_runner, make_plans, play
from tests.support.late_device.device import LateDevice
from tests.support.late_device.planner import NUM_PLAN_INFO, PlannedFa2, compile_planner
from tests.support.late_device.worker import late_gpu
from tests.unit.worker.families import Reference

MULTIPROCESSORS = 16
REQUESTS = [LoadRequest(prompt, 0, outputs) for prompt, outputs in ((300, 8), (150, 12), (40, 9), (3, 12))]


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_planner(tmp_path_factory.mktemp("planner"))


@pytest.mark.parametrize("family", ["llama3-rope", "mistral"])
def test_a_model_with_flashinfers_plans_is_as_on_a_cpu(
    family: str, planner: ctypes.CDLL, reference: Callable[[str], Reference]
) -> None:
    folder, settings = reference(family).folder, {"max_batched_tokens": 64}
    runner = cpu_runner(folder, **settings)
    plans = make_plans(runner, REQUESTS)
    expected = play(runner, plans)
    attentions: list[PlannedFa2] = []

    def make_attention(device: LateDevice, *options: Any) -> PlannedFa2:
        attentions.append(PlannedFa2(device, planner, MULTIPROCESSORS, *options))
        return attentions[-1]

    with late_gpu(seed=1, make_attention=make_attention) as device:
        check_equal(play(gpu_runner(folder, **settings), plans, window=2), expected)
    assert device.num_replays > 5
    assert len(attentions[0].graph_plans) == 4, "each graph has one plan"
    if family == "llama3-rope":  # a window of 24 tokens needs no second chunk
        assert attentions[0].split_steps > 5


def plan(planner: ctypes.CDLL, kv_blocks: list[int], window: int) -> list[int]:
    """The numbers of the plan of a graph's decodes, for a model like Llama-3.1-8B on a GPU with 132 multiprocessors."""
    batch, pinned = len(kv_blocks), np.zeros(8 << 20, np.uint8)
    qo_indptr = np.arange(batch + 1, dtype=np.int32)
    kv_indptr = np.concatenate(([0], np.cumsum(kv_blocks))).astype(np.int32)
    numbers = (ctypes.c_int64 * NUM_PLAN_INFO)()
    address = ctypes.c_void_p(pinned.ctypes.data)
    copied = planner.planner_plan(
        132, address, ctypes.c_long(384 << 20), address, address, ctypes.c_long(pinned.nbytes),
        ctypes.c_void_p(qo_indptr.ctypes.data), ctypes.c_void_p(kv_indptr.ctypes.data),
        batch, batch, 32, 8, 128, 16, 1, window, -1, 0, ctypes.c_long(0), ctypes.c_long(0), numbers,
    )  # fmt: skip
    assert copied > 0, planner.planner_message()
    return list(numbers)


@pytest.mark.parametrize("window", [-1, 1023])
@pytest.mark.parametrize("size", [1, 2, 8, 64, 256])
def test_a_graph_plans_the_same_numbers_for_any_lengths(size: int, window: int, planner: ctypes.CDLL) -> None:
    """The numbers of a plan are arguments of the captured kernels, so they must not change. Only the tables in the
    workspace may change."""
    rng = np.random.default_rng(size)
    wanted = plan(planner, [1] * size, window)
    for longest in (1, 8, 9, 100, 2048):
        for _ in range(5):
            assert plan(planner, rng.integers(1, longest + 1, size).tolist(), window) == wanted
