"""Every attention backend gives the result of dense attention over each sequence's tokens.

The backend for GPUs runs through the same cases, on a reference that reads its arrays by FlashInfer's rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.attention import torch_backend
from gpu_worker.attention.base import AttentionBackend
from gpu_worker.attention.flashinfer import FlashInferAttention
from gpu_worker.attention.torch_backend import TorchAttention
from gpu_worker.cpu import attention as cpu_attention
from gpu_worker.cpu.attention import CpuAttention
from gpu_worker.cpu.kernels import Kernels
from gpu_worker.kv.pool import KvPool, allocate_pool
from tests.support.attention import Extents, dense, fill, metadata_of
from tests.support.flashinfer_kernels import reference_kernels

HEAD_DIM = 16

# pool, windows, query heads
MakeBackend = Callable[[KvPool, tuple[int, ...], int], AttentionBackend]


@pytest.fixture(scope="module", params=["torch", "cpu", "flashinfer"])
def backend(request: pytest.FixtureRequest) -> Iterator[MakeBackend]:
    if request.param == "torch":
        yield lambda pool, windows, num_heads: TorchAttention(pool, windows)
    elif request.param == "cpu":
        kernels = Kernels(torch.float32, threads=2)
        yield lambda pool, windows, num_heads: CpuAttention(pool, windows, kernels)
    else:
        with reference_kernels() as flashinfer:
            yield lambda pool, windows, num_heads: FlashInferAttention(
                flashinfer, pool, windows, num_heads, max_rows=512, workspace_bytes=1024
            )


def check(
    backend: MakeBackend,
    decodes: Extents,
    chunks: Extents,
    block_size: int,
    kv_heads: int,
    groups: int,
    window: int,
    seed: int,
) -> None:
    extents = decodes + chunks
    generator = torch.Generator().manual_seed(seed)
    lengths = [prefix + count for prefix, count in extents]
    needed = [-(-length // block_size) for length in lengths]
    pool = allocate_pool(sum(needed) + 3, block_size, 2, kv_heads, HEAD_DIM, torch.float32, torch.device("cpu"))
    ids = (1 + torch.randperm(sum(needed) + 3, generator=generator)).tolist()
    tables = [[ids.pop() for _ in range(n)] for n in needed]
    full = [torch.randn(2, length, kv_heads, HEAD_DIM, generator=generator) for length in lengths]
    layer = 1
    for (prefix, _), table, kv in zip(extents, tables, full, strict=True):
        fill(pool.storage, layer, table, kv[:, :prefix])
    rows = sum(count for _, count in extents)
    # Views into a wider tensor, as the model passes them.
    q = torch.randn(rows, kv_heads * groups + 1, HEAD_DIM, generator=generator)[:, 1:]
    new = torch.cat([kv[:, prefix:] for (prefix, _), kv in zip(extents, full, strict=True)], dim=1)
    attention = backend(pool, (0, window), kv_heads * groups)
    attention.plan(metadata_of(len(decodes), extents, tables, block_size))
    out = attention.run(layer, q, new[0], new[1])

    start = 0
    for (_, count), kv in zip(extents, full, strict=True):
        expected = dense(q[start : start + count], kv[0], kv[1], window)
        torch.testing.assert_close(out[start : start + count].double(), expected, atol=2e-5, rtol=1e-4)
        start += count
    for (_, _), table, kv in zip(extents, tables, full, strict=True):
        written = pool.keys[layer][table].flatten(0, 1)[: kv.shape[1]]
        assert torch.equal(written, kv[0])
    assert pool.storage[:, 0].eq(0).all(), "another layer was written"
    assert pool.storage[:, :, 0].eq(0).all(), "the dummy block was written"


decode = st.tuples(st.integers(0, 90), st.just(1))
chunk = st.tuples(st.integers(0, 60), st.integers(1, 40))


@settings(max_examples=60, deadline=None)
@given(
    decodes=st.lists(decode, max_size=9),
    chunks=st.lists(chunk, min_size=1, max_size=3),
    block_size=st.sampled_from([1, 2, 7, 8, 16, 128]),
    kv_heads=st.integers(1, 3),
    groups=st.sampled_from([1, 2, 7]),
    window=st.sampled_from([0, 0, 1, 5, 33]),
    seed=st.integers(0, 2**31),
)
def test_random_batches(
    backend: MakeBackend,
    decodes: Extents,
    chunks: Extents,
    block_size: int,
    kv_heads: int,
    groups: int,
    window: int,
    seed: int,
) -> None:
    check(backend, decodes, chunks, block_size, kv_heads, groups, window, seed)


@settings(max_examples=25, deadline=None)
@given(decodes=st.lists(decode, min_size=1, max_size=40), window=st.sampled_from([0, 9]), seed=st.integers(0, 2**31))
def test_decode_only_batches(backend: MakeBackend, decodes: Extents, window: int, seed: int) -> None:
    check(backend, decodes, [], 8, 2, 2, window, seed)


@pytest.mark.parametrize("window", [0, 50])
def test_limits_that_split_the_work_change_nothing(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many groups, many tiles of a chunk."""
    monkeypatch.setattr(torch_backend, "GROUP_BYTES", 20_000)
    monkeypatch.setattr(torch_backend, "GROUP_OVERHEAD_BYTES", 2_000)
    monkeypatch.setattr(torch_backend, "TILE_ELEMENTS", 1_000)
    decodes = [(n, 1) for n in range(0, 200, 13)]
    chunks = [(70, 61), (0, 130), (1, 2)]
    check(lambda pool, windows, _: TorchAttention(pool, windows), decodes, chunks, 8, 2, 3, window, 0)
    monkeypatch.setattr(cpu_attention, "TILE_SCORES", 2 * 9 * 130)
    kernels = Kernels(torch.float32, threads=2)
    check(lambda pool, windows, _: CpuAttention(pool, windows, kernels), decodes, chunks, 8, 2, 3, window, 0)
