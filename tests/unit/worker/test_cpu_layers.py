"""All layers of a step in one call: the same numbers as layer by layer, and each row by itself."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch

from gpu_worker.attention.base import AttentionMetadata
from gpu_worker.build import BuiltWorker
from gpu_worker.cpu.compiling import CompiledKernel
from gpu_worker.cpu.layers import all_layers as module
from gpu_worker.cpu.layers.all_layers import CpuLayers, cpu_layers
from gpu_worker.cpu.layers.arguments import SKIPS_QUERIES, STREAM
from gpu_worker.cpu.layers.one_row import ThreadsOfOneRow
from gpu_worker.cpu.matmul import PackedMatmul
from gpu_worker.cpu.ops import CpuOps
from gpu_worker.cpu.products import MOST_ROWS as MOST_HEAD_ROWS
from gpu_worker.cpu.products import MOST_TABLE_ROWS, FewRows
from gpu_worker.cpu.vectors import has_vectors
from gpu_worker.models.config import DecoderConfig
from paceline.v1.worker_pb2 import StepPlan
from services.runtime.processes import whole_cores
from tests.support.attention import Extents
from tests.unit.worker.driver import Driver, pack
from tests.unit.worker.families import VOCAB, Reference
from tests.unit.worker.small_decoders import (
    CountedLayers,
    SmallDecoder,
    config_of,
    content_of,
    step_of,
    torch_states,
    weights_of,
)

TYPES = [torch.float32, torch.bfloat16]
MANY_ROWS = 128
NARROW = {"head_dim": 32}
CONFIGS = {
    "wide": config_of(),
    "narrow": config_of(**NARROW),
    "narrow, few": config_of(head_dim=16, num_heads=2, num_kv_heads=1),  # 32 queries, half a block of outputs
    "wide, biases": config_of(qkv_bias=True, architecture="Qwen2ForCausalLM"),
    "narrow, biases": config_of(**NARROW, qkv_bias=True, architecture="Qwen2ForCausalLM"),
    "wide, norms": config_of(qk_norm=True, architecture="Qwen3ForCausalLM"),
    "narrow, norms": config_of(**NARROW, qk_norm=True, architecture="Qwen3ForCausalLM"),
    "wide, windows": config_of(windows=(10, 0), architecture="MistralForCausalLM"),
    "narrow, windows": config_of(**NARROW, windows=(0, 5), architecture="MistralForCausalLM"),
}
# Tokens of a sequence before the step: none, and around the ends of blocks and windows.
PREFIXES = (0, 3, 4, 5, 9, 10, 11, 30, 1, 17, 2, 23)


def _decodes(count: int) -> Extents:
    return [(PREFIXES[i % len(PREFIXES)], 1) for i in range(count)]


@cache
def _decoder(name: str, dtype: torch.dtype, threads: int, at_once: bool = True) -> SmallDecoder:
    return SmallDecoder(CONFIGS[name], dtype, threads, at_once=at_once)


@pytest.fixture(params=TYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    if not has_vectors(request.param):
        pytest.skip(f"this CPU has no vector instructions for {request.param}")
    return request.param


def _assert_close(ours: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> None:
    """Both round at the same places, but not always to the same side. Later layers multiply the difference."""
    rounding = 2**-6 if dtype == torch.bfloat16 else 1e-5
    size = float(other.float().nan_to_num().abs().max()) if len(other) else 0
    torch.testing.assert_close(ours.float(), other.float(), rtol=rounding, atol=rounding * size, equal_nan=True)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_computes_what_it_computes_layer_by_layer(name: str, threads: int, dtype: torch.dtype) -> None:
    ours, other = _decoder(name, dtype, threads), _decoder(name, dtype, threads, at_once=False)
    assert ours.layers is not None
    chunks = [*_decodes(3), (9, 2), (0, 8), (6, 5)]
    for extents in [*map(_decodes, (1, 2, 3, 5, 8, 13, 32, 33, MANY_ROWS)), chunks]:
        step = step_of(extents, seed=len(extents))
        content, before = content_of(step, ours.pool), ours.layers.runs[True]
        found = ours.run(step, content)
        assert ours.layers.runs[True] == before + 1
        assert found.isfinite().all()
        _assert_close(found, other.run(step, content), dtype)
        _assert_close(ours.pool.storage, other.pool.storage, dtype)
        written = ours.pool.storage.isnan() != content.isnan()
        assert int(written.sum()) == ours.pool.storage[:, :, 0, 0].numel() * len(found)  # a slot of each row
        if dtype == torch.float32:
            exact, stored = torch_states(CONFIGS[name], step, content)
            _assert_close(found, exact, dtype)
            _assert_close(ours.pool.storage.nan_to_num(), stored, dtype)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_the_hidden_states(tied: bool, threads: int, dtype: torch.dtype) -> None:
    """Also with a hidden size at which another compiled norm would round a few rows differently."""
    config = config_of(vocab_size=128, tie_embeddings=tied, hidden_size=1024)
    ours = SmallDecoder(config, dtype, threads, at_once=True)
    assert ours.layers is not None
    most = MOST_TABLE_ROWS if tied else MOST_HEAD_ROWS
    chunks = [*_decodes(3), (9, 2), (0, 7)]
    for extents in [*map(_decodes, (1, 2, 5, most)), chunks]:
        step = step_of(extents)
        content, before = content_of(step, ours.pool), ours.layers.runs[True]
        hidden, stored = ours.run(step, content), ours.pool.storage.clone()
        ours.pool.storage.copy_(content)
        ours.attention.plan(step.metadata)
        logits = ours.decoder.all_logits(step.token_ids, step.positions)
        assert ours.layers.runs[True] == before + 2
        assert torch.equal(logits, ours.decoder.logits(hidden))
        at_once, head = ours.layers.logits(step.token_ids, step.positions), ours.layers.head(hidden)
        assert at_once is not None
        assert head is not None
        assert torch.equal(at_once, logits)
        assert torch.equal(head, logits)
        assert torch.equal(ours.pool.storage.nan_to_num(), stored.nan_to_num())
    step = step_of(_decodes(most + 1))
    hidden = ours.run(step, content_of(step, ours.pool))
    assert ours.layers.logits(step.token_ids, step.positions) is None
    assert ours.layers.head(hidden) is None
    assert torch.equal(ours.decoder.all_logits(step.token_ids, step.positions), ours.decoder.logits(hidden))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_does_not_depend_on_other_rows_or_threads(name: str, dtype: torch.dtype) -> None:
    step = step_of(_decodes(MANY_ROWS))
    ours = _decoder(name, dtype, 1)
    content = content_of(step, ours.pool)
    whole, stored = ours.run(step, content), ours.pool.storage.clone()
    for threads in (1, 2):
        ours = _decoder(name, dtype, threads)
        order = np.random.default_rng(threads).permutation(MANY_ROWS).tolist()
        for begin, end in (
            (0, MANY_ROWS),
            (0, 1),
            (1, 3),
            (3, 6),
            (6, 11),
            (11, 43),
            *((i, i + 1) for i in range(1, 32)),
        ):
            which = order[begin:end]
            assert torch.equal(ours.run(step.of(which), content), whole[which])
            for i in which:
                block, token = step.tables[i][-1], step.extents[i][0] % step.block_size
                assert torch.equal(ours.pool.storage[:, :, block, token], stored[:, :, block, token])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_rows_of_a_short_chunk_see_the_rows_before_them(name: str, threads: int, dtype: torch.dtype) -> None:
    """The rows of a chunk, at once and one after another, are the same bits."""
    ours = _decoder(name, dtype, threads)
    step = step_of([(12, 1), (0, 8), (9, 7), (3, 2)])
    content = content_of(step, ours.pool)
    whole, stored = ours.run(step, content), ours.pool.storage.clone()
    ours.pool.storage.copy_(content)
    one_by_one = [
        ours.run(step.part(sequence, token, 1))
        for sequence, (_, count) in enumerate(step.extents)
        for token in range(count)
    ]
    assert torch.equal(torch.cat(one_by_one), whole)
    assert torch.equal(ours.pool.storage.nan_to_num(), stored.nan_to_num())


# Decodes, a short chunk, and longer chunks: at the start of a sequence, and after tokens that the pool has.
MIXED: Extents = [(12, 1), (3, 1), (0, 8), (0, 9), (7, 40), (30, 70)]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", [name for name in CONFIGS if "wide" in name])
def test_a_step_with_long_chunks_computes_what_it_computes_layer_by_layer(
    name: str, threads: int, dtype: torch.dtype
) -> None:
    """It reads nothing of the pool behind a sequence's tokens, where here NaN is."""
    ours, other = _decoder(name, dtype, threads), _decoder(name, dtype, threads, at_once=False)
    assert ours.layers is not None
    for extents in (MIXED, [(0, 9)], [(5, 150)], [(0, 65), (0, 64)]):
        step = step_of(extents, seed=len(extents))
        content, before = content_of(step, ours.pool), ours.layers.runs[True]
        found = ours.run(step, content)
        assert ours.layers.runs[True] == before + 1
        assert found.isfinite().all()
        _assert_close(found, other.run(step, content), dtype)
        _assert_close(ours.pool.storage, other.pool.storage, dtype)
        if dtype == torch.float32:
            exact, stored = torch_states(CONFIGS[name], step, content)
            _assert_close(found, exact, dtype)
            _assert_close(ours.pool.storage.nan_to_num(), stored, dtype)


@pytest.mark.parametrize("name", ["wide", "wide, windows"])
def test_a_chunk_does_not_depend_on_other_rows_or_threads(name: str, dtype: torch.dtype) -> None:
    step = step_of(MIXED)
    ours = _decoder(name, dtype, 1)
    content = content_of(step, ours.pool)
    whole = ours.run(step, content)
    ends = np.cumsum([count for _, count in MIXED])
    for threads in (1, 2):
        ours = _decoder(name, dtype, threads)
        for sequence, (end, (_, count)) in enumerate(zip(ends, MIXED, strict=True)):
            assert torch.equal(ours.run(step.of([sequence]), content), whole[end - count : end])
        assert torch.equal(ours.run(step, content), whole)


@pytest.mark.parametrize("extents", [[(3, 1), (7, 9)], [(0, 9)]], ids=["both", "chunk"])
def test_a_step_with_narrow_heads_and_a_long_chunk_runs_layer_by_layer(extents: Extents, dtype: torch.dtype) -> None:
    ours, other = (_decoder("narrow, windows", dtype, 2, at_once=at_once) for at_once in (True, False))
    assert ours.layers is not None
    step = step_of(extents)
    content, before = content_of(step, ours.pool), dict(ours.layers.runs)
    ours.pool.storage.copy_(content)
    ours.attention.plan(step.metadata)
    assert ours.layers.run(step.token_ids, step.positions) is None
    assert ours.layers.logits(step.token_ids, step.positions) is None
    assert torch.equal(ours.pool.storage.nan_to_num(), content.nan_to_num())
    found = ours.run(step, content)
    assert found.isfinite().all()
    assert torch.equal(found, other.run(step, content))
    assert ours.layers.runs == {True: before[True], False: before[False] + 3}


def test_nan_in_a_sequence_does_not_reach_other_rows(dtype: torch.dtype) -> None:
    for name in ("wide, windows", "narrow"):
        ours = _decoder(name, dtype, 2)
        step = step_of([(9, 1), (11, 3), (5, 1)])
        content = content_of(step, ours.pool)
        whole = ours.run(step, content)
        content[:, :, step.tables[1][-2]] = torch.nan
        found = ours.run(step, content)
        assert found[1:4].isnan().all()
        assert torch.equal(found[[0, 4]], whole[[0, 4]])


def test_nan_in_a_chunk_does_not_reach_other_rows(dtype: torch.dtype) -> None:
    ours = _decoder("wide, windows", dtype, 2)
    step = step_of([(9, 1), (11, 30), (5, 20)])
    content = content_of(step, ours.pool)
    whole = ours.run(step, content)
    content[:, :, step.tables[1][0]] = torch.nan
    found = ours.run(step, content)
    assert found[1:31].isnan().any()
    others = [0, *range(31, 51)]
    assert torch.equal(found[others], whole[others])


@pytest.mark.parametrize("extents", [[(9, 1), (11, 3)], [(9, 1), (11, 60)]], ids=["short", "long"])
@pytest.mark.parametrize("threads", [1, 2])
def test_only_wanted_rows_are_returned(extents: Extents, threads: int, dtype: torch.dtype) -> None:
    """The pool gets the keys and values of all rows."""
    ours = _decoder("wide", dtype, threads)
    assert ours.layers is not None
    step = step_of(extents)
    content, before = content_of(step, ours.pool), ours.layers.runs[True]
    whole, stored = ours.run(step, content), ours.pool.storage.clone()
    cases: list[list[int]] = [[3, 0], [], [2], list(range(len(whole)))]
    for wanted in cases:
        ours.pool.storage.copy_(content)
        ours.attention.plan(step.metadata)
        rows = torch.tensor(wanted, dtype=torch.int64)
        _assert_close(ours.decoder.forward(step.token_ids, step.positions, rows), whole[wanted], dtype)
        assert torch.equal(ours.pool.storage.nan_to_num(), stored.nan_to_num())
    assert ours.layers.runs[True] == before + 5


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_last_layer_computes_attention_for_a_few_wanted_rows_alone(
    name: str, threads: int, dtype: torch.dtype
) -> None:
    ours = _decoder(name, dtype, threads)
    assert ours.cpu_layers is not None
    step = step_of(
        [(9, 1), (11, 38), (0, 8), (30, 1)] if name.startswith("wide") else [(9, 1), (11, 8), (0, 6), (30, 1)]
    )
    content, count = content_of(step, ours.pool), len(step.positions)
    whole, stored = ours.run(step, content), ours.pool.storage.clone()
    quarter = [0, 1, 5, *range(count - count // 4 + 3, count)]
    for wanted in [[count - 1], [count - 1, 0, 1, 4], [5, count - 3], [], quarter, [*quarter, 2]]:
        ours.pool.storage.copy_(content)
        ours.attention.plan(step.metadata)
        rows = torch.tensor(wanted, dtype=torch.int64)
        _assert_close(ours.decoder.forward(step.token_ids, step.positions, rows), whole[wanted], dtype)
        assert ours.cpu_layers._arguments[SKIPS_QUERIES] == (4 * len(wanted) <= count and name != "narrow, few")
        assert torch.equal(ours.pool.storage.nan_to_num(), stored.nan_to_num())


def test_more_than_two_wanted_rows_of_each_chunk_are_computed_with_their_chunks(dtype: torch.dtype) -> None:
    ours, step = _decoder("wide", dtype, 2), step_of([(0, 40), (11, 40)])
    assert ours.cpu_layers is not None
    whole = ours.run(step, content_of(step, ours.pool))
    for wanted, skips in (([3, 9, 41, 77], True), ([3, 9, 41, 42, 77], False)):
        ours.attention.plan(step.metadata)
        found = ours.decoder.forward(step.token_ids, step.positions, torch.tensor(wanted, dtype=torch.int64))
        _assert_close(found, whole[wanted], dtype)
        assert ours.cpu_layers._arguments[SKIPS_QUERIES] == skips


def test_the_last_layer_ends_after_its_attention_if_no_row_is_wanted(dtype: torch.dtype) -> None:
    ours = _decoder("wide", dtype, 2)
    layers, step = ours.cpu_layers, step_of([(9, 1), (11, 60)])
    assert layers is not None
    states = []
    for wanted in ([2], []):
        ours.pool.storage.copy_(content_of(step, ours.pool))
        ours.attention.plan(step.metadata)
        ours.decoder.forward(step.token_ids, step.positions, torch.tensor(wanted, dtype=torch.int64))
        states.append(layers._scratch[STREAM][:61].clone())
    assert states[0].isfinite().all()
    assert torch.equal(*states)


def test_a_step_without_memory_leaves_the_function_as_it_was(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = SmallDecoder(CONFIGS["wide"], dtype, 1, at_once=True)
    small, large = step_of(_decodes(2)), step_of([(0, 60)])
    expected = ours.run(small, content_of(small, ours.pool))
    whole = _decoder("wide", dtype, 1).run(large, content_of(large, ours.pool))
    empty = torch.empty

    def limited(*shape: int, **options: Any) -> torch.Tensor:
        if shape == (60, 2 * CONFIGS["wide"].intermediate_size):
            raise MemoryError
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", limited)
    with pytest.raises(MemoryError):
        ours.run(large, content_of(large, ours.pool))
    monkeypatch.undo()
    assert torch.equal(ours.run(small, content_of(small, ours.pool)), expected)
    assert torch.equal(ours.run(large, content_of(large, ours.pool)), whole)


def _made(config: DecoderConfig, dtype: torch.dtype, threads: int = 1, pack: bool = True) -> CpuLayers | None:
    ready = _decoder("wide", dtype, threads)
    matmul = PackedMatmul(FewRows(dtype, threads))
    weights = weights_of(config, dtype, pack)
    ops = ready.decoder._ops
    assert isinstance(ops, CpuOps)
    options = {"takes_both_cores": False, "with_bounds": False}
    return cpu_layers(config, weights, ready.pool, ready.attention, ops, matmul, threads, **options)


def test_models_that_the_function_cannot_compute_have_none(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _made(config_of(), dtype) is not None
    assert _made(config_of(output_bias=True), dtype) is None
    assert _made(config_of(), dtype, pack=False) is None
    assert _made(config_of(hidden_size=96), dtype) is None  # no multiple of 64 outputs
    if numba.config.NUMBA_NUM_THREADS > 1:
        assert _made(config_of(), dtype, threads=2) is not None
        monkeypatch.setattr(module, "threading_layer", lambda: "tbb")
        assert _made(config_of(), dtype, threads=2) is None


def test_a_thread_that_waits_in_vain_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the other thread never comes, and the test sets the flag which the waiting thread sets after its last
    pause."""
    if not has_vectors(torch.float32):
        pytest.skip("this CPU has no vector instructions for float32")
    ours = _decoder("wide", torch.float32, 2)
    layers = ours.cpu_layers
    assert layers is not None
    arrived = layers._arrived
    one_thread = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(layers._function.address)

    class Alone:
        threads = 2

        def __call__(self, _function: int, *arguments: int) -> None:
            waiting = threading.Thread(target=one_thread, args=(*arguments[:3], 0, 2), daemon=True)
            waiting.start()
            time.sleep(0.2)
            assert waiting.is_alive()
            assert arrived.tolist() == [1, 0, 0]
            arrived[1] = 1
            waiting.join(10)
            assert not waiting.is_alive()

    monkeypatch.setattr(layers, "_run", Alone())
    step = step_of(_decodes(2))
    with pytest.raises(RuntimeError, match="do not run at the same time"):
        ours.run(step, content_of(step, ours.pool))
    monkeypatch.undo()
    ours.run(step, content_of(step, ours.pool))  # the next step runs


@pytest.mark.parametrize("extents", [_decodes(2), _decodes(MOST_HEAD_ROWS + 1), [(3, 1), (7, 9)]])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_step_says_once_when_its_kernels_start(extents: Extents, at_once: bool, dtype: torch.dtype) -> None:
    """Also a step that the function for all layers refuses."""
    ours = _decoder("narrow, windows", dtype, 1, at_once=at_once)
    calls: list[bool] = []
    step = step_of(extents)
    content = content_of(step, ours.pool)

    def note() -> None:
        calls.append(torch.equal(ours.pool.storage.nan_to_num(), content.nan_to_num()))

    ours.decoder.before_kernels = note
    ours.run(step, content)
    assert calls == [True]
    ours.pool.storage.copy_(content)
    ours.decoder.all_logits(step.token_ids, step.positions)
    assert calls == [True, True]


def test_a_step_does_not_copy_blocks_before_it_says_so(
    reference: Callable[[str], Reference], build: Callable[..., BuiltWorker]
) -> None:
    runner = build(reference("qwen2").folder).runner
    runner._pool.storage[:, :, 1] = 1
    copied: list[bool] = []
    runner.call_before_kernels(lambda: copied.append(bool(runner._pool.storage[:, :, 2].any())))
    runner.launch(StepPlan(step=1, copy_from=pack([1]), copy_to=pack([2])))
    assert copied == [False]
    assert runner._pool.storage[:, :, 2].all()


@pytest.mark.parametrize("workers", [1, whole_cores()])
def test_a_step_that_takes_all_cores_says_so_before_it_prepares(
    workers: int, reference: Callable[[str], Reference], build: Callable[..., BuiltWorker]
) -> None:
    runner = build(reference("qwen2").folder, local_workers=workers).runner  # of one thread
    prepared: list[bool] = []
    seen: list[bool] = []
    plan_rows = runner._attention.plan

    def plan(metadata: AttentionMetadata) -> None:
        prepared.append(True)
        plan_rows(metadata)

    runner._attention.plan = plan  # type: ignore[method-assign]
    runner.call_before_kernels(lambda: seen.append(bool(prepared)))
    driver = Driver(runner)
    driver.add([1, 2, 3], 1)
    driver.run()
    assert seen[0] == (workers < whole_cores())


def test_one_row_takes_one_thread_if_two_are_all_cores(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    if numba.config.NUMBA_NUM_THREADS < 2:
        pytest.skip("numba has one thread")
    used: list[int] = []

    class Counted:
        def __init__(self, kernel: CompiledKernel) -> None:
            self.threads, self._kernel = kernel.threads, kernel

        def __call__(self, *arguments: int) -> None:
            used.append(arguments[-1])
            self._kernel(*arguments)

    def threads_of(layers: CpuLayers | None) -> list[int]:
        assert layers is not None
        used.clear()
        monkeypatch.setattr(layers, "_run", Counted(layers._run))
        monkeypatch.setattr(layers, "_run_alone", Counted(layers._run_alone))
        return used

    other = _decoder("wide", dtype, 2)
    ours = SmallDecoder(CONFIGS["wide"], dtype, 2, at_once=True, takes_both_cores=True)
    threads = threads_of(ours.cpu_layers)
    assert ours.cpu_layers is not None
    for count in (1, 2, 1):
        step = step_of(_decodes(count))
        content = content_of(step, ours.pool)
        assert torch.equal(ours.run(step, content), other.run(step, content))
        assert torch.equal(ours.pool.storage.nan_to_num(), other.pool.storage.nan_to_num())
        assert ours.cpu_layers.leaves_core(1) == (count == 1)
        assert not ours.cpu_layers.leaves_core(2)
    assert threads == [1, 2, 1]
    ours.decoder.logits(torch.zeros(1, CONFIGS["wide"].hidden_size, dtype=dtype))
    assert threads == [1, 2, 1, 2]  # the head by itself, after the layers of a prompt


def test_a_step_after_a_prompt_is_not_expected_to_take_one_thread(dtype: torch.dtype) -> None:
    """Also if no kernel computes the prompt's attention."""
    if numba.config.NUMBA_NUM_THREADS < 2:
        pytest.skip("numba has one thread")
    for kind in ("wide", "narrow"):
        ours = SmallDecoder(CONFIGS[kind], dtype, 2, at_once=True, takes_both_cores=True)
        assert ours.cpu_layers is not None
        for extents, expected in (([(5, 1)], True), ([(0, 30)], False)):
            step = step_of(extents)
            ours.run(step, content_of(step, ours.pool))
            assert ours.cpu_layers.leaves_core(1) == expected


def test_only_a_worker_on_both_of_two_cores_compares_threads(dtype: torch.dtype) -> None:
    config = CONFIGS["wide"]
    spare = SmallDecoder(config, dtype, 2, at_once=True)
    one = SmallDecoder(config, dtype, 1, at_once=True, takes_both_cores=True)
    step = step_of([(5, 1)])
    for decoder in (spare, one):
        decoder.run(step, content_of(step, decoder.pool))
        assert decoder.cpu_layers is not None
        assert not decoder.cpu_layers.leaves_core(1)


def test_the_bytes_of_a_step_of_one_row_are_weights_keys_and_values(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    if numba.config.NUMBA_NUM_THREADS < 2:
        pytest.skip("numba has one thread")
    config = CONFIGS["wide"]
    ours = SmallDecoder(config, dtype, 2, at_once=True, takes_both_cores=True)
    read: list[int] = []
    begin = ThreadsOfOneRow.begin

    def noted(threads: ThreadsOfOneRow, read_bytes: int, now_s: float) -> bool:
        read.append(read_bytes)
        return begin(threads, read_bytes, now_s)

    monkeypatch.setattr(ThreadsOfOneRow, "begin", noted)
    for cached in (8, 9):
        step = step_of([(cached, 1)])
        ours.run(step, content_of(step, ours.pool))
    of_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
    assert read[1] - read[0] == of_token
    projected = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    of_layer = config.hidden_size * (projected + 3 * config.intermediate_size)
    matrices = config.num_layers * of_layer + config.hidden_size * config.vocab_size
    assert 1.0 < (read[0] - 9 * of_token) / (dtype.itemsize * matrices) < 1.05  # there are norms, too


def test_a_step_runs_in_another_python_thread_than_it_was_built_in() -> None:
    """A worker is built in one thread and runs in another. Here two workers run at the same time."""
    if not has_vectors(torch.float32):
        pytest.skip("this CPU has no vector instructions for float32")
    if numba.config.NUMBA_NUM_THREADS > 1 and numba.threading_layer() == "workqueue":
        pytest.skip("numba's workqueue cannot run two workers in one process")
    step = step_of(_decodes(7))
    workers = [SmallDecoder(config_of(), torch.float32, 2, at_once=True) for _ in range(2)]
    content = content_of(step, workers[0].pool)
    expected = _decoder("wide", torch.float32, 1).run(step, content)
    found: list[bool] = []

    def run(worker: SmallDecoder) -> None:
        found.extend(torch.equal(worker.run(step, content), expected) for _ in range(20))

    threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [True] * 40


@pytest.mark.parametrize("family", ["llama-tied", "llama-wide", "mistral", "qwen2", "qwen3"])
def test_a_worker_gives_the_tokens_of_transformers(
    family: str,
    reference: Callable[[str], Reference],
    build: Callable[..., BuiltWorker],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not has_vectors(torch.float32):
        pytest.skip("this CPU has no vector instructions for float32")
    checkpoint = reference(family)
    runner = build(checkpoint.folder, threads=2, block_size=8, dtype="float32").runner
    assert isinstance(runner._decoder._all_layers, CpuLayers)
    counted = CountedLayers(runner._decoder._all_layers)
    monkeypatch.setattr(runner._decoder, "_all_layers", counted)
    random = np.random.default_rng(3)
    prompts = [random.integers(0, VOCAB, size=count).tolist() for count in (1, 6, 40)]
    driver = Driver(runner, 64)
    sequences = [driver.add(prompt, 12) for prompt in prompts]
    driver.run()
    assert [one.output for one in sequences] == [checkpoint.greedy(prompt, 12) for prompt in prompts]
    assert counted.runs[True] == (12 if family == "llama-wide" else 11)  # the first step has a long chunk


def test_workers_that_promise_the_same_bits_run_layer_by_layer(
    reference: Callable[[str], Reference], build: Callable[..., BuiltWorker]
) -> None:
    settings: list[dict[str, Any]] = [{"deterministic": True}, {"attention_backend": "torch"}]
    folder: Path = reference("llama-tied").folder
    for one in settings:
        assert build(folder, **one).runner._decoder._all_layers is None
