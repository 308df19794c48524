"""The kernels for CPUs play random plans as plain torch does, in a pool with NaN wherever no token was written: a
worker on a CPU does not clear blocks that get a new owner."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from gpu_worker.cpu.attention import CpuAttention
from tests.contract.worker.late_device.random_plans import RandomPlans
from tests.contract.worker.late_device.rig import SAMPLINGS, check_equal, cpu_runner, play
from tests.unit.worker.families import Reference


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", ["llama3-rope", "mistral", "qwen3"])
def test_random_plans_read_nothing_that_no_token_wrote(
    family: str, seed: int, deterministic: bool, reference: Callable[[str], Reference]
) -> None:
    folder, rng = reference(family).folder, random.Random(seed)
    options = {"block_size": rng.choice([4, 8, 16]), "num_host_blocks": 40}
    runner = cpu_runner(folder, **options)
    plans = RandomPlans(runner.limits, seed, SAMPLINGS).make(40)
    expected = play(runner, plans)
    options |= {"threads": rng.choice([1, 2]), "deterministic": deterministic}
    runner = cpu_runner(folder, attention_backend="auto", **options)
    assert isinstance(runner._attention, CpuAttention)
    runner._pool.storage.fill_(torch.nan)
    runner._pool.host.fill_(torch.nan)
    check_equal(play(runner, plans), expected)
