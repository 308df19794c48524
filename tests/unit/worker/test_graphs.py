"""CUDA graphs for decode steps: their sizes, the padding of a step, and the order of capture."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.steps.graphs import DecodeGraphs, GraphOutput, Replay, graph_sizes
from gpu_worker.steps.pieces import piece_sizes
from gpu_worker.steps.step_arrays import dummy_decodes
from tests.unit.worker.test_inputs import arrays_of


def test_graph_sizes_end_with_the_largest_batch() -> None:
    assert graph_sizes(0) == []
    assert graph_sizes(1) == [1]
    assert graph_sizes(8) == [1, 2, 4, 8]
    assert graph_sizes(50) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 50]
    assert graph_sizes(256) == [1, 2, 4, *range(8, 257, 8)]
    assert graph_sizes(300) == [1, 2, 4, *range(8, 257, 8), 272, 288, 300]


def test_piece_sizes_end_with_the_largest_step() -> None:
    assert piece_sizes(0) == []
    assert piece_sizes(1) == [1]
    assert piece_sizes(40) == [16, 32, 40]
    assert piece_sizes(512) == [*range(16, 256, 16), *range(256, 513, 32)]
    assert len(piece_sizes(2048)) == 40


@given(st.integers(1, 5000), st.data())
def test_little_of_a_step_in_pieces_is_padding(largest: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, largest))
    sizes = piece_sizes(largest)
    size = next(size for size in sizes if size >= count)
    assert sizes == sorted(set(sizes))
    assert size - count < max(16, count / 8 + 1)


@settings(deadline=None)
@given(st.integers(1, 2000), st.data())
def test_a_step_is_filled_up_to_the_next_size(largest: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, largest))
    graphs = DecodeGraphs(graph_sizes(largest))
    size = graphs.size_for(dummy_decodes(count, 0))
    assert size in graphs.sizes
    assert count <= size <= largest
    assert size - count < 8 or (count > 256 and size - count < 16)
    assert not any(count <= other < size for other in graphs.sizes)


def test_a_step_that_fits_no_graph() -> None:
    graphs = DecodeGraphs([1, 4])
    assert graphs.size_for(dummy_decodes(5, 0)) is None
    assert graphs.size_for(arrays_of([(3, 1)], [(0, 2)], 0)) is None, "a chunk runs beside the decode"
    assert graphs.size_for(arrays_of([], [(3, 1)], 0)) is None, "a chunk of one token is no decode"


def test_capture_goes_from_large_to_small_and_says_how_far_it_is() -> None:
    graphs, seen, said = DecodeGraphs([1, 4, 2]), list[int](), list[tuple[int, int]]()
    logits = torch.zeros(4, 3)

    def prepare(size: int, out: torch.Tensor) -> Callable[[], GraphOutput]:
        assert out.data_ptr() == logits.data_ptr()
        assert out.shape == (size, 3)
        seen.append(size)
        return lambda: GraphOutput(out.fill_(size), None)

    def capture(run: Callable[[], object]) -> Replay:
        def replay() -> None:
            run()

        run()
        return replay

    graphs.capture(prepare, logits, capture, lambda done, total: said.append((done, total)))
    assert seen == [4, 2, 1]
    assert said == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert graphs.replay(2).logits.tolist() == [[2.0] * 3] * 2
    with pytest.raises(KeyError):
        graphs.replay(3)
