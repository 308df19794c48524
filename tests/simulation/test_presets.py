"""Every preset on random scenarios, alone and with changes of the preset during the run.

The tests check invariants of docs/design.md, and that two equal runs decide alike.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.policies.presets import PRESETS
from scheduler_svc.policies.registry import build, choose
from simulator.scenario import ScenarioOutcome, ScenarioRun, ScenarioStep
from simulator.scenario_file import Scenario

REQUEST: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "arrive": st.integers(0, 12),
        "prompt_len": st.integers(1, 60),
        "max_new_tokens": st.integers(1, 30),
        "priority": st.sampled_from([0.0, 0.5, 1.0]),
        "tenant": st.sampled_from(["a", "b"]),
        "shared": st.integers(0, 60),
        "family": st.sampled_from(["x", "y"]),
    }
)


@st.composite
def scenarios(draw: st.DrawFn) -> dict[str, Any]:
    block_size = draw(st.sampled_from([1, 4, 16]))
    budget = draw(st.sampled_from([4, 16, 64, 256]))  # some prompts and preempted requests are longer
    requests = []
    for i, fields in enumerate(draw(st.lists(REQUEST, min_size=1, max_size=12))):
        shared, family = min(fields.pop("shared"), fields["prompt_len"]), fields.pop("family")
        requests.append({"id": str(i), **fields, "prefix": {"family": family, "len": shared}})
    longest = max(request["prompt_len"] + request["max_new_tokens"] for request in requests)
    return {
        "block_size": block_size,
        "num_blocks": math.ceil(longest / block_size) + draw(st.integers(0, 30)) + 1,
        "max_num_seqs": draw(st.integers(1, 8)),
        "max_batched_tokens": budget,
        "max_model_len": 128,
        "prefix_caching": draw(st.booleans()),
        "requests": requests,
        "options": draw(st.sampled_from([{}, {"chunked_prefill": False}, {"chunked_prefill": True}])),
    }


class ChangingRun(ScenarioRun):
    """Changes the preset during the run. A key of `changes` is the step before which its preset comes into force."""

    def __init__(self, scenario: Scenario, changes: dict[int, str]) -> None:
        super().__init__(scenario, scenario.policies())
        self.changes = sorted(changes.items())

    def _submit(self, step: ScenarioStep) -> None:
        super()._submit(step)
        while self.changes and self.changes[0][0] <= step.step:
            self.core.set_policies(build(choose(self.changes.pop(0)[1], options=self.scenario.options)))


def check(scenario: dict[str, Any], changes: dict[int, str]) -> None:
    def play() -> ScenarioOutcome:
        return ChangingRun(Scenario.model_validate(scenario), changes).play()  # raises what a policy raises

    outcome = play()
    assert not outcome.stuck
    assert outcome.generated_tokens == {r["id"]: r["max_new_tokens"] for r in scenario["requests"]}
    finished = [name for step in outcome.steps for name in step.finished]
    assert sorted(finished) == sorted(r["id"] for r in scenario["requests"])
    arrival = {r["id"]: r["arrive"] for r in scenario["requests"]}
    for step in outcome.steps:
        names = [scheduled.id for scheduled in step.scheduled]
        assert len(set(names)) == len(names) <= scenario["max_num_seqs"]
        assert sum(scheduled.tokens for scheduled in step.scheduled) <= scenario["max_batched_tokens"]
        assert step.running <= scenario["max_num_seqs"]
        assert 0 <= step.free_blocks <= scenario["num_blocks"]
        assert all(arrival[name] <= step.step for name in names)
    assert play().as_json() == outcome.as_json()


@pytest.mark.parametrize("preset", PRESETS)
@settings(max_examples=40, deadline=None)
@given(scenario=scenarios())
def test_every_request_ends_and_no_budget_is_exceeded(preset: str, scenario: dict[str, Any]) -> None:
    check(scenario | {"preset": preset}, changes={})


@settings(max_examples=100, deadline=None)
@given(
    scenario=scenarios(),
    preset=st.sampled_from(list(PRESETS)),
    changes=st.dictionaries(st.integers(1, 40), st.sampled_from(list(PRESETS)), min_size=1, max_size=4),
)
def test_every_request_ends_if_the_preset_changes_in_the_middle(
    scenario: dict[str, Any], preset: str, changes: dict[int, str]
) -> None:
    check(scenario | {"preset": preset}, changes)
