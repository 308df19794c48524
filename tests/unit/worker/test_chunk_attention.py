"""The attention of a chunk's rows, for wide heads: dense attention, and each row reads only what it sees."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.cpu.attention import KERNEL_ROWS, CpuAttention
from gpu_worker.cpu.vectors import has_vectors
from gpu_worker.kv.pool import KvPool, allocate_pool
from tests.support.attention import dense, fill, metadata_of
from tests.unit.worker.ready_kernels import ready_kernels

CPU = torch.device("cpu")
BLOCK = 16
TYPES = [torch.float32, torch.bfloat16]


@dataclass
class Case:
    """Sequences with one chunk each, the last tokens of a sequence."""

    dtype: torch.dtype
    lengths: list[tuple[int, int]]  # tokens before the chunk, and in it
    kv_heads: int
    group: int
    head_dim: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not has_vectors(self.dtype):
            pytest.skip(f"this CPU has no vector instructions for {self.dtype}")
        generator = torch.Generator().manual_seed(self.seed)
        needed = [-(-(prefix + count) // BLOCK) for prefix, count in self.lengths]
        ids = (torch.randperm(sum(needed), generator=generator) + 1).tolist()
        self.tables = [[ids.pop() for _ in range(count)] for count in needed]
        shape = self.kv_heads, self.head_dim
        self.full = [torch.randn(2, sum(length), *shape, generator=generator).to(self.dtype) for length in self.lengths]
        rows = sum(count for _, count in self.lengths)
        query = 2 * torch.randn(rows, self.kv_heads * self.group, self.head_dim, generator=generator)
        self.query = query.to(self.dtype)

    def pool(self) -> KvPool:
        """The tokens before the chunks. NaN in all other places, because they must not be read."""
        pool = allocate_pool(sum(map(len, self.tables)) + 1, BLOCK, 1, self.kv_heads, self.head_dim, self.dtype, CPU)
        pool.storage.fill_(torch.nan)
        for table, kv, (prefix, _) in zip(self.tables, self.full, self.lengths, strict=True):
            fill(pool.storage, 0, table, kv[:, :prefix])
        return pool

    def attended(self, window: int, threads: int) -> torch.Tensor:
        attention = CpuAttention(
            self.pool(), (window,), ready_kernels(self.dtype, threads, wide_heads=True, by_size=False)
        )
        attention.plan(metadata_of(0, self.lengths, self.tables, BLOCK))
        new = torch.cat([kv[:, prefix:] for kv, (prefix, _) in zip(self.full, self.lengths, strict=True)], dim=1)
        return attention.run(0, self.query, new[0], new[1])

    def exact(self, window: int) -> torch.Tensor:
        parts = self.query.split([count for _, count in self.lengths])
        return torch.cat([dense(part, kv[0], kv[1], window) for part, kv in zip(parts, self.full, strict=True)])


@pytest.mark.parametrize("dtype", TYPES)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 150)), min_size=1, max_size=3),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 7]),
    head_dim=st.sampled_from([64, 128, 192]),
    window=st.sampled_from([0, 1, 3, 40, 100]),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 100),
)
@settings(max_examples=60, deadline=None)
def test_chunks_attend_as_dense_attention(
    dtype: torch.dtype,
    lengths: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    head_dim: int,
    window: int,
    threads: int,
    seed: int,
) -> None:
    case = Case(dtype, lengths, kv_heads, group, head_dim, seed)
    rounding = 2**-8 if dtype == torch.bfloat16 else 4e-6
    torch.testing.assert_close(
        case.attended(window, threads).double(), case.exact(window), rtol=rounding, atol=rounding
    )


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("window", [0, 700])
def test_a_long_chunk_attends_in_several_tiles(dtype: torch.dtype, window: int) -> None:
    case = Case(dtype, [(2500, 333)], 2, 2, 64)
    rounding = 2**-8 if dtype == torch.bfloat16 else 4e-6
    torch.testing.assert_close(case.attended(window, 2).double(), case.exact(window), rtol=rounding, atol=rounding)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("window", [0, 30])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_keys_that_a_row_does_not_see_cannot_change_it(dtype: torch.dtype, window: int, bad: float) -> None:
    case = Case(dtype, [(20, 90)], 2, 2, 64)
    out = case.attended(window, 2)
    place = 20 + 41
    case.full[0][:, place] = bad
    spoiled = case.attended(window, 2)
    seeing = slice(41, 41 + window if window else None)
    untouched = torch.ones(90, dtype=torch.bool)
    untouched[seeing] = False
    assert torch.equal(spoiled[untouched], out[untouched])
    assert not spoiled[seeing].isfinite().any(1).all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("window", [0, 30])
def test_a_row_does_not_depend_on_where_the_chunk_begins(dtype: torch.dtype, window: int) -> None:
    case = Case(dtype, [(10, 120)], 2, 2, 64)
    out, query = case.attended(window, 2), case.query
    for first in (1, 37, 120 - KERNEL_ROWS - 1):
        case.lengths, case.query = [(10 + first, 120 - first)], query[first:]
        assert torch.equal(case.attended(window, 2), out[first:])
