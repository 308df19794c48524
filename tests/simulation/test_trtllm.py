"""The trtllm-* presets against TensorRT-LLM's own test scenarios. The numbers in the names are the rows of its tests.

docs/preset-checks.md lists the rows that are left out, and why.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from paceline.v1.common_pb2 import SamplingParams
from scheduler_svc.core.types import SchedulerConfig
from scheduler_svc.policies.registry import build, choose
from simulator.scenario import ScenarioOutcome, play
from simulator.scenario_file import Scenario
from simulator.system import LocalSystem
from simulator.toy_worker import ToyWorker

NO_EVICT, MAX_UTIL, STATIC = "trtllm-no-evict", "trtllm-max-util", "trtllm-static"
ALL = (NO_EVICT, MAX_UTIL, STATIC)
CHUNKS_OF_20 = {"chunked_prefill": True, "chunk_unit_tokens": 20, "max_context_tokens": 20}


def request(name: int, prompt: int | range, new: int, **fields: Any) -> dict[str, Any]:
    given = {"prompt_len": prompt} if isinstance(prompt, int) else {"prompt": list(prompt)}
    return {"id": str(name), "max_new_tokens": new, **given, **fields}


def run(preset: str | dict[str, str], requests: list[dict[str, Any]], **fields: Any) -> ScenarioOutcome:
    """A block has ten tokens, as in TensorRT-LLM's tests. By default there are 20 blocks and 2 slots."""
    scenario: dict[str, Any] = {
        "block_size": 10,
        "num_blocks": 20,
        "max_num_seqs": 2,
        "max_batched_tokens": 8192,
        "max_model_len": 4096,
        "prefix_caching": False,
        "preset": preset,
        "requests": requests,
    }
    outcome = play(Scenario.model_validate(scenario | fields))
    assert not outcome.stuck
    assert outcome.generated_tokens == {r["id"]: r["max_new_tokens"] for r in requests}
    return outcome


def ranges(outcome: ScenarioOutcome) -> str:
    """The requests of each step, folded: "0-79 {0,1}; 80-119 {2}"."""
    folded: list[tuple[str, int, int]] = []
    for step in outcome.steps:
        ids = "{" + ",".join(sorted(scheduled.id for scheduled in step.scheduled)) + "}"
        if folded and folded[-1][0] == ids:
            folded[-1] = (ids, folded[-1][1], step.step)
        else:
            folded.append((ids, step.step, step.step))
    return "; ".join(f"{first}-{last} {ids}" for ids, first, last in folded)


def prefills(outcome: ScenarioOutcome, name: str) -> list[tuple[int, int, int]]:
    """(step, tokens, cached tokens) of each chunk of a request."""
    return [
        (step.step, s.tokens, s.cached_tokens)
        for step in outcome.steps
        for s in step.scheduled
        if s.id == name and s.phase == "prefill"
    ]


@pytest.mark.parametrize("preset", ALL)
def test_1_both_fit(preset: str) -> None:
    assert ranges(run(preset, [request(0, 10, 80), request(1, 10, 80)])) == "0-79 {0,1}"


@pytest.mark.parametrize("preset", ALL)
def test_6_prompts_in_chunks_of_20(preset: str) -> None:
    outcome = run(preset, [request(0, 50, 40), request(1, 50, 40)], options=CHUNKS_OF_20)
    assert prefills(outcome, "0") == [(0, 20, 0), (1, 20, 0), (2, 10, 0)]
    assert outcome.num_steps == 42


def test_7_max_utilization_pauses_the_last() -> None:
    outcome = run(MAX_UTIL, [request(0, 10, 80), request(1, 10, 80)], num_blocks=10)
    assert ranges(outcome) == "0-40 {0,1}; 41-79 {0}; 80-118 {1}"
    assert [p["id"] for p in outcome.steps[41].preempted] == ["1"]
    assert prefills(outcome, "1") == [(0, 10, 0), (80, 51, 0)]


def test_10_max_utilization_pauses_the_less_urgent() -> None:
    outcome = run(MAX_UTIL, [request(0, 10, 80, priority=0.5), request(1, 10, 80, priority=0.6)], num_blocks=10)
    assert ranges(outcome) == "0-40 {0,1}; 41-79 {1}; 80-118 {0}"
    assert [s.id for s in outcome.steps[5].scheduled] == ["1", "0"]


def test_4_5_adapters_that_fit_the_batch_and_one_that_does_not() -> None:
    """In TensorRT-LLM adapters take pages. Here a limit counts adapters. Two of the three requests share an adapter."""
    requests = [request(i, 10, 50, lora=lora) for i, lora in enumerate(["1234", "5678", "1234"])]
    for preset in ALL:
        assert ranges(run(preset, requests, num_blocks=21, max_num_seqs=4, max_loras=2)) == "0-49 {0,1,2}"
    for preset in (NO_EVICT, STATIC):
        outcome = run(preset, requests, num_blocks=21, max_num_seqs=4, max_loras=1)
        assert ranges(outcome) == "0-49 {0,2}; 50-99 {1}"


def test_9_requests_run_by_priority_and_then_by_arrival() -> None:
    priorities = [0.5, 0.5, 0.6, 0.6, 0.6, 1.0, 0.3, 0.3, 0.3, 0.6, 1.0, 0.5]
    requests = [request(i, 10, 1, priority=priority) for i, priority in enumerate(priorities)]
    outcome = run(NO_EVICT, requests, num_blocks=200, max_num_seqs=1)
    order = [scheduled.id for step in outcome.steps for scheduled in step.scheduled]
    assert order == ["5", "10", "2", "3", "4", "9", "0", "1", "11", "6", "7", "8"]


def test_11_a_paused_request_resumes_with_its_output_as_prompt() -> None:
    outcome = run(MAX_UTIL, [request(0, 30, 60), request(1, 30, 60)], num_blocks=10, options=CHUNKS_OF_20)
    # TensorRT-LLM computes a resumed prompt in one piece. Here it runs in chunks, which takes two more steps.
    assert ranges(outcome) == "0-21 {0,1}; 22-60 {0}; 61-101 {1}"
    assert prefills(outcome, "1")[2:] == [(61, 20, 0), (62, 20, 0), (63, 11, 0)]


@pytest.mark.parametrize("preset", [NO_EVICT, STATIC])
def test_14_no_evict_runs_one_after_the_other(preset: str) -> None:
    outcome = run(preset, [request(0, 10, 80), request(1, 10, 80)], num_blocks=10)
    assert ranges(outcome) == "0-79 {0}; 80-159 {1}"


@pytest.mark.parametrize("preset", [NO_EVICT, STATIC])
def test_15_no_evict_with_chunks_runs_one_after_the_other(preset: str) -> None:
    outcome = run(preset, [request(0, 30, 60), request(1, 30, 60)], num_blocks=10, options=CHUNKS_OF_20)
    assert ranges(outcome) == "0-60 {0}; 61-121 {1}"


def test_17_new_requests_of_higher_priority_pause_running_ones() -> None:
    requests = [
        request(0, 10, 10, priority=0.5),
        request(1, 10, 10, priority=0.5),
        request(2, 10, 10, priority=0.6, arrive=2),
        request(3, 10, 10, priority=0.7, arrive=2),
    ]
    outcome = run(MAX_UTIL, requests, num_blocks=10)
    assert ranges(outcome) == "0-1 {0,1}; 2-11 {2,3}; 12-19 {0,1}"
    assert [s.id for s in outcome.steps[2].scheduled] == ["3", "2"]
    assert prefills(outcome, "0") == [(0, 10, 0), (12, 12, 0)]


@pytest.mark.parametrize("preset", [NO_EVICT, MAX_UTIL])
def test_20_requests_wait_for_a_prefix_that_is_being_computed(preset: str) -> None:
    requests = [request(i, range(21), 2) for i in range(3)]
    outcome = run(preset, requests, max_num_seqs=3, prefix_caching=True)
    assert ranges(outcome) == "0-0 {0}; 1-1 {0,1,2}; 2-2 {1,2}"
    assert prefills(outcome, "1") == prefills(outcome, "2") == [(1, 1, 20)]  # each of the two requests reuses 2 blocks


def test_20_a_static_batch_does_not_wait() -> None:
    requests = [request(i, range(21), 2) for i in range(3)]
    assert ranges(run(STATIC, requests, max_num_seqs=3, prefix_caching=True)) == "0-1 {0,1,2}"


@pytest.mark.parametrize("preset", [NO_EVICT, MAX_UTIL])
def test_21_a_request_waits_for_all_chunks_of_a_prefix(preset: str) -> None:
    requests = [request(i, range(50), 40) for i in range(2)]
    outcome = run(preset, requests, prefix_caching=True, options=CHUNKS_OF_20)
    assert ranges(outcome) == "0-2 {0}; 3-41 {0,1}; 42-42 {1}"
    assert prefills(outcome, "1") == [(3, 10, 40)]


def test_23_static_batches_follow_one_another() -> None:
    outcome = run(STATIC, [request(0, 10, 80), request(1, 10, 40), request(2, 10, 80)])
    assert ranges(outcome) == "0-39 {0,1}; 40-79 {0}; 80-159 {2}"


def test_24_no_evict_waits_for_the_prefix() -> None:
    requests = [request(i, range(20), 5) for i in range(2)]
    outcome = run(NO_EVICT, requests, num_blocks=10, prefix_caching=True)
    assert ranges(outcome) == "0-0 {0}; 1-4 {0,1}; 5-5 {1}"


def test_26_different_prompts_do_not_wait() -> None:
    requests = [request(0, range(20), 5), request(1, range(100, 120), 5)]
    assert ranges(run(NO_EVICT, requests, num_blocks=10, prefix_caching=True)) == "0-4 {0,1}"


def test_28_equal_prompts_do_not_wait_without_reuse() -> None:
    requests = [request(i, range(20), 5) for i in range(2)]
    assert ranges(run(NO_EVICT, requests, num_blocks=10)) == "0-4 {0,1}"


def test_29_two_slots() -> None:
    outcome = run(NO_EVICT, [request(i, 10, 80) for i in range(4)], num_blocks=1000)
    assert ranges(outcome) == "0-79 {0,1}; 80-159 {2,3}"


def test_31_equal_progress_in_units_of_5() -> None:
    options = {"chunked_prefill": True, "chunk_unit_tokens": 5, "chunking": "equal-progress"}
    outcome = run(NO_EVICT, [request(0, 12, 5), request(1, 12, 5)], max_batched_tokens=7, options=options)
    assert [p[:2] for p in prefills(outcome, "0")] == [(0, 5), (1, 7)]
    assert [p[:2] for p in prefills(outcome, "1")] == [(2, 5), (3, 5), (4, 2)]


def test_33_decodes_and_whole_prompts_share_the_budget() -> None:
    requests = [request(i, 10, 10) for i in range(4)]
    outcome = run(NO_EVICT, requests, num_blocks=1000, max_num_seqs=4, max_batched_tokens=12)
    assert [len(step.scheduled) for step in outcome.steps[:4]] == [1, 2, 3, 3]
    assert prefills(outcome, "3") == [(10, 10, 0)]


def test_43_a_budget_of_15_takes_one_context_of_10() -> None:
    outcome = run(NO_EVICT, [request(0, 10, 2), request(1, 10, 2)], num_blocks=1000, max_batched_tokens=15)
    assert [s.id for s in outcome.steps[0].scheduled] == ["0"]


def test_44_45_only_requests_that_fit_to_completion_run() -> None:
    outcome = run(NO_EVICT, [request(i, 10, 40) for i in range(2)], num_blocks=7)
    assert [s.id for s in outcome.steps[0].scheduled] == ["0"]
    outcome = run(NO_EVICT, [request(i, 10, 40) for i in range(3)], num_blocks=12, max_num_seqs=3)
    assert [s.id for s in outcome.steps[0].scheduled] == ["0", "1"]


def test_46_a_limit_of_adapters_per_batch() -> None:
    requests = [request(i, 10, 4, lora=f"adapter-{i}") for i in range(3)]
    outcome = run(NO_EVICT, requests, max_num_seqs=3, max_loras=2)
    assert [s.id for s in outcome.steps[0].scheduled] == ["0", "1"]
    repeated = [request(i, 10, 4, lora=f"adapter-{i % 2}") for i in range(3)]
    outcome = run(NO_EVICT, repeated, max_num_seqs=3, max_loras=1)
    # Request 2 overtakes request 1: its adapter is already in the batch.
    assert [s.id for s in outcome.steps[0].scheduled] == ["0", "2"]


def test_cached_tokens_cost_nothing_of_the_budget() -> None:
    """In TensorRT-LLM, 15 of 20 tokens of each prompt are cached, so both fit a budget of 20. Here whole blocks are
    reused: 10 tokens of each prompt."""
    requests = [
        request(0, range(11), 1),
        request(1, range(100, 111), 1),
        request(2, range(20), 1, arrive=2),
        request(3, range(100, 120), 1, arrive=2),
    ]
    outcome = run(NO_EVICT, requests, max_batched_tokens=22, prefix_caching=True)
    assert prefills(outcome, "2") == prefills(outcome, "3") == [(2, 10, 10)]


def test_max_utilization_pauses_requests_in_turns_only_under_the_priority_order() -> None:
    """Under `fair`, which ranks only waiting requests, no waiting request pauses a running one. Under `lof`, a request
    pauses only running requests that rank behind it: here those with a shorter output."""
    fair = {"order": "fair", "capacity": "max-utilization", "batch": "two-stage", "preemption": "last-in"}
    requests = [request(i, 10, 10, tenant="a" if i < 7 else "b") for i in range(8)]
    outcome = play_mixed(fair, requests)
    assert {scheduled.id for scheduled in outcome.steps[0].scheduled} == {"0", "7"}
    longest = {**fair, "order": "lof"}
    requests = [request(i, 10, new) for i, new in enumerate([20, 5, 5, 5, 5, 5, 5, 40])]
    outcome = play_mixed(longest, requests)
    assert {scheduled.id for scheduled in outcome.steps[0].scheduled} == {"0", "7"}
    assert not any(step.preempted for step in outcome.steps), "a shorter request preempts none"


def test_max_utilization_ages_running_requests_too() -> None:
    """Otherwise each new request would pause a request that has just got its turn."""
    system = LocalSystem(SchedulerConfig(), build(choose(MAX_UTIL, None, {"ageing_per_s": 1.0})))
    system.attach(ToyWorker(block_size=4, num_blocks=200, max_num_seqs=2, max_batched_tokens=64))
    client, sampling, handles = system.open("s"), SamplingParams(top_p=1.0, max_tokens=10, seed=1), itertools.count(1)
    system.submit("s", 0, [9] * 8, sampling)
    while 0 not in client.endings and system.now_s < 10:
        while len(system.scheduler.queue) < 3:
            system.submit("s", next(handles), [9] * 8, sampling, priority=1.0)
        system.now_s += 0.02
        system.move(*system.moves()[0])
    assert 0 in client.endings


def play_mixed(preset: dict[str, str], requests: list[dict[str, Any]]) -> ScenarioOutcome:
    return run(preset, requests, max_batched_tokens=100, max_model_len=200)
