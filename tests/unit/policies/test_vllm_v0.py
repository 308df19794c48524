"""Rules of vLLM V0 that its preset does not share with SGLang's preset. Most tests also show what SGLang does."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.v1.inference_pb2 import SessionRequest
from simulator.scenario import ScenarioOutcome, ScenarioRun, ScenarioStep, play
from simulator.scenario_file import Scenario


def scenario(preset: str, requests: list[dict[str, Any]], **fields: Any) -> Scenario:
    """By default, a block has ten tokens, and there is no prefix cache."""
    given: dict[str, Any] = {
        "block_size": 10,
        "num_blocks": 20,
        "max_num_seqs": 8,
        "max_batched_tokens": 8192,
        "max_model_len": 40_000,
        "prefix_caching": False,
        "preset": preset,
        "requests": [{"id": name, **request} for name, request in zip("abc", requests, strict=False)],
    }
    return Scenario(**given | fields)


def run(preset: str, requests: list[dict[str, Any]], **fields: Any) -> ScenarioOutcome:
    return play(scenario(preset, requests, **fields))


def tokens(outcome: ScenarioOutcome, step: int) -> dict[str, int]:
    return {row.id: row.tokens for row in outcome.steps[step].scheduled}


def starts(outcome: ScenarioOutcome) -> dict[str, int]:
    first: dict[str, int] = {}
    for step in outcome.steps:
        for row in step.scheduled:
            first.setdefault(row.id, step.step)
    return first


def test_the_budget_counts_tokens() -> None:
    """SchedulingBudget.can_schedule: the tokens scheduled so far and the new tokens may use up the whole budget."""
    requests = [{"prompt_len": 11, "max_new_tokens": 3}, {"prompt_len": 9, "max_new_tokens": 3}]
    assert tokens(run("vllm-v0", requests, max_batched_tokens=20), 0) == {"a": 11, "b": 9}
    assert tokens(run("sglang", requests, max_batched_tokens=20), 0) == {"a": 11}, (
        "11 tokens are charged as two blocks, so no budget is left"
    )


def test_the_shortest_prompts_fill_the_budget() -> None:
    outcome = run("vllm-v0", [{"prompt_len": 1, "max_new_tokens": 3}] * 3, max_batched_tokens=3)
    assert tokens(outcome, 0) == {"a": 1, "b": 1, "c": 1}


def test_only_the_budget_limits_prompts() -> None:
    requests = [{"prompt_len": 10_000, "max_new_tokens": 2}] * 3
    pool = {"block_size": 16, "num_blocks": 5000, "max_batched_tokens": 40_000}
    assert tokens(run("vllm-v0", requests, **pool), 0) == {"a": 10_000, "b": 10_000, "c": 10_000}
    assert tokens(run("sglang", requests, **pool), 0) == {"a": 10_000, "b": 10_000}, (
        "max_prefill_tokens (16,384) is used up"
    )


class CancellingRun(ScenarioRun):
    """Request b is cancelled before step 5."""

    def _submit(self, step: ScenarioStep) -> None:
        super()._submit(step)
        if step.step == 5:
            self.core.session_message("scenario", SessionRequest(cancels=[1]), 0.0)


@pytest.mark.parametrize(("options", "expected"), [({}, 5), ({"closes_when_full": True}, 40)])
def test_waiting_requests_are_tried_in_every_step(options: dict[str, Any], expected: int) -> None:
    """vLLM's _schedule_prefills looks at the queue whenever no sequence is swapped out.

    Here b is rejected because blocks are missing; c would fit. vLLM admits c as soon as b is cancelled. SGLang looks at
    the queue again when a sequence has left the batch.
    """
    requests = [
        {"prompt_len": 40, "max_new_tokens": 40},
        {"prompt_len": 90, "max_new_tokens": 10, "arrive": 1},
        {"prompt_len": 10, "max_new_tokens": 5, "arrive": 2},
    ]
    file = scenario("vllm-v0", requests, num_blocks=12, options=options)
    assert starts(CancellingRun(file, file.policies()).play()) == {"a": 0, "c": expected}
