"""The sampling kernels for GPUs on rows where thousands of logits are equal, or almost equal, at a limit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from bench.device import counts
from gpu_worker.sampling import fused_kernels
from gpu_worker.sampling.fused import sample_rows_by_triton
from tests.unit.worker.test_fused import VOCAB, both, make_parameters

Random = np.random.Generator


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row has 4 tiles."""
    monkeypatch.setattr(fused_kernels, "TILE", 256)
    monkeypatch.setattr(fused_kernels, "MAX_CANDIDATES", 256)


def cluster(rng: Random, size: int) -> npt.NDArray[np.float64]:
    """A sixth of the tokens have different logits that all lie in a part of one bin. The other tokens make the range
    wide, and so each of the 252 bins."""
    logits = np.where(np.arange(size) < size // 6, -1.0 - 0.02 * rng.random(size), -30.0)
    logits[-1] = 0.0
    return rng.permutation(logits)


ROWS: dict[str, tuple[torch.dtype, Callable[[Random, int], Any]]] = {
    "all equal": (torch.bfloat16, lambda _, size: np.full(size, 1.3)),
    "two values": (torch.bfloat16, lambda rng, size: rng.choice([0.0, -0.5], size)),
    "three values": (torch.bfloat16, lambda rng, size: rng.choice([5.0, 4.75, 4.0], size, p=[0.3, 0.5, 0.2])),
    "spread 0.05": (torch.bfloat16, lambda rng, size: rng.normal(0, 0.05, size)),
    "spread 0.3": (torch.bfloat16, lambda rng, size: rng.normal(0, 0.3, size)),
    "spread 1": (torch.bfloat16, lambda rng, size: rng.normal(0, 1, size)),
    "multiples of 0.25": (torch.bfloat16, lambda rng, size: 40 + rng.normal(0, 0.4, size)),
    "equals below one": (torch.float32, lambda _, size: np.where(np.arange(size) == 3, 8.0, 0.1)),
    "equals below 49": (torch.float32, lambda _, size: np.maximum(2.0 - np.arange(size) / 49, 1.0)),
    "cluster": (torch.float32, cluster),
}


def make_row(kind: str, vocab: int) -> Tensor:
    dtype, make = ROWS[kind]
    return torch.from_numpy(make(np.random.default_rng(7), vocab)).to(dtype)


def check(row: Tensor, **columns: Any) -> None:
    count = len(columns["top_k"])
    logits = row.expand(count, -1).contiguous()
    with counts._count_loads(logits) as loads:
        expected, drawn = both(logits, make_parameters(count, seed=3, **columns))
    assert drawn == expected
    assert loads.max() <= 4 * len(row)


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.usefixtures("small_tiles")
def test_equal_logits_at_a_limit_take_four_passes(kind: str) -> None:
    """With some of all combinations, others for each kind of row."""
    rng = np.random.default_rng(list(ROWS).index(kind))
    choices = [0, 1, 50, 193, 400], [1, 0.999, 0.9, 0.5, 0.1], [0.3, 1, 10], [0, 0, 0.01]
    top_k, top_p, temperature, min_p = rng.permutation([*product(*choices)])[:10].T
    check(make_row(kind, VOCAB), top_k=top_k.astype(np.int64), top_p=top_p, temperature=temperature, min_p=min_p)


@pytest.mark.parametrize("kind", ["all equal", "two values", "spread 0.05", "cluster"])
def test_equal_logits_of_a_large_vocabulary_take_four_passes(kind: str) -> None:
    top_k, top_p = [0, 50, 3_073, 20_000], [0.5, 0.9, 0.5, 0.9]
    check(make_row(kind, 128_256), top_k=top_k, top_p=top_p, temperature=[1, 1, 10, 1])


@pytest.mark.usefixtures("small_tiles")
def test_a_row_with_equal_logits_has_the_same_token_alone() -> None:
    logits = torch.stack([make_row(kind, VOCAB).float() for kind in ROWS])
    parameters = make_parameters(len(logits), top_k=400, top_p=0.7)
    together, _ = sample_rows_by_triton(logits, parameters)
    for row in range(len(logits)):
        alone, _ = sample_rows_by_triton(logits[row : row + 1], parameters[row : row + 1])
        assert alone.tolist() == together[row : row + 1].tolist()
