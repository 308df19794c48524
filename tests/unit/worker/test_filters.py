"""Top-p and typical-p keep the same tokens by sorting and by radix, ties and edges included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import TopPLogitsWarper, TypicalLogitsWarper

from gpu_worker.sampling import filters
from gpu_worker.sampling.filters import beyond_by_radix, beyond_by_sorting, mask_top_p, mask_typical_p, whole_weights

SHARES = (1e-45, 1e-6, 0.1, 0.5, 0.9, 0.999, 1.0)


def by_definition(values: Tensor, weights: Tensor, wanted: float) -> list[bool]:
    """A token is cut if the tokens of larger value have the wanted weight together."""
    return [
        sum(int(w) for v, w in zip(values.tolist(), weights.tolist(), strict=True) if v > value) >= wanted
        for value in values.tolist()
    ]


def any_row(vocab: int) -> st.SearchStrategy[list[float]]:
    """Few different values, so that there are ties. Also zeros of both signs, filtered tokens, and any other float."""
    value = st.one_of(
        st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.5, -torch.inf]), st.floats(-3e4, 3e4, width=32, allow_nan=False)
    )
    return st.lists(value, min_size=vocab, max_size=vocab).filter(lambda row: max(row) > -torch.inf)


@given(rows=st.lists(any_row(80), min_size=1, max_size=3), share=st.sampled_from(SHARES))
@settings(max_examples=80, deadline=None)
def test_both_ways_follow_the_definition(rows: list[list[float]], share: float) -> None:
    values = torch.tensor(rows)
    weights = whole_weights(values)
    wanted = torch.full((len(rows), 1), share, dtype=torch.float32).double() * weights.double().sum(-1, keepdim=True)
    expected = [by_definition(v, w, float(x)) for v, w, x in zip(values, weights, wanted, strict=True)]
    assert beyond_by_sorting(values, weights, wanted).tolist() == expected
    assert beyond_by_radix(values, weights, wanted).tolist() == expected


@pytest.mark.parametrize("spread", [0.0, 0.1, 2.0, 8.0])
@pytest.mark.parametrize("vocab", [5, 1000, 32_003])
def test_both_ways_give_equal_results_on_large_rows(vocab: int, spread: float) -> None:
    """The values are rounded to bfloat16, so many are equal. Some rows have filtered tokens, some need a full sort."""
    values = (spread * torch.randn(8, vocab, generator=torch.Generator().manual_seed(vocab))).bfloat16().float()
    values[::2, 3 : vocab // 2] = -torch.inf
    values[1, 0] = 30.0
    weights = whole_weights(values)
    shares = torch.tensor([0.9, 0.9, 0.99999, 0.5, 0.1, 1.0, 1e-45, 0.3], dtype=torch.float64).unsqueeze(-1)
    wanted = shares * weights.double().sum(-1, keepdim=True)
    sorting, radix = beyond_by_sorting(values, weights, wanted), beyond_by_radix(values, weights, wanted)
    assert torch.equal(sorting, radix)
    assert not sorting.all(-1).any(), "one token stays at least"


@pytest.mark.parametrize("top_p", [0.0, 0.2, 0.7, 0.95, 0.999])
@pytest.mark.parametrize("by_radix", [False, True])
def test_both_ways_equal_transformers(top_p: float, by_radix: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if by_radix:  # as on a GPU
        monkeypatch.setattr(filters, "beyond_by_sorting", beyond_by_radix)
    ids = torch.zeros(6, 1, dtype=torch.int64)
    logits = 2 * torch.randn(6, 5000, generator=torch.Generator().manual_seed(3))
    ours = mask_top_p(logits, torch.full((6,), top_p))
    assert torch.equal(ours, TopPLogitsWarper(top_p)(ids, logits.clone()))
    if top_p:
        ours = mask_typical_p(logits, torch.full((6,), top_p))
        assert torch.equal(ours, TypicalLogitsWarper(top_p)(ids, logits.clone()))


@pytest.mark.parametrize("vocab", [2, 50, 1000, 128_256, 2**18])
def test_sums_of_weights_do_not_depend_on_their_order(vocab: int) -> None:
    """Rows of equal logits have the largest sums."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.stack((torch.zeros(vocab), torch.randn(vocab, generator=generator)))
    weights = whole_weights(logits)
    assert torch.equal(weights, weights.round())
    exact = [sum(int(w) for w in row) for row in weights.tolist()]
    assert max(exact) <= 2**53
    shuffled = weights[:, torch.randperm(vocab, generator=generator)]
    for order in (weights, weights.flip(-1), shuffled):
        assert [int(total) for total in order.sum(-1, dtype=torch.float64)] == exact
        assert [int(total) for total in order.cumsum(-1, dtype=torch.float64)[:, -1]] == exact
