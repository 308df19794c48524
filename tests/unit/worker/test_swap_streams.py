"""Swaps run on a stream beside the computation.

In any order that the CUDA events allow, the blocks are the same as if all swaps and steps had run one after the other,
in the order of the calls.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.kv import swap
from gpu_worker.kv.pool import KvPool, allocate_pool
from tests.support.late_device.device import DEVICE
from tests.support.late_device.runtime import simulate

BLOCKS, HOST_BLOCKS = 9, 6
CPU = torch.device("cpu")


def _ids(draw: st.DrawFn, most: int, count: int) -> np.ndarray:
    ids = draw(st.permutations(range(1, most + 1)))
    return np.array(ids[:count], np.int32)


@st.composite
def commands(draw: st.DrawFn) -> list[tuple[str, tuple[np.ndarray, ...]]]:
    made: list[tuple[str, tuple[np.ndarray, ...]]] = []
    for _ in range(draw(st.integers(1, 14))):
        kind = draw(st.sampled_from(["compute", "out", "back", "clear", "copy"]))
        count = draw(st.integers(1, HOST_BLOCKS))
        match kind:
            case "out":
                made.append((kind, (_ids(draw, BLOCKS, count), _ids(draw, HOST_BLOCKS, count))))
            case "back":
                made.append((kind, (_ids(draw, HOST_BLOCKS, count), _ids(draw, BLOCKS, count))))
            case "copy":
                both = _ids(draw, BLOCKS, 4)
                made.append((kind, (both[:2], both[2:])))
            case _:
                made.append((kind, (_ids(draw, BLOCKS, count),)))
    return made


def play(pool: KvPool, todo: list[tuple[str, tuple[np.ndarray, ...]]]) -> None:
    for number, (kind, ids) in enumerate(todo, 1):
        match kind:
            case "compute":  # a step writes to the blocks
                for block in ids[0].tolist():
                    pool.storage[:, :, block].fill_(number)
            case "out":
                pool.swap_out(*ids)
            case "back":
                pool.swap_in(*ids)
            case "clear":
                pool.clear(*ids)
            case "copy":
                pool.copy(*ids)


def new_pool(device: torch.device) -> KvPool:
    pool = allocate_pool(BLOCKS, 1, 2, 1, 1, torch.float32, device, HOST_BLOCKS)
    pool.storage.copy_(-torch.arange(pool.storage.numel()).view(pool.storage.shape))
    pool.host.copy_(-1000 - torch.arange(pool.host.numel()).view(pool.host.shape))
    return pool


@settings(max_examples=150, deadline=None)
@given(todo=commands(), seed=st.integers(0, 2**31))
def test_any_order_that_the_events_allow_gives_the_same_blocks(
    todo: list[tuple[str, tuple[np.ndarray, ...]]], seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(swap, "SWAP_BATCH_BLOCKS", 2)
        expected = new_pool(CPU)
        play(expected, todo)
        with simulate(seed) as device:
            pool = new_pool(DEVICE)
            with device.no_waits():
                play(pool, todo)
            assert torch.equal(pool.storage.cpu(), expected.storage)
            assert torch.equal(pool.host, expected.host)
