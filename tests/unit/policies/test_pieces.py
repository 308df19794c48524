"""Without chunks: a prompt that fits into a step runs whole or waits. A prompt larger than any step runs in pieces."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_svc.policies.registry import build, choose
from simulator.scenario import ScenarioOutcome, ScenarioRun, ScenarioStep
from simulator.scenario_file import Scenario

BATCHES = ("decode-first", "prefill-first", "two-stage")
UNCHUNKED = {"chunked_prefill": False}


def scenario(requests: list[dict[str, Any]], **fields: Any) -> Scenario:
    """By default, a block has ten tokens, the budget is 50 tokens, and there is no prefix cache."""
    given: dict[str, Any] = {
        "block_size": 10,
        "num_blocks": 100,
        "max_num_seqs": 8,
        "max_batched_tokens": 50,
        "max_model_len": 4096,
        "prefix_caching": False,
        "options": UNCHUNKED,
        "requests": requests,
    }
    return Scenario(**given | fields)


def run(requests: list[dict[str, Any]], **fields: Any) -> ScenarioOutcome:
    file = scenario(requests, **fields)
    outcome = ScenarioRun(file, file.policies()).play()  # raises what a policy raises
    assert outcome.generated_tokens == {r["id"]: r["max_new_tokens"] for r in requests}
    return outcome


def request(name: str, prompt: int, new: int, **fields: Any) -> dict[str, Any]:
    return {"id": name, "prompt_len": prompt, "max_new_tokens": new, **fields}


def prefills(outcome: ScenarioOutcome, name: str) -> list[tuple[int, int]]:
    """(step, tokens) of each piece of a prompt."""
    rows = ((step.step, row) for step in outcome.steps for row in step.scheduled)
    return [(step, row.tokens) for step, row in rows if row.id == name and row.phase == "prefill"]


@pytest.mark.parametrize("batch", BATCHES)
def test_a_prompt_that_fits_a_step_runs_whole_or_waits(batch: str) -> None:
    outcome = run([request("a", 30, 3), request("b", 50, 3)], preset={"batch": batch})
    [(_, tokens)] = prefills(outcome, "b")
    assert tokens == 50


@pytest.mark.parametrize("batch", BATCHES)
def test_a_prompt_too_long_for_any_step_takes_the_tokens_that_are_left(batch: str) -> None:
    requests = [request("a", 20, 3), request("b", 51, 3), request("c", 60, 3)]
    outcome = run(requests, preset={"batch": batch})
    assert prefills(outcome, "b")[0] == (0, 30)
    for step in outcome.steps:
        whole = {r["id"]: r["prompt_len"] for r in requests}
        began = [row for row in step.scheduled if row.phase == "prefill" and row.tokens < whole[row.id]]
        ends = [row for row in began if prefills(outcome, row.id)[-1][0] == step.step]
        assert len(began) - len(ends) <= 1, "only one prompt is cut at a time"


@pytest.mark.parametrize("batch", BATCHES)
def test_a_prompt_that_has_begun_continues_beside_decodes(batch: str) -> None:
    outcome = run([request("x", 5, 20), request("a", 120, 3, arrive=1)], preset={"batch": batch})
    tokens = [50, 50, 20] if batch == "prefill-first" else [49, 49, 22]
    assert prefills(outcome, "a") == list(enumerate(tokens, start=1))


@pytest.mark.parametrize("preset", ["vllm-v0", "trtllm-max-util"])
def test_a_preempted_request_longer_than_the_budget_resumes(preset: str) -> None:
    requests = [request(name, 30, 120) for name in "ab"] + [request("c", 30, 20, arrive=2)]
    outcome = run(requests, preset=preset, options={}, num_blocks=16, max_batched_tokens=64)
    resumed = prefills(outcome, "b")[1:]
    assert resumed[0][1] == 64
    assert sum(tokens for _, tokens in resumed) > 64


@pytest.mark.parametrize("preset", ["vllm-v0", "trtllm-no-evict"])
def test_a_prompt_that_no_step_can_hold_blocks_no_other_request(preset: str) -> None:
    requests = [request("x", 5, 60), request("a", 150, 3, arrive=1), request("b", 9, 3, arrive=2)]
    outcome = run(requests, preset=preset, options={}, max_batched_tokens=100)
    finished = [step.step for step in outcome.steps if "b" in step.finished]
    assert finished[0] < 10


class ChangingRun(ScenarioRun):
    preset: str

    def _submit(self, step: ScenarioStep) -> None:
        super()._submit(step)
        if step.step == 3:
            self.core.set_policies(build(choose(self.preset)))


@pytest.mark.parametrize("preset", ["vllm-v0", "trtllm-no-evict", "trtllm-max-util", "trtllm-static"])
def test_chunks_are_switched_off_while_prompts_are_in_chunks_and_wait(preset: str) -> None:
    requests = [
        request("d", 10, 30),
        request("long", 200, 4, arrive=1),
        request("e", 10, 30, arrive=1),
        request("long2", 120, 4, arrive=2),
    ]
    file = scenario(requests, options={}, num_blocks=60, max_num_seqs=3, preset="paceline")
    changing = ChangingRun(file, file.policies())
    changing.preset = preset
    outcome = changing.play()
    assert outcome.generated_tokens == {r["id"]: r["max_new_tokens"] for r in requests}
    assert [step for step, _ in prefills(outcome, "long")] == [1, 2, 3, 4, 5], "it goes on in every step"


@pytest.mark.parametrize("preset", ["vllm-v0", "trtllm-max-util", "vllm-v1", "sglang"])
def test_no_request_is_preempted_for_a_prompt_that_does_not_run(preset: str) -> None:
    # The pool holds both requests until the running one has grown.
    requests = [request("x", 5, 60), request("a", 150, 3, arrive=1)]
    outcome = run(requests, preset=preset, num_blocks=20, max_batched_tokens=100)
    for step in outcome.steps:
        if step.preempted:
            assert {row.id for row in step.scheduled} != {"x"}


def test_tokens_that_a_short_chunk_leaves_go_to_the_next_prompt() -> None:
    options = {"chunked_prefill": True, "max_context_tokens": 20}
    outcome = run([request("a", 60, 3), request("b", 60, 3)], preset={"batch": "two-stage"}, options=options)
    assert prefills(outcome, "a") == prefills(outcome, "b") == [(0, 20), (1, 20), (2, 20)]


@pytest.mark.parametrize("iterations", [0, 1, 2, 5])
def test_prompts_wait_for_at_most_batch_wait_iters(iterations: int) -> None:
    """Later prompts wait as long as the first ones."""
    requests = [request("x", 5, 40), request("a", 5, 3, arrive=2), request("b", 5, 3, arrive=20)]
    options = {"batch_wait_iters": iterations, "batch_wait_max_tokens_ratio": 1.0}
    outcome = run(requests, preset="trtllm-no-evict", options=options)
    assert [prefills(outcome, name) for name in "ab"] == [[(2 + iterations, 5)], [(20 + iterations, 5)]]


def test_decodes_grow_before_a_request_is_admitted() -> None:
    # Three blocks are free when the first request needs another block. A prompt of three blocks would take them all.
    requests = [request("a", 10, 12), request("b", 30, 3, arrive=1)]
    outcome = run(requests, preset={"capacity": "watermark", "batch": "two-stage"}, options={}, num_blocks=4)
    assert not any(step.preempted for step in outcome.steps)
