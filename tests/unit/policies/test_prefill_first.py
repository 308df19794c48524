"""The budgets of prefill-first, which are charged in whole blocks as in SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from scheduler_svc.core.policy.step import Step
from scheduler_svc.policies.batch.prefill_first import Left
from tests.unit.policies.test_pieces import prefills, request, run


@pytest.mark.parametrize(("budget", "largest"), [(10, 8), (8, 8), (3, 3)])
def test_a_cut_prompt_gets_whole_blocks_if_a_block_fits(budget: int, largest: int) -> None:
    step: Any = SimpleNamespace(budget_tokens=budget)
    assert Left(cast(Step, step), 100, unit=4).largest_cut() == largest


def test_without_chunks_the_first_prompt_may_be_longer_than_the_prompts_of_a_step() -> None:
    options = {"chunked_prefill": False, "max_prefill_tokens": 20}
    outcome = run([request("a", 40, 3), request("b", 40, 3)], preset={"batch": "prefill-first"}, options=options)
    assert (prefills(outcome, "a"), prefills(outcome, "b")) == ([(0, 40)], [(1, 40)])
