"""Requests with equal prompts, but with different adapters or salts, share no blocks and do not wait for each other."""

from __future__ import annotations

import pytest

from simulator.scenario import ScenarioOutcome, ScenarioRun
from simulator.scenario_file import Scenario, ScenarioRequest


def play(field: str, names: list[str], requests: list[ScenarioRequest], num_blocks: int) -> ScenarioOutcome:
    """Plays the requests under guaranteed-no-evict. `names` has the adapter or the salt of each request."""
    for request, name in zip(requests, names, strict=True):
        if field == "lora":
            request.lora = name
    scenario = Scenario(
        block_size=10,
        num_blocks=num_blocks,
        max_num_seqs=4,
        max_batched_tokens=8192,
        max_model_len=4096,
        preset="trtllm-no-evict",
        requests=requests,
    )
    run = ScenarioRun(scenario, scenario.policies())
    if field == "cache_salt":  # a scenario file has no such field
        for (_, submission), name in zip(run._submissions, names, strict=True):
            submission.cache_salt = name
    outcome = run.play()
    assert not outcome.stuck
    return outcome


def started(outcome: ScenarioOutcome) -> dict[str, int]:
    """The step in which each request began."""
    first: dict[str, int] = {}
    for step in outcome.steps:
        for scheduled in step.scheduled:
            first.setdefault(scheduled.id, step.step)
    return first


@pytest.mark.parametrize("field", ["lora", "cache_salt"])
@pytest.mark.parametrize(("names", "second"), [(["a", "a"], 1), (["a", "b"], 0)])
def test_no_request_waits_for_a_prefix_that_is_not_for_it(field: str, names: list[str], second: int) -> None:
    prompt = list(range(1, 36))
    requests = [ScenarioRequest(id=name, prompt=prompt, max_new_tokens=3) for name in ("r1", "r2")]
    assert started(play(field, names, requests, num_blocks=20)) == {"r1": 0, "r2": second}


@pytest.mark.parametrize("field", ["lora", "cache_salt"])
@pytest.mark.parametrize("same", [True, False])
def test_two_namespaces_share_no_cached_blocks(field: str, same: bool) -> None:
    """The pool has 11 blocks. Each cached prefix takes 4 of them, and each request needs 2 more blocks of its own."""
    prompt = list(range(1, 42))
    requests = [
        ScenarioRequest(id="w1", prompt=prompt, max_new_tokens=1),
        ScenarioRequest(id="w2", arrive=2, prompt=prompt, max_new_tokens=1),
        ScenarioRequest(id="r1", arrive=5, prompt=prompt, max_new_tokens=15),
        ScenarioRequest(id="r2", arrive=5, prompt=prompt, max_new_tokens=15),
    ]
    outcome = play(field, ["a", "b", "a", "a" if same else "b"], requests, num_blocks=11)
    assert started(outcome)["r2"] == (5 if same else 20), "r2 runs beside r1, or after r1"
    assert not any(step.preempted for step in outcome.steps)
