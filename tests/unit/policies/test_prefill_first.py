"""The budgets of prefill-first, which are charged in whole blocks as in SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from scheduler_svc.core.policy.step import Step
from scheduler_svc.policies.api import Verdict
from scheduler_svc.policies.batch.prefill_first import Left, PrefillFirst
from tests.unit.policies.test_pieces import prefills, request, run


@pytest.mark.parametrize(("budget", "largest"), [(10, 8), (8, 8), (3, 3)])
def test_a_cut_prompt_gets_whole_blocks_if_a_block_fits(budget: int, largest: int) -> None:
    step: Any = SimpleNamespace(budget_tokens=budget)
    assert Left(cast(Step, step), 100, unit=4).largest_cut() == largest


def test_without_chunks_the_first_prompt_may_exceed_max_prefill_tokens() -> None:
    options = {"chunked_prefill": False, "max_prefill_tokens": 20}
    outcome = run([request("a", 40, 3), request("b", 40, 3)], preset={"batch": "prefill-first"}, options=options)
    assert (prefills(outcome, "a"), prefills(outcome, "b")) == ([(0, 40)], [(1, 40)])


def test_a_swapped_out_request_that_the_budget_does_not_fit_is_told_why() -> None:
    """Such a request was swapped out before its prompt was computed."""
    rejected: list[tuple[object, ...]] = []
    step: Any = SimpleNamespace(
        budget_tokens=3,
        num_swapped=1,
        is_empty=False,
        waiting=lambda: iter(["a", "b"]),
        uncached_tokens=lambda request: 5,
        reject=lambda *arguments: rejected.append(arguments),
    )
    PrefillFirst()._resume_swapped(cast(Step, step))
    assert rejected == [("a", Verdict.STOP, "budget", "5 tokens, 3 are left")]
