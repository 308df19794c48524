"""Random plans give the tokens of a CPU, whichever steps run in CUDA graphs and however late the GPU is.

PACELINE_FUZZ_PLANS=200 runs 200 seeds instead of the first few."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable

import pytest

from tests.contract.worker.late_device.random_plans import RandomPlans
from tests.contract.worker.late_device.rig import SAMPLINGS, check_equal, cpu_runner, gpu_runner, play
from tests.support.late_device.worker import late_gpu
from tests.unit.worker.families import Reference

# Pieces have 16 rows or more, and steps have at most 48.
GRAPH_MAX_TOKENS, GRAPH_MAX_SEQS = (1, 15, 16, 17, 48, 1000), (0, 1, 6)
FAMILIES = ["llama3-rope", "mistral", "qwen2", "qwen3"]
FIRST, SEEDS = int(os.environ.get("PACELINE_FUZZ_FIRST", "0")), int(os.environ.get("PACELINE_FUZZ_PLANS", "6"))


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
def test_random_plans_give_the_tokens_of_a_cpu(seed: int, reference: Callable[[str], Reference]) -> None:
    rng = random.Random(seed)
    folder = reference(FAMILIES[seed % len(FAMILIES)]).folder
    options = {"block_size": rng.choice([4, 16]), "num_host_blocks": 40, "num_blocks": rng.choice([40, 100])}
    runner = cpu_runner(folder, **options)
    planner = RandomPlans(runner.limits, seed, SAMPLINGS)
    plans = planner.make(40)
    expected = play(runner, plans)
    options |= {
        "graph_max_tokens": GRAPH_MAX_TOKENS[seed % len(GRAPH_MAX_TOKENS)],
        "graph_max_seqs": rng.choice(GRAPH_MAX_SEQS),
    }
    with late_gpu(seed, eagerness=rng.choice([0.0, 0.2, 0.5, 0.97])) as device:
        check_equal(play(gpu_runner(folder, **options), plans, window=rng.randint(1, 4)), expected)
    if options["graph_max_tokens"] >= 16 or options["graph_max_seqs"] == max(GRAPH_MAX_SEQS):
        assert device.num_replays > 0


def test_random_plans_have_every_kind_of_move(reference: Callable[[str], Reference]) -> None:
    limits = cpu_runner(reference("llama3-rope").folder, block_size=4, num_host_blocks=40).limits
    moves: Counter[str] = Counter()
    for seed in range(4):
        planner = RandomPlans(limits, seed, SAMPLINGS)
        planner.make(40)
        moves += planner.moves
    assert min(moves.values()) > 5, moves
    assert set(moves) == {
        "swapped out", "swapped in", "copied", "forked", "grown by several", "decodes only", "mixed"
    }  # fmt: skip
