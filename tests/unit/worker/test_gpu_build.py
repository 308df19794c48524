"""What building a worker for a GPU decides, as far as it is arithmetic."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker import build as build_module
from gpu_worker import memory
from gpu_worker.build import BuiltWorker
from gpu_worker.errors import ModelError
from gpu_worker.memory import kv_blocks_that_fit
from gpu_worker.sampling.prompt_scores import SCORER_BYTES_PER_LOGIT, SLICE_BYTES
from gpu_worker.settings import WorkerSettings
from gpu_worker.steps.slots import SlotLimits
from gpu_worker.steps.step_arrays import largest_step
from tests.unit.worker.families import Reference

GIB = 2**30


@settings(deadline=None)
@given(
    free_gib=st.integers(30, 140),
    needed_gib=st.integers(0, 10),
    utilization=st.floats(0.5, 1.0),
    block_bytes=st.integers(1 << 12, 1 << 22),
)
def test_blocks_fill_the_memory_that_is_left(
    free_gib: int, needed_gib: int, utilization: float, block_bytes: int
) -> None:
    total, free, needed = 140 * GIB, free_gib * GIB, needed_gib * GIB
    left = total * utilization - (total - free) - needed
    if left < 2 * block_bytes + 1:
        with pytest.raises(ModelError, match="gpu_memory_utilization"):
            kv_blocks_that_fit(total, free, needed, utilization, block_bytes)
        return
    blocks = kv_blocks_that_fit(total, free, needed, utilization, block_bytes)
    assert (blocks + 1) * block_bytes <= left + 1  # the dummy block takes its place too
    assert (blocks + 2) * block_bytes > left - 1


def test_the_message_says_where_the_memory_went() -> None:
    with pytest.raises(ModelError, match=r"0\.9 of 80\.0 GiB, 70\.0 GiB taken by weights and others, 3\.0 GiB needed"):
        kv_blocks_that_fit(80 * GIB, 10 * GIB, 3 * GIB, 0.9, 1 << 20)


@settings(deadline=None)
@given(
    seqs=st.integers(1, 40),
    batched=st.integers(1, 300),
    length=st.integers(2, 100),
    block_size=st.sampled_from([1, 7, 16]),
)
def test_the_largest_step_is_a_possible_step(seqs: int, batched: int, length: int, block_size: int) -> None:
    limits = SlotLimits(seqs, batched, length, block_size, 10, 50, ())
    arrays = largest_step(limits)
    lengths = np.diff(arrays.qo_indptr)
    assert arrays.num_rows == lengths.sum() == min(batched, seqs * length)
    assert len(lengths) <= seqs
    assert lengths.max() <= length
    assert ((np.diff(arrays.kv_indptr) - 1) * block_size + arrays.last_block_len == lengths).all()
    assert len(arrays.kv_indices) == arrays.kv_indptr[-1] <= seqs * -(-length // block_size)
    assert len(arrays.sampled_slots) <= seqs


def test_flashinfer_without_a_gpu_is_refused(
    reference: Callable[[str], Reference], build: Callable[..., BuiltWorker]
) -> None:
    with pytest.raises(ModelError, match=r"attention_backend flashinfer cannot serve .*: it needs an NVIDIA GPU"):
        build(reference("qwen2").folder, attention_backend="flashinfer")


def _model(head_dim: int, dtype: torch.dtype) -> Any:
    return SimpleNamespace(name="m", dtype=dtype, config=SimpleNamespace(head_dim=head_dim))


@pytest.mark.parametrize(
    ("head_dim", "dtype", "reason"), [(16, torch.bfloat16, "head_dim 16"), (64, torch.float32, "float32")]
)
def test_a_model_that_flashinfer_cannot_serve_runs_on_torch_and_one_line_says_so(
    head_dim: int, dtype: torch.dtype, reason: str
) -> None:
    with structlog.testing.capture_logs() as lines:
        chosen = build_module._flashinfer(WorkerSettings(), _model(head_dim, dtype), torch.device("cuda"))
    assert chosen is None
    assert [(line["model"], reason in line["reason"]) for line in lines] == [("m", True)]


@pytest.mark.parametrize(("environment", "expected"), [({}, "1"), ({"FLASHINFER_USE_CUDA_NORM": "0"}, "0")])
def test_flashinfer_is_imported_with_its_cuda_norms_unless_the_environment_says_no(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", environment)
    imported: list[tuple[str, dict[str, str]]] = []
    monkeypatch.setattr(importlib, "import_module", lambda name: imported.append((name, dict(environment))))
    build_module._flashinfer(WorkerSettings(), _model(64, torch.bfloat16), torch.device("cuda"))
    assert imported == [("flashinfer", {"FLASHINFER_USE_CUDA_NORM": expected})]


def test_the_choice_of_torch_attention_is_not_logged() -> None:
    settings = WorkerSettings(attention_backend="torch")
    with structlog.testing.capture_logs() as lines:
        assert build_module._flashinfer(settings, _model(16, torch.float32), torch.device("cuda")) is None
    assert lines == []


@pytest.mark.parametrize(
    ("flashinfer", "embedding", "asked", "expected"),
    [
        (True, None, 0, []),
        (True, None, 48, []),
        (True, None, 49, [("graph_max_tokens is limited to max_batched_tokens", None)]),
        (False, None, 48, [("graph_max_tokens is ignored", "the layers do not run on flashinfer")]),
        (True, "last", 48, [("graph_max_tokens is ignored", "an embedding model has no graphs")]),
        (False, "last", 0, []),
    ],
)
def test_graph_max_tokens_without_its_effect_is_logged(
    flashinfer: bool, embedding: str | None, asked: int, expected: list[tuple[str, str | None]]
) -> None:
    model: Any = SimpleNamespace(name="m", embedding=embedding)
    module: Any = object() if flashinfer else None
    settings = WorkerSettings(graph_max_tokens=asked, max_batched_tokens=48)
    make = build_module._RunnerMaker(settings, model, torch.device("cuda"), 100, module, None, False)
    with structlog.testing.capture_logs() as lines:
        make.log_piece_limits()
    assert [(line["event"], line.get("reason")) for line in lines] == expected


class TrialDevice:
    """A device with its free memory in MiB. Its allocator caches memory until it is told to release it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self._cached = [5000], 0
        monkeypatch.setattr(memory, "_free_bytes", lambda device: self.free[0] << 20)
        monkeypatch.setattr(memory, "CudaCapture", lambda: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty_cache)

    def take_for_a_moment(self, mib: int) -> None:
        more = max(0, mib - self._cached)
        self.free[0] -= more
        self._cached += more

    def empty_cache(self) -> None:
        self.free[0] += self._cached
        self._cached = 0


class TrialRunner:
    """Takes memory as a runner on a GPU does."""

    of_each_other_graph = 27
    pools = False

    def __init__(self, device: TrialDevice) -> None:
        self._device, self._free = device, device.free
        self.limits = SlotLimits(10, 64, 64, 16, 1, 1000, ())
        self.captured: list[int] = []
        self._free[0] -= 400  # workspaces

    def try_largest_step(self) -> None:
        self._device.take_for_a_moment(300)

    def capture_pieces(self, sizes: list[int], capture: object, progress: Callable[[int, int], None]) -> None:
        self._free[0] -= 100  # what passes between the pieces
        self.capture_graphs(sizes, capture, progress)

    def capture_graphs(self, sizes: list[int], capture: object, progress: Callable[[int, int], None]) -> None:
        for done, size in enumerate(sorted(sizes, reverse=True)):
            progress(done, len(sizes))
            self._device.take_for_a_moment(10)  # the step is run once, and then the capture empties the cache
            torch.cuda.empty_cache()
            self._free[0] -= 50 if done == 0 else self.of_each_other_graph
            self.captured.append(size)
        progress(len(sizes), len(sizes))


def trial(device: TrialDevice) -> Callable[[], Any]:
    return lambda: TrialRunner(device)


@pytest.mark.parametrize(("sizes", "graphs_mib"), [([], 0), ([8], 50), ([4, 8], 77), ([1, 2, 4, 8], 50 + 3 * 27)])
def test_the_memory_of_steps_is_measured_by_a_trial(
    sizes: list[int], graphs_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest graph counts as measured. Each other graph counts as much as the second one takes."""
    device = TrialDevice(monkeypatch)
    needed = memory.bytes_for_steps(trial(device), sizes, torch.device("cpu"))
    sampling = 10 * (memory.SAMPLER_BYTES_PER_LOGIT * 1000 + memory.SAMPLER_BYTES_PER_ROW)
    counts = 10 * memory.COUNTS_BYTES_PER_LOGIT * 1000
    assert needed == ((400 + 300 + graphs_mib) << 20) + sampling + counts


def test_the_memory_of_captured_pieces_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    device = TrialDevice(monkeypatch)
    alone = memory.bytes_for_steps(trial(device), [], torch.device("cpu"))
    needed = memory.bytes_for_steps(trial(device), [], torch.device("cpu"), [16, 32, 48], 2)
    assert needed - alone == (100 + 50 + 2 * 27) << 20
    monkeypatch.setattr(TrialRunner, "of_each_other_graph", 0)
    needed = memory.bytes_for_steps(trial(device), [], torch.device("cpu"), [16, 32, 48], 2)
    assert needed - alone == (150 << 20) + 2 * memory.MIN_PIECE_BYTES


def test_an_embedding_model_needs_no_memory_for_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    device = TrialDevice(monkeypatch)
    monkeypatch.setattr(TrialRunner, "pools", True)
    assert memory.bytes_for_steps(trial(device), [], torch.device("cpu")) == (400 + 300) << 20


def test_a_graph_counts_even_if_the_allocator_had_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device = TrialDevice(monkeypatch)
    monkeypatch.setattr(TrialRunner, "of_each_other_graph", 0)
    alone = memory.bytes_for_steps(trial(device), [8], torch.device("cpu"))
    needed = memory.bytes_for_steps(trial(device), [1, 2, 4, 8], torch.device("cpu"))
    assert needed - alone == 2 * memory.MIN_GRAPH_BYTES  # of the two that are not tried


def test_the_memory_of_scoring_counts_where_it_is_more_than_that_of_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step has one sequence, and enough rows to fill a slice of logits."""
    device = TrialDevice(monkeypatch)

    def make_runner() -> Any:
        runner = TrialRunner(device)
        runner.limits = SlotLimits(1, 8192, 8192, 16, 1, 2**17, ())
        return runner

    needed = memory.bytes_for_steps(make_runner, [], torch.device("cpu"))
    counts = memory.COUNTS_BYTES_PER_LOGIT * 2**17
    assert needed == (700 << 20) + SCORER_BYTES_PER_LOGIT * SLICE_BYTES // 4 + counts
