"""The sampling kernels for GPUs on rows that have too many tokens around a limit to copy them after one count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.device import counts
from gpu_worker.sampling import fused_kernels
from gpu_worker.sampling.filters import whole_weights
from tests.unit.worker.test_fused import SHAPES, both, make_parameters
from tests.unit.worker.test_fused_ties import ROWS, check, make_row

VOCAB = 4_001
BOTH = {"top_p": [0.5, 0.9, 1, 1, 0.5, 0.9], "top_k": [0, 0, 900, 2_000, 2_000, 2_500]}


@pytest.fixture(autouse=True)
def few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_kernels, "TILE", 512)
    monkeypatch.setattr(fused_kernels, "MAX_CANDIDATES", 1_024)


def shuffled(logits: Tensor) -> Tensor:
    return logits[torch.from_numpy(np.random.default_rng(1).permutation(len(logits)))]


def nearly_equal(step: float, values: int = 3_000, count: int = 3_000, vocab: int = VOCAB) -> Tensor:
    """`count` logits with different values in a small part of the row's range."""
    logits = torch.full((vocab,), -30.0)
    logits[0], logits[1 : 1 + count] = 0.0, -1 - torch.arange(count) % values * step
    return shuffled(logits)


@pytest.mark.parametrize("values", [3, 3_000])
@pytest.mark.parametrize("step", [1e-4, 1e-6])
def test_thousands_of_nearly_equal_logits_at_a_limit_take_four_passes(step: float, values: int) -> None:
    check(nearly_equal(step, values), temperature=1, **BOTH)


@pytest.mark.parametrize("values", [2, 12_000])
def test_adjacent_numbers_at_a_limit_take_four_passes(values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real size of the copies, of which there are fewer than these logits."""
    monkeypatch.undo()
    filters = {"top_p": [0.5, 1, 0.7], "top_k": [0, 5_000, 9_000]}
    check(nearly_equal(2.0**-23, values, 12_000, 16_000), temperature=1, **filters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1, 100])
def test_a_logit_far_below_all_others_takes_no_more_passes(dtype: torch.dtype, temperature: float) -> None:
    """It makes the range of the row wide, and so the bins."""
    logits = torch.from_numpy(np.random.default_rng(2).normal(0, 0.3, VOCAB)).to(dtype)
    logits[7] = -1e4
    check(logits, temperature=temperature, **BOTH)


@pytest.mark.parametrize("temperature", [1, 7])
@pytest.mark.parametrize("top_k", [0, 3_500])
def test_top_p_that_ends_at_a_run_of_equal_logits_takes_four_passes(temperature: float, top_k: int) -> None:
    """A little before, at, or a little after the first or the last of 2,000 equal logits."""
    logits = torch.from_numpy(np.random.default_rng(3).normal(-2, 1, VOCAB)).float()
    logits[500:2_500] = -2.125
    z = logits / temperature
    kept = z.topk(top_k or VOCAB).values
    weights = whole_weights(kept.unsqueeze(0))[0].double()
    ends = torch.stack([weights[kept > -2.125 / temperature].sum(), weights[kept >= -2.125 / temperature].sum()])
    shares = (ends / weights.sum())[:, None] * (1 + torch.tensor([-1e-2, -1e-4, -1e-6, 0, 1e-6, 1e-4, 1e-2]))
    top_p = shares.clamp(max=1).flatten().tolist()
    check(logits, temperature=temperature, top_p=top_p, top_k=[top_k] * len(top_p))


@pytest.mark.parametrize("seed", range(3))
def test_random_rows_and_filters_draw_the_tokens_that_torch_draws(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for make in (*SHAPES.values(), *(make for _, make in ROWS.values())):
        dtype = [torch.float32, torch.bfloat16][rng.integers(2)]
        row = torch.from_numpy(make(rng, VOCAB) * rng.choice([0.03, 1, 1, 4])).to(dtype)
        check(
            row,
            temperature=rng.choice([0.1, 0.7, 1, 3, 100], 3),
            min_p=rng.choice([0, 0, 0, 0.02], 3),
            top_p=rng.choice([1, 0.999, 0.95, 0.8, 0.5, 0.1], 3),
            top_k=rng.choice([0, 0, 40, 400, 1_000, 2_500], 3),
        )


@pytest.mark.parametrize("filters", [{"top_p": 0.5}, {"top_k": 1_500}, {"top_k": 3_000, "top_p": 0.5}])
def test_too_many_different_logits_with_one_key_are_examined_in_the_whole_row(filters: dict[str, Any]) -> None:
    """Within 2**-30 of the row's range."""
    logits = torch.full((4, VOCAB), -30.0)
    logits[:, :3_900] = -torch.arange(3_900) * 1e-12
    with counts._count_loads(logits) as loads:
        expected, drawn = both(logits, make_parameters(4, **filters))
    assert drawn == expected
    assert loads.min() > 4 * VOCAB


def test_a_row_divided_into_cells_has_the_same_token_alone() -> None:
    logits = torch.stack([nearly_equal(1e-6), make_row("two values", VOCAB).float()])
    parameters = make_parameters(2, top_k=2_000, top_p=0.7)
    expected, together = both(logits, parameters)
    alone = [both(logits[row : row + 1], parameters[row : row + 1])[1][0] for row in range(2)]
    assert alone == together == expected
