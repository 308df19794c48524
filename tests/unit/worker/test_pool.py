"""Clearing, copying and swapping blocks of the pool, compared with loops over layers and blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpu_worker import device
from gpu_worker.kv import swap
from gpu_worker.kv.pool import KvPool, allocate_pool

LAYERS, BLOCKS, HOST_BLOCKS = 3, 11, 5


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> KvPool:
    """No two numbers in the pool are equal."""
    monkeypatch.setattr(swap, "SWAP_BATCH_BLOCKS", 2)
    made = allocate_pool(BLOCKS, 4, LAYERS, 2, 8, torch.float32, torch.device("cpu"), HOST_BLOCKS)
    made.storage.copy_(torch.arange(made.storage.numel()).view(made.storage.shape))
    made.host.copy_(-1 - torch.arange(made.host.numel()).view(made.host.shape))
    return made


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def test_blocks_are_cleared_and_copied_in_every_layer(pool: KvPool) -> None:
    expected = pool.storage.clone()
    for source, target in ((7, 1), (2, 11), (9, 3)):
        for part in range(2):
            for layer in range(LAYERS):
                expected[part, layer, target] = expected[part, layer, source]
    pool.copy(ids(7, 2, 9), ids(1, 11, 3))
    assert torch.equal(pool.storage, expected)
    for block in (4, 11, 1):
        expected[:, :, block] = 0
    pool.clear(ids(4, 11, 1))
    assert torch.equal(pool.storage, expected)
    assert torch.equal(pool.keys[:, 5], expected[0, :, 5])


def test_blocks_are_swapped_out_and_in_in_every_layer(pool: KvPool) -> None:
    before, host = pool.storage.clone(), pool.host.clone()
    pool.swap_out(ids(3, 10, 5), ids(5, 1, 2))
    for block, place in ((3, 5), (10, 1), (5, 2)):
        for part in range(2):
            for layer in range(LAYERS):
                host[place - 1, part * LAYERS + layer] = before[part, layer, block]
    assert torch.equal(pool.host, host)
    pool.swap_in(ids(1, 4, 5), ids(6, 3, 11))
    for block, place in ((6, 1), (3, 4), (11, 5)):
        before[:, :, block] = host[place - 1].view(2, LAYERS, *host.shape[2:])
    assert torch.equal(pool.storage, before)


def test_pinned_memory_is_let_go_with_its_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: dict[int, int] = {}

    class Runtime:
        def cudaHostRegister(self, pointer: int, num_bytes: int, flags: int) -> int:
            locked[pointer] = num_bytes
            return 0 if num_bytes < 1000 else 2

        def cudaHostUnregister(self, pointer: int) -> int:
            del locked[pointer]
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    tensor = torch.zeros(100)
    device.pin(tensor)
    assert locked == {tensor.data_ptr(): 400}
    del tensor
    assert not locked
    with pytest.raises(RuntimeError, match="4000 bytes of host memory cannot be locked: CUDA error 2"):
        device.pin(torch.zeros(1000))
