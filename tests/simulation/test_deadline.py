"""The order `deadline` on the cores, one second a step: it serves requests in time and gives up hopeless ones early."""

from __future__ import annotations

from typing import Any

from simulator.scenario import ScenarioOutcome, ScenarioRun
from simulator.scenario_file import Scenario

Failed = dict[str, tuple[int, str]]


def play(requests: list[dict[str, Any]], deadlines: dict[str, float], **fields: Any) -> tuple[ScenarioOutcome, Failed]:
    """Plays a scenario. `deadlines` are steps; other requests have 1,000. Also returns why and when requests failed."""
    scenario = Scenario.model_validate(
        {
            "block_size": 10,
            "num_blocks": 400,
            "max_model_len": 4096,
            "prefix_caching": False,
            "preset": {"order": "deadline"},
            "requests": requests,
            **fields,
        }
    )
    run = ScenarioRun(scenario, scenario.policies())
    for _, submission in run._submissions:
        submission.deadline_s = deadlines.get(submission.request_id, 1000.0)
    submit = run._submit

    def submit_and_tick(step: Any) -> None:
        submit(step)
        run.core.tick(float(step.step))

    run._submit = submit_and_tick  # type: ignore[method-assign]
    outcome = run.play()
    failed = {one["id"]: (step.step, one["reason"]) for step in outcome.steps for one in step.rejected}
    return outcome, failed


def test_with_one_slot_and_light_traffic_a_request_ends_before_its_deadline() -> None:
    requests = [{"id": f"s{i}", "arrive": 4 * i, "prompt_len": 20, "max_new_tokens": 5} for i in range(6)]
    requests.append({"id": "big", "arrive": 22, "prompt_len": 1500, "max_new_tokens": 3})
    outcome, failed = play(requests, {"big": 80.0}, max_num_seqs=1, max_batched_tokens=8192)
    assert not failed
    assert outcome.generated_tokens["big"] == 3


def test_a_request_that_would_be_late_is_given_up_while_prompts_always_wait() -> None:
    """The worker computes 100 tokens a second, so a prompt of 1,500 tokens takes 15 s. Forty prompts of 130 tokens keep
    it busy meanwhile."""
    requests = [{"id": f"s{i}", "prompt_len": 130, "max_new_tokens": 1} for i in range(40)]
    requests += [{"id": name, "arrive": 10, "prompt_len": 1500, "max_new_tokens": 1} for name in ("late", "in_time")]
    outcome, failed = play(requests, {"late": 15.0, "in_time": 40.0}, max_num_seqs=8, max_batched_tokens=100)
    assert failed == {"late": (10, "deadline_s: 5.0 s are left, which is too little")}
    assert outcome.generated_tokens["in_time"] == 1
