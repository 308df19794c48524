"""Rules of vLLM's V1 scheduler that are easily missed (all of them are compared with the original in tests/peer)."""

from __future__ import annotations

from typing import Any

from simulator.scenario import ScenarioOutcome, play
from simulator.scenario_file import Scenario


def run(requests: list[dict[str, Any]], **fields: Any) -> ScenarioOutcome:
    """By default, a block has four tokens, and there is no prefix cache."""
    scenario: dict[str, Any] = {
        "block_size": 4,
        "num_blocks": 100,
        "max_num_seqs": 8,
        "max_batched_tokens": 64,
        "max_model_len": 256,
        "prefix_caching": False,
        "preset": "vllm-v1",
        "requests": [{"id": str(number), **request} for number, request in enumerate(requests)],
    }
    return play(Scenario(**scenario | fields))


def tokens(outcome: ScenarioOutcome, step: int) -> dict[str, int]:
    return {row.id: row.tokens for row in outcome.steps[step].scheduled}


def test_long_prefill_threshold_spares_a_lone_request() -> None:
    long = {"prompt_len": 100, "max_new_tokens": 2}
    options = {"long_prefill_token_threshold": 10}
    assert tokens(run([long], options=options), 0) == {"0": 64}
    late = run([long, {"arrive": 1, "prompt_len": 3, "max_new_tokens": 1}], options=options)
    assert tokens(late, 1) == {"0": 10, "1": 3}
    assert tokens(late, 2) == {"0": 26}, "alone again"


def test_a_preempted_request_needs_no_block_for_its_own_next_token() -> None:
    # All three requests need a block for their second decode. Preempting the last one frees a block and ends its need.
    outcome = run([{"prompt_len": 3, "max_new_tokens": 8}] * 3, num_blocks=4)
    crossing = outcome.steps[2]
    assert [victim["id"] for victim in crossing.preempted] == ["2"]
    assert tokens(outcome, 2) == {"0": 1, "1": 1}


def test_no_request_is_preempted_for_blocks_that_have_just_come_free() -> None:
    # The first request ends in the step before the second one needs a block, and no request waits.
    outcome = run([{"prompt_len": 2, "max_new_tokens": 2}, {"prompt_len": 3, "max_new_tokens": 3}], num_blocks=2)
    assert outcome.steps[1].finished == ["0"]
    assert not any(step.preempted for step in outcome.steps)
