"""Checks of a KV pool's swaps, on any device."""

from __future__ import annotations

import random

import numpy as np
import torch

from gpu_worker.kv.pool import allocate_pool
from gpu_worker.kv.swap import SWAP_BATCH_BLOCKS

NUM_BLOCKS = 3 * SWAP_BATCH_BLOCKS


def check_swaps(device: torch.device) -> None:
    """Swaps more blocks than a batch holds, in random order, to host memory and back into other blocks."""
    pool = allocate_pool(NUM_BLOCKS, 4, 3, 2, 8, torch.float32, device, NUM_BLOCKS)
    assert (pool.num_blocks, pool.num_host_blocks) == (NUM_BLOCKS, NUM_BLOCKS)
    pool.storage.normal_(generator=torch.Generator(device).manual_seed(1))
    before = pool.storage.clone()
    rng = random.Random(1)
    ids = range(1, NUM_BLOCKS + 1)
    count = 2 * SWAP_BATCH_BLOCKS + 5
    sources, hosts, targets = (np.array(rng.sample(ids, count), np.int32) for _ in range(3))
    pool.swap_out(sources, hosts)
    pool.clear(np.array(ids, np.int32))  # a later write in the same plan must not reach host memory
    pool.swap_in(hosts, targets)
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        assert torch.equal(pool.storage[:, :, target], before[:, :, source])
    others = sorted(set(ids) - set(targets.tolist()))
    assert not pool.storage[:, :, others].any()
    assert torch.equal(pool.storage[:, :, 0], before[:, :, 0])
