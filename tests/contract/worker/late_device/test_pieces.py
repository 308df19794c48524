"""Steps with prompt chunks give the same results on a simulated late GPU (tests/support/late_device) as on a CPU.

Graphs of pieces run these steps, with eager attention between the pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bench.device.launching import mixed_operations
from bench.device.load import GREEDY
from demo import CHECKPOINT
from paceline.v1.common_pb2 import SamplingParams
from tests.contract.worker.late_device.rig import (
    SAMPLINGS,
    check_equal,
    cpu_runner,
    gpu_runner,
    make_plans,
    make_requests,
    play,
    prepare,
)
from tests.contract.worker.late_device.test_steps import PACES, REQUESTS
from tests.support.grammars import GRAMMARS
from tests.support.late_device.worker import late_gpu
from tests.support.launched_system import check_moved, make_prompts, run_system
from tests.unit.worker.families import VOCAB, Reference

Checkpoints = Callable[[str], Reference]
# Pieces for 16 and 32 rows; steps have up to 48 rows. So a step is padded, fits exactly, or is too large.
PIECES: dict[str, Any] = {"graph_max_tokens": 32}


@pytest.mark.parametrize(("seed", "eagerness", "window"), PACES)
@pytest.mark.parametrize("family", ["llama3-rope", "mistral", "qwen2"])
def test_greedy_tokens_are_as_on_a_cpu(
    family: str, seed: int, eagerness: float, window: int, reference: Checkpoints
) -> None:
    folder = reference(family).folder
    runner = cpu_runner(folder)
    plans = make_plans(runner, REQUESTS)
    expected = play(runner, plans)
    replays = []
    for settings in ({}, PIECES):
        with late_gpu(seed, eagerness) as device:
            check_equal(play(gpu_runner(folder, **settings), plans, window), expected)
            replays.append(device.num_replays)
    decodes, both = replays
    assert both > decodes + 10


@pytest.mark.parametrize(("seed", "eagerness", "window"), PACES[2:4])
def test_every_kind_of_sampling_is_as_on_a_cpu(
    seed: int, eagerness: float, window: int, reference: Checkpoints
) -> None:
    folder = reference("qwen3").folder
    runner = cpu_runner(folder)
    plans = make_plans(runner, REQUESTS, SAMPLINGS)
    expected = play(runner, plans)
    with late_gpu(seed, eagerness):
        check_equal(play(gpu_runner(folder, **PIECES), plans, window), expected)


def test_pieces_serve_decodes_that_no_graph_has(reference: Checkpoints) -> None:
    folder = reference("llama3-rope").folder
    runner = cpu_runner(folder)
    plans = make_plans(runner, REQUESTS)
    expected = play(runner, plans)
    with late_gpu(seed=1):
        check_equal(play(gpu_runner(folder, graph_max_seqs=0, **PIECES), plans, window=2), expected)


def test_grammars_are_followed() -> None:
    grammars = [GRAMMARS["regex"], GRAMMARS["choice"]]
    samplings = [GREEDY, *(SamplingParams(top_p=1, grammar=grammar, ignore_eos=True) for grammar in grammars)]
    runner = cpu_runner(CHECKPOINT)
    plans = make_plans(runner, make_requests(6), samplings)
    prepare(runner, grammars)
    expected = play(runner, plans)
    with late_gpu(seed=1):
        runner = gpu_runner(CHECKPOINT, **PIECES)
        prepare(runner, grammars)
        check_equal(play(runner, plans, window=2), expected)


def test_swaps_copies_and_forks_are_as_on_a_cpu(reference: Checkpoints) -> None:
    folder, prompts = reference("llama3-rope").folder, make_prompts(VOCAB)[:2] + make_prompts(VOCAB)[4:7]
    options = {"dtype": "float32", "num_blocks": 20}
    _, expected = run_system(folder, "cpu", "paceline", 1, prompts, 20, attention_backend="torch", **options)
    with late_gpu(seed=5, eagerness=0.2):
        options |= {"graph_max_seqs": 6, "graph_max_tokens": 128}
        system, tokens = run_system(folder, "cuda", "paceline", 3, prompts, 20, **options)
    assert tokens == expected
    check_moved(system)


def test_a_step_with_chunks_queues_three_operations_for_a_layer() -> None:
    """With pieces, the three operations of a layer are a graph, attention for the decodes, and attention for the chunk.

    An eager layer has 11 kernels. The simulated GPU also counts 2 allocations, for the outputs of the norms, which a
    real GPU does not queue. The step's other operations do not grow with the number of layers: copies of the inputs and
    of attention's plan, the embedding, the rest of the last layer (it runs eagerly), the logits, sampling, and events.
    """
    counted = mixed_operations()
    assert {name: operations.by_layer for name, operations in counted.items()} == {"eager": 13, "pieces": 3}
    assert counted["pieces"].others <= 36
