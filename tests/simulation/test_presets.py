"""Every preset on random scenarios: what holds whatever is decided (DESIGN §5), and that it is decided twice alike."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.policies.presets import PRESETS
from simulator.scenario import play
from simulator.scenario_file import Scenario

REQUEST = st.fixed_dictionaries(
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
    budget = draw(st.sampled_from([16, 64, 256]))
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
        # Else a prompt longer than the budget could never run.
        "options": {"chunked_prefill": True},
    }


@pytest.mark.parametrize("preset", PRESETS)
@settings(max_examples=40, deadline=None)
@given(scenario=scenarios())
def test_every_request_ends_and_no_budget_is_exceeded(preset: str, scenario: dict[str, Any]) -> None:
    file = Scenario.model_validate({**scenario, "preset": preset})
    outcome = play(file)
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
    again = play(Scenario.model_validate({**scenario, "preset": preset}))
    assert again.as_json() == outcome.as_json()
