"""Offline requests get what online requests leave, and take nothing from them."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.v1.common_pb2 import SamplingParams
from paceline.v1.inference_pb2 import BeamOptions, SessionResponse, Submission
from scheduler_svc.core.rejection import CODE_DEADLINE_EXCEEDED, CODE_INVALID_ARGUMENT, CODE_RESOURCE_EXHAUSTED
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.types import SchedulerConfig
from scheduler_svc.policies.presets import PRESETS
from services.gateway.engine.session_core import SessionCore
from simulator.scenario import ScenarioOutcome, play
from simulator.scenario_file import Scenario
from simulator.system import Client, LocalSystem, WorkerEnd
from simulator.toy_worker import ToyWorker, expected_output

REQUEST: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "arrive": st.integers(0, 12),
        "prompt_len": st.integers(1, 60),
        "max_new_tokens": st.integers(1, 20),
        "priority": st.sampled_from([0.0, 1.0]),
        "tenant": st.sampled_from(["a", "b"]),
    }
)
AMPLE_BLOCKS = 10_000


@st.composite
def scenarios(draw: st.DrawFn, num_blocks: int | None = None) -> dict[str, Any]:
    block_size = draw(st.sampled_from([1, 4, 16]))
    online = draw(st.lists(REQUEST, min_size=1, max_size=6))
    offline = draw(st.lists(REQUEST, min_size=1, max_size=8))
    requests = [{"id": f"on-{i}", **fields} for i, fields in enumerate(online)]
    requests += [{"id": f"off-{i}", **fields, "offline": True} for i, fields in enumerate(offline)]
    if draw(st.booleans()):
        # Equal beginnings within a class only: an online request that finds more in the cache may pass another one.
        for request in requests:
            family = "offline" if request.get("offline") else "online"
            request["prefix"] = {"family": family, "len": draw(st.integers(0, request["prompt_len"]))}
    longest = max(request["prompt_len"] + request["max_new_tokens"] for request in requests)
    return {
        "block_size": block_size,
        "num_blocks": num_blocks or math.ceil(longest / block_size) + draw(st.integers(0, 30)) + 1,
        "max_num_seqs": draw(st.integers(1, 6)),
        "max_batched_tokens": draw(st.sampled_from([4, 16, 64, 256])),
        "max_model_len": 128,
        "requests": requests,
        "options": draw(st.sampled_from([{}, {"chunked_prefill": False}])),
    }


def play_both(scenario: dict[str, Any]) -> tuple[ScenarioOutcome, ScenarioOutcome]:
    """Plays the scenario with its offline requests and without them. All requests must end."""
    online = [request for request in scenario["requests"] if not request.get("offline")]
    outcomes = []
    for requests in (scenario["requests"], online):
        # the same slots in both runs: a scenario may not have more slots than requests
        slots = min(scenario["max_num_seqs"], len(online))
        outcome = play(Scenario.model_validate(scenario | {"requests": requests, "max_num_seqs": slots}))
        assert not outcome.stuck
        assert outcome.generated_tokens == {request["id"]: request["max_new_tokens"] for request in requests}
        outcomes.append(outcome)
    return outcomes[0], outcomes[1]


def online_rows(outcome: ScenarioOutcome) -> list[dict[str, tuple[int, str]]]:
    """Of each step: tokens and phase of each online request, without the empty steps at the end."""
    rows = [
        {one.id: (one.tokens, one.phase) for one in step.scheduled if one.id.startswith("on-")}
        for step in outcome.steps
    ]
    while rows and not rows[-1]:
        rows.pop()
    return rows


def first_token_steps(outcome: ScenarioOutcome) -> dict[str, int]:
    """The step that computes the last token of the prompt."""
    steps: dict[str, int] = {}
    decoded = defaultdict[str, int](int)
    for step in outcome.steps:
        for one in step.scheduled:
            if one.phase == "prefill" and not decoded[one.id]:
                steps[one.id] = step.step
            decoded[one.id] += one.phase == "decode"
    return steps


@pytest.mark.parametrize("preset", PRESETS)
@settings(max_examples=10, deadline=None)
@given(scenario=scenarios(num_blocks=AMPLE_BLOCKS))
def test_no_first_token_of_an_online_request_is_later_than_without_offline_requests(
    preset: str, scenario: dict[str, Any]
) -> None:
    both, alone = (first_token_steps(outcome) for outcome in play_both(scenario | {"preset": preset}))
    assert all(both[name] <= step for name, step in alone.items())


@pytest.mark.parametrize("preset", PRESETS)
@settings(max_examples=20, deadline=None)
@given(scenario=scenarios())
def test_steps_run_the_online_requests_as_if_there_were_no_offline_ones(preset: str, scenario: dict[str, Any]) -> None:
    """Also with few blocks and slots. Without prefix caching, because offline requests use the cache, too."""
    both, alone = play_both(scenario | {"preset": preset, "prefix_caching": False})
    assert online_rows(both) == online_rows(alone)


PARAMS = SamplingParams(top_p=1.0, max_tokens=10, seed=1, ignore_eos=True)


def system_with(num_workers: int = 1, **config: Any) -> tuple[LocalSystem, Client]:
    """Workers with two slots each."""
    system = LocalSystem(SchedulerConfig(**config))
    for _ in range(num_workers):
        attach(system)
    return system, system.open("s")


def attach(system: LocalSystem, max_loras: int = 0) -> WorkerEnd:
    worker = ToyWorker(block_size=4, num_blocks=64, max_num_seqs=2, max_batched_tokens=64)
    worker.registration.max_loras = max_loras
    return system.attach(worker)


def running(system: LocalSystem) -> list[Request]:
    return [one for worker in system.scheduler.workers.values() for one in worker.batch.running.values()]


def run_until(system: LocalSystem, num_running: int) -> None:
    while len(running(system)) < num_running:
        system.move(*system.moves()[0])


def prompt(handle: int) -> list[int]:
    return [100 + handle] * 6


def with_offline_running(**config: Any) -> tuple[LocalSystem, Client]:
    """Two offline requests have both slots, and a third one waits."""
    system, client = system_with(**config)
    for handle in (1, 2, 3):
        system.submit("s", handle, prompt(handle), PARAMS, offline=True)
        run_until(system, min(handle, 2))
    return system, client


def assert_all_got_their_tokens(system: LocalSystem, client: Client, handles: range) -> None:
    system.run()
    assert client.tokens == {handle: expected_output(prompt(handle), PARAMS) for handle in handles}
    system.assert_at_rest()


def test_an_online_request_takes_the_slot_of_an_offline_one_in_the_next_step() -> None:
    system, client = with_offline_running(window=1)
    system.submit("s", 4, prompt(4), PARAMS)
    steps = system.scheduler.counters.steps
    while not any(one.handle == 4 for one in running(system)):
        system.move(*system.moves()[0])
    assert system.scheduler.counters.steps == steps + 1
    assert [request.handle for request in system.scheduler.queue.offline] == [2, 3], "the last admitted one yields"
    assert_all_got_their_tokens(system, client, range(1, 5))


@pytest.mark.parametrize(("limit", "tokens"), [(256, 40), (16, 16), (0, 0)])
def test_offline_tokens_beside_online_requests_have_a_limit(limit: int, tokens: int) -> None:
    scenario = {
        "block_size": 4, "num_blocks": 100, "max_num_seqs": 4, "max_batched_tokens": 64, "max_model_len": 200,
        "requests": [
            {"id": "on", "prompt_len": 4, "max_new_tokens": 10},
            {"id": "off", "prompt_len": 40, "max_new_tokens": 2, "arrive": 2, "offline": True},
        ],
    }  # fmt: skip
    outcome = play(Scenario.model_validate(scenario), max_offline_tokens=limit)
    per_step = [{one.id: one.tokens for one in step.scheduled} for step in outcome.steps]
    beside = [rows.get("off", 0) for rows in per_step if "on" in rows]
    assert max(beside) == tokens
    alone = [rows["off"] for rows in per_step if "on" not in rows and "off" in rows]
    assert alone == ([] if tokens else [40, 1]), "alone it has the whole budget"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_queued_offline_requests": 1}, "offline queue: full with 1 requests"),
        ({"max_queued_offline_tokens": 10}, "offline queue: 6 tokens wait, the limit is 10"),
        ({"tenant_max_queued_tokens": 10}, "tenant: 6 tokens of tenant '' wait, its limit is 10"),
    ],
)
def test_offline_requests_fill_only_their_own_queue(config: dict[str, Any], message: str) -> None:
    system, client = with_offline_running(max_queued_requests=2, **config)
    system.submit("s", 4, prompt(4), PARAMS, offline=True)
    ending = client.endings[4]
    assert (ending.code, ending.message) == (CODE_RESOURCE_EXHAUSTED, message)
    assert ending.retry_after_s > 0
    assert client.status is not None
    assert not client.status.full
    assert client.room is not None
    assert (client.room.places, client.room.num_submissions) == (2, 0), (
        "offline requests take no queue position of online requests"
    )
    system.submit("s", 5, prompt(5), PARAMS)
    system.run()
    assert len(client.tokens[5]) == 10


def test_a_full_online_queue_takes_offline_requests() -> None:
    system = LocalSystem(SchedulerConfig(max_queued_requests=1))
    client = system.open("s")
    for handle, offline in ((1, False), (2, False), (3, True)):
        system.submit("s", handle, prompt(handle), PARAMS, offline=offline)
    assert client.endings.keys() == {2}
    load = system.scheduler.load(0.0)
    assert (load.num_waiting, load.num_waiting_tokens) == (1, 6), "the load is that of online requests"


def test_only_a_deadline_ends_an_offline_request_that_waits_or_runs_for_long() -> None:
    system, client = system_with(waiting_timeout_s=1.0, running_timeout_s=1.0)
    for handle in (1, 2, 3):
        system.submit("s", handle, prompt(handle), PARAMS, offline=True)
    system.submit("s", 4, prompt(4), PARAMS, offline=True, deadline_s=50.0)
    run_until(system, 2)
    for now_s, ended in ((20.0, set()), (60.0, {4})):
        system.now_s = now_s
        system.scheduler.tick(now_s)
        system.poll()
        assert client.endings.keys() == ended
    assert client.endings[4].code == CODE_DEADLINE_EXCEEDED


def test_offline_requests_wait_for_a_worker_as_long_as_online_ones() -> None:
    system = LocalSystem(SchedulerConfig(no_worker_timeout_s=5.0))
    client = system.open("s")
    system.submit("s", 1, prompt(1), PARAMS, offline=True)
    for now_s in (0.0, 4.0, 6.0):
        assert not client.endings
        system.now_s = now_s
        system.scheduler.tick(now_s)
        system.poll()
    assert "no worker takes requests" in client.endings[1].message


def test_offline_requests_stay_offline_when_their_worker_is_lost() -> None:
    system, client = with_offline_running()
    system.kill(system.workers[0])
    assert [request.handle for request in system.scheduler.queue.offline] == [1, 2, 3]
    assert not len(system.scheduler.queue.online)
    attach(system)
    assert_all_got_their_tokens(system, client, range(1, 4))


def test_offline_requests_stay_offline_when_the_cache_is_lost() -> None:
    system, client = with_offline_running()
    system.restart_cache()
    while system.scheduler.counters.restored < 2:
        system.move(*system.moves()[0])
    [worker] = system.scheduler.workers.values()
    assert len(worker.batch.offline) == 2
    system.submit("s", 4, prompt(4), PARAMS)
    assert_all_got_their_tokens(system, client, range(1, 5))
    assert system.scheduler.counters.preempted > 0, "they still yield"


def test_offline_requests_stay_offline_when_the_scheduler_is_replaced() -> None:
    """The gateway submits them again."""
    core = SessionCore("g", response_window=4, max_live=8, wait_s=5.0)
    core.submit("r", bytes(8), SamplingParams(max_tokens=4), 0.0, metadata=Submission(offline=True))
    opened = SessionResponse()
    opened.opened.epoch = 1
    for attempt in (1, 2):
        core.connect()
        core.take_request()
        core.receive(opened)
        message = core.take_request()
        assert message is not None
        [submission] = message.submissions
        assert (submission.offline, submission.accepted_before) == (True, attempt > 1)
        core.disconnect(1.0)


def test_a_worker_full_of_offline_requests_has_room_for_online_ones() -> None:
    """Placement counts their slots and blocks as free."""
    system, client = system_with(num_workers=2)
    for handle in range(1, 7):
        system.submit("s", handle, prompt(handle), PARAMS, offline=True)
    run_until(system, 4)
    for handle in range(7, 11):
        system.submit("s", handle, prompt(handle), PARAMS)
    while not all(client.tokens.get(handle) for handle in range(7, 11)):
        system.move(*system.moves()[0])
        assert not any(handle in client.endings for handle in (5, 6)), "these wait for the online ones"
    assert_all_got_their_tokens(system, client, range(1, 11))


def test_an_online_request_replaces_the_adapter_of_an_offline_request() -> None:
    system = LocalSystem()
    client = system.open("s")
    attach(system, max_loras=1)
    system.submit("s", 1, prompt(1), PARAMS, offline=True, lora="a")
    run_until(system, 1)
    system.submit("s", 2, prompt(2), PARAMS, lora="b")
    while not client.tokens.get(2):
        system.move(*system.moves()[0])
        assert 1 not in client.endings
    assert_all_got_their_tokens(system, client, range(1, 3))


def test_a_tenants_limit_of_running_tokens_holds_for_each_class() -> None:
    system, client = system_with(tenant_max_running_tokens=20)
    for handle, offline in ((1, True), (2, True), (3, False)):
        system.submit("s", handle, prompt(handle), PARAMS, offline=offline, tenant="t")
    run_until(system, 2)
    assert {one.handle for one in running(system)} == {1, 3}, "16 tokens of each class"
    assert_all_got_their_tokens(system, client, range(1, 4))


def test_explain_names_offline_requests_and_why_they_waited() -> None:
    system, _ = with_offline_running()
    system.submit("s", 4, prompt(4), PARAMS)
    system.run()
    spans = system.scheduler.timeline.explain("s-2", 0.0)
    assert spans is not None
    told = [(span.reason, span.detail) for span in spans]
    assert ("waiting", "6 tokens, offline") in told
    assert ("preempted", "preempted for online requests") in told


def test_a_beam_search_cannot_be_offline() -> None:
    system, client = system_with()
    system.submit("s", 1, prompt(1), SamplingParams(top_p=1.0, max_tokens=4), offline=True, beam=BeamOptions(width=2))
    assert (client.endings[1].code, client.endings[1].field) == (CODE_INVALID_ARGUMENT, "offline")
