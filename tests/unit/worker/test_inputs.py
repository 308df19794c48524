"""A step's arrays: padding, and what arrives through pinned memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.kv.pool import DUMMY_BLOCK
from gpu_worker.sampling.fused import NUM_PARAMETERS
from gpu_worker.steps.inputs import HostInputs, PinnedInputs
from gpu_worker.steps.slots import SlotLimits
from gpu_worker.steps.step_arrays import StepArrays, dummy_decodes, indptr

BLOCK_SIZE, MAX_SEQS, MAX_ROWS, TABLE_BLOCKS = 4, 8, 40, 10
LIMITS = SlotLimits(MAX_SEQS, MAX_ROWS, BLOCK_SIZE * TABLE_BLOCKS, BLOCK_SIZE, 100, 50, ())
CPU = torch.device("cpu")

decode = st.tuples(st.integers(0, 39), st.just(1))
chunk = st.tuples(st.integers(0, 30), st.integers(1, 10))


def arrays_of(decodes: list[tuple[int, int]], chunks: list[tuple[int, int]], seed: int) -> StepArrays:
    rng = np.random.default_rng(seed)
    extents = decodes + chunks
    starts, counts = (np.array(x, np.int32) for x in zip(*extents, strict=True))
    widths = -(-(starts + counts) // BLOCK_SIZE)
    rows = int(counts.sum())
    samples = rng.random(len(extents)) < 0.8
    return StepArrays(
        decode_slots=rng.permutation(MAX_SEQS)[: len(decodes)].astype(np.int32),
        prefill_tokens=rng.integers(0, 50, rows - len(decodes)),
        positions=rng.integers(0, 40, rows),
        slot_mapping=rng.integers(4, 400, rows),
        qo_indptr=indptr(counts),
        kv_indptr=indptr(widths),
        kv_indices=rng.integers(1, 101, widths.sum()).astype(np.int32),
        last_block_len=(starts + counts - (widths - 1) * BLOCK_SIZE).astype(np.int32),
        sampling_rows=None if samples.all() else np.flatnonzero(samples).astype(np.int32),
        sampled_slots=np.flatnonzero(samples).astype(np.int32),
    )


def drawing(arrays: StepArrays) -> StepArrays:
    """A step of a graph that samples."""
    draws = np.random.default_rng(arrays.num_rows).integers(0, 2**31, (arrays.num_rows, NUM_PARAMETERS))
    return replace(arrays, draws=draws.astype(np.int32))


steps = st.builds(
    arrays_of, st.lists(decode, max_size=5), st.lists(chunk, min_size=1, max_size=3), st.integers(0, 2**31)
)


@settings(max_examples=50, deadline=None)
@given(st.lists(steps, min_size=1, max_size=4))
def test_the_device_gets_the_staged_inputs(sequence: list[StepArrays]) -> None:
    inputs, plain = PinnedInputs(LIMITS, TABLE_BLOCKS, CPU), HostInputs()
    for arrays in sequence:
        sent, expected = inputs.send(arrays), plain.send(arrays)
        inputs.sent()
        for name in ("decode_slots", "prefill_tokens", "positions", "sampling_rows", "sampled_slots"):
            mine, other = getattr(sent, name), getattr(expected, name)
            assert (mine is None and other is None) or torch.equal(mine, other), name
        mine, other = sent.attention, expected.attention
        assert mine.num_decodes == other.num_decodes
        assert torch.equal(mine.slot_mapping, other.slot_mapping)
        for name in ("qo_indptr", "kv_indptr", "kv_indices", "last_block_len"):
            array = getattr(mine, name)
            assert array.dtype == np.int32
            assert np.array_equal(array, getattr(other, name)), name
        assert mine.tables is not None
        for name in ("kv_indptr", "last_block_len", "kv_indices"):
            array = getattr(mine.tables, name)
            assert array.dtype == torch.int32
            assert np.array_equal(array.numpy()[: len(getattr(arrays, name))], getattr(arrays, name)), name


def test_the_largest_step_fits() -> None:
    full = [(39, 1)] * MAX_SEQS
    arrays = drawing(arrays_of(full, [], 0))
    sent = PinnedInputs(LIMITS, TABLE_BLOCKS, CPU).send(arrays)
    assert sent.draws is not None
    assert arrays.draws is not None
    assert np.array_equal(sent.draws.numpy(), arrays.draws)
    assert PinnedInputs(LIMITS, TABLE_BLOCKS, CPU).send(arrays).attention.num_rows == MAX_SEQS
    chunks = [(0, 33), *[(39, 1)] * 7]
    arrays = arrays_of([], chunks, 0)
    assert PinnedInputs(LIMITS, TABLE_BLOCKS, CPU).send(arrays).attention.num_rows == MAX_ROWS


def test_the_host_arrays_of_a_step_outlive_the_next_send() -> None:
    """The device may still be about to read them."""
    inputs = PinnedInputs(LIMITS, TABLE_BLOCKS, CPU)
    first = inputs.send(arrays_of([(3, 1)], [(0, 4)], 1)).attention
    before = first.qo_indptr.copy(), first.kv_indptr.copy(), first.last_block_len.copy()
    inputs.send(arrays_of([(30, 1), (2, 1)], [(9, 7)], 2))
    for kept, array in zip(before, (first.qo_indptr, first.kv_indptr, first.last_block_len), strict=True):
        assert np.array_equal(kept, array)


@settings(deadline=None)
@given(st.lists(decode, min_size=1, max_size=MAX_SEQS), st.integers(0, MAX_SEQS), st.integers(0, 2**31))
def test_padding_changes_no_row_of_the_step(decodes: list[tuple[int, int]], more: int, seed: int) -> None:
    arrays = arrays_of(decodes, [], seed)
    size = len(decodes) + more
    padded = arrays.padded(size, MAX_SEQS)
    for name in ("decode_slots", "positions", "slot_mapping", "kv_indices", "last_block_len"):
        mine, other = getattr(padded, name), getattr(arrays, name)
        assert mine.dtype == other.dtype
        assert np.array_equal(mine[: len(other)], other), name
    assert padded.num_rows == padded.num_decodes == size
    assert np.array_equal(padded.qo_indptr, np.arange(size + 1))
    assert np.array_equal(padded.kv_indptr[: len(decodes) + 1], arrays.kv_indptr)
    assert np.array_equal(np.diff(padded.kv_indptr)[len(decodes) :], np.ones(more))
    assert (padded.kv_indices[len(arrays.kv_indices) :] == DUMMY_BLOCK).all()
    assert (padded.slot_mapping[len(decodes) :] // BLOCK_SIZE == DUMMY_BLOCK).all()
    assert np.array_equal(padded.sampled_slots, arrays.sampled_slots)


@settings(deadline=None)
@given(st.integers(1, MAX_SEQS), st.lists(decode, min_size=1, max_size=MAX_SEQS))
def test_a_graph_finds_its_inputs_where_they_were_at_its_capture(size: int, decodes: list[tuple[int, int]]) -> None:
    inputs = PinnedInputs(LIMITS, TABLE_BLOCKS, CPU)
    size = max(size, len(decodes))
    first = inputs.send(drawing(dummy_decodes(size, MAX_SEQS)), captured=True)
    inputs.send(arrays_of([], [(5, 9), (0, 3)], 0))
    arrays = drawing(arrays_of(decodes, [], 1)).padded(size, MAX_SEQS)
    inputs.send(arrays, captured=True)
    tables = first.attention.tables
    assert tables is not None
    assert first.draws is not None
    for name, there in (
        ("decode_slots", first.decode_slots),
        ("positions", first.positions),
        ("draws", first.draws),
        ("slot_mapping", first.attention.slot_mapping),
        ("kv_indptr", tables.kv_indptr),
        ("last_block_len", tables.last_block_len),
        ("kv_indices", tables.kv_indices[: len(arrays.kv_indices)]),
    ):
        assert np.array_equal(there.numpy(), getattr(arrays, name)), name


@settings(deadline=None)
@given(st.lists(st.tuples(st.lists(decode, max_size=5), st.lists(chunk, max_size=3)), min_size=1, max_size=3))
def test_pieces_find_their_inputs_where_they_were_at_their_capture(
    steps: list[tuple[list[tuple[int, int]], list[tuple[int, int]]]],
) -> None:
    """Whatever part of the rows is decodes."""
    inputs = PinnedInputs(LIMITS, TABLE_BLOCKS, CPU)
    first = inputs.send(dummy_decodes(0, MAX_SEQS).with_padding_rows(MAX_ROWS))
    for decodes, chunks in steps:
        if decodes or chunks:
            arrays = arrays_of(decodes, chunks, 1)
            padded = arrays.with_padding_rows(MAX_ROWS)
            sent = inputs.send(padded)
            assert sent.attention.num_rows == arrays.num_rows
            assert np.array_equal(first.positions.numpy(), padded.positions)
            assert np.array_equal(first.attention.slot_mapping.numpy(), padded.slot_mapping)
            assert np.array_equal(padded.slot_mapping[: arrays.num_rows], arrays.slot_mapping)
            assert (padded.slot_mapping[arrays.num_rows :] // BLOCK_SIZE == DUMMY_BLOCK).all()
