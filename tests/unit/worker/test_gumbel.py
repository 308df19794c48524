"""The draw follows the distribution, depends on seed, position and token alone, and tolerates noise in the logits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from gpu_worker.sampling.gumbel import clocks, draw, draw_keys, noise_bits


def keys_of(seeds: npt.ArrayLike, positions: npt.ArrayLike) -> Tensor:
    seeds, positions = np.broadcast_arrays(np.asarray(seeds, np.uint64), np.asarray(positions, np.int64))
    return torch.from_numpy(draw_keys(seeds, positions))


@pytest.mark.parametrize(("seeds", "positions"), [(3, range(40_000)), (range(40_000), 3)])
def test_shares_are_probabilities(seeds: npt.ArrayLike, positions: npt.ArrayLike) -> None:
    """By chi square over a whole vocabulary: 40,000 draws of one sequence, and one of each of 40,000 sequences."""
    logits = 2 * torch.randn(1, 300, generator=torch.Generator().manual_seed(0))
    tokens = draw(logits.expand(40_000, -1), keys_of(seeds, positions))
    expected = 40_000 * logits.softmax(-1)[0]
    often = expected > 5
    error = ((torch.bincount(tokens, minlength=300) - expected) ** 2 / expected)[often]
    assert 100 < often.sum() < 300
    assert 0.7 < error.mean() < 1.3


def test_the_noise_depends_only_on_seed_position_and_token() -> None:
    seeds = np.array([0, 1, 2**63, 2**64 - 1] * 250, np.uint64)
    keys = keys_of(seeds, np.arange(1000))
    bits = noise_bits(keys, 1003).numpy()
    for row in (0, 1, 502, 999):
        alone = noise_bits(keys_of(seeds[row : row + 1], row), 77).numpy()
        assert (alone[0] == bits[row, :77]).all()
    assert (noise_bits(keys.long(), 1003).numpy() == bits).all(), "the integer type of the keys does not matter"


def test_the_noise_looks_random() -> None:
    """Neighbouring positions, seeds and tokens have noise that is not more correlated than by chance."""
    for keys in (keys_of(7, np.arange(4000)), keys_of(np.arange(4000), 7)):
        values = noise_bits(keys, 200).numpy().view(np.uint32) / 2.0**32
        assert abs(values.mean() - 0.5) < 0.002
        assert len(np.unique(values)) > 0.9995 * values.size
        alike = np.asarray(np.corrcoef(values.T))[np.triu_indices(200, 1)] * np.sqrt(4000)
        assert 0.98 < alike.std() < 1.02
        assert np.abs(alike).max() < 6
        alike = np.asarray(np.corrcoef(values[:600]))[np.triu_indices(600, 1)] * np.sqrt(200)
        assert 0.98 < alike.std() < 1.02
        assert np.abs(alike).max() < 6


def test_each_exponential_time_is_positive_and_finite() -> None:
    """For all bits, including the smallest and the largest number."""
    times = clocks(keys_of(range(200), 1), 5000)
    assert times.min() > 0
    assert times.max() < torch.inf
    assert abs(times.mean() - 1) < 0.01


@pytest.mark.parametrize("bits", [0, -1, 2**31 - 1, -(2**31)])
def test_the_only_token_that_is_left_is_drawn(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "gpu_worker.sampling.gumbel.noise_bits", lambda *_: torch.full((1, 700), bits, dtype=torch.int32)
    )
    logits = torch.full((1, 700), -torch.inf)
    logits[0, 5] = -80.0
    assert draw(logits, keys_of(1, [1])).tolist() == [5]


def test_noise_in_the_logits_changes_almost_no_draw() -> None:
    """A draw by cumulative probabilities would change with this noise in about one of 1,500 cases."""
    generator = torch.Generator().manual_seed(0)
    differ = 0
    for start in range(0, 20_000, 1000):
        logits = 3 * torch.randn(1000, 1000, generator=generator)
        noisy = logits + 1e-5 * torch.randn(1000, 1000, generator=generator)
        keys = keys_of(5, np.arange(start, start + 1000))
        differ += int((draw(logits, keys) != draw(noisy, keys)).sum())
    assert differ <= 2
