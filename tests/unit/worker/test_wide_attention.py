"""The decode attention of wide heads computes what dense attention computes, and reads only its own tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.cpu.attention import CpuAttention
from gpu_worker.cpu.vectors import has_vectors
from gpu_worker.kv.pool import allocate_pool
from tests.support.attention import dense, fill, metadata_of
from tests.unit.worker.ready_kernels import ready_kernels

CPU = torch.device("cpu")
TYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", TYPES)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=5),
    block_size=st.sampled_from([1, 2, 3, 4, 8, 16, 32]),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 7]),
    head_dim=st.sampled_from([64, 128, 192]),
    window=st.sampled_from([0, 1, 5, 40]),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 100),
)
@settings(max_examples=60, deadline=None)
def test_wide_heads_attend_as_dense_attention(
    dtype: torch.dtype,
    lengths: list[int],
    block_size: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    window: int,
    threads: int,
    seed: int,
) -> None:
    if not has_vectors(dtype):
        pytest.skip(f"this CPU has no vector instructions for {dtype}")
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-length // block_size) for length in lengths]
    pool = allocate_pool(sum(needed) + 1, block_size, 1, kv_heads, head_dim, dtype, CPU)
    pool.storage.fill_(torch.nan)  # whatever no sequence owns must not be read
    ids = (torch.randperm(sum(needed), generator=generator) + 1).tolist()
    tables = [[ids.pop() for _ in range(count)] for count in needed]
    full = [torch.randn(2, length, kv_heads, head_dim, generator=generator).to(dtype) for length in lengths]
    for table, kv in zip(tables, full, strict=True):
        fill(pool.storage, 0, table, kv[:, :-1])
    query = (2 * torch.randn(len(lengths), kv_heads * group, head_dim, generator=generator)).to(dtype)
    last = torch.stack([kv[:, -1] for kv in full], dim=1)

    def attended(which: list[int]) -> torch.Tensor:
        attention = CpuAttention(pool, (window,), ready_kernels(dtype, threads, wide_heads=True, by_size=False))
        extents = [(lengths[i] - 1, 1) for i in which]
        attention.plan(metadata_of(len(which), extents, [tables[i] for i in which], block_size))
        return attention.run(0, query[which], last[0, which], last[1, which])

    everything = list(range(len(lengths)))
    out = attended(everything)
    exact = torch.cat([dense(query[i : i + 1], full[i][0], full[i][1], window) for i in everything])
    rounding = 2**-8 if dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(out.double(), exact, rtol=rounding, atol=rounding)
    assert torch.equal(attended(everything[::-1]), out.flip(0))
    assert all(torch.equal(attended([i])[0], out[i]) for i in everything)
