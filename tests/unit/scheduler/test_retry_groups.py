"""How suspects are retried apart from other requests, and what that means for the other requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.v1.common_pb2 import FinishReason, SamplingParams
from paceline.v1.worker_pb2 import StepFailure
from scheduler_svc.core.cache.link import ProtocolError
from scheduler_svc.core.faults.retry_groups import RetryBatch, retry_candidates
from scheduler_svc.core.policy.step import Step
from scheduler_svc.core.requests.phases import Phase
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.requests.state import Held
from scheduler_svc.core.types import SchedulerConfig
from scheduler_svc.core.workers.state import WorkerState
from simulator.system import Client, LocalSystem, WorkerEnd
from simulator.toy_worker import ToyWorker, expected_output


def toy(**changes: int) -> ToyWorker:
    return ToyWorker(**{"block_size": 4, "num_blocks": 64, "max_num_seqs": 8, "max_batched_tokens": 64} | changes)


def params(max_tokens: int = 12) -> SamplingParams:
    return SamplingParams(top_p=1.0, max_tokens=max_tokens, seed=1, ignore_eos=True)


@pytest.fixture
def system() -> LocalSystem:
    return LocalSystem(SchedulerConfig())


@pytest.fixture
def client(system: LocalSystem) -> Client:
    return system.open("s")


def until_running(system: LocalSystem, count: int) -> None:
    """Plays until `count` requests have a token and a step is in flight."""
    client = system.clients["s"]
    while len(client.tokens) < count or not any(end.plans for end in system.workers):
        system.move(*system.moves()[0])


def fail(system: LocalSystem, end: WorkerEnd, message: str = "E: no") -> None:
    """The next step of this worker fails."""
    step = end.plans[0].step
    system.workers.remove(end)
    system.scheduler.worker_failed(end.id, StepFailure(first_step=step, last_step=step, message=message))
    system.poll()


def suspects(system: LocalSystem) -> list[Request]:
    scheduler = system.scheduler
    running = [request for worker in scheduler.workers.values() for request in worker.batch.running.values()]
    return [request for request in [*scheduler.queue, *running] if request.is_suspect]


def test_only_the_rows_of_the_failed_step_are_suspects(system: LocalSystem, client: Client) -> None:
    end = system.attach(toy(max_num_seqs=2))
    for handle in (1, 2, 3):
        system.submit("s", handle, [9, 10 + handle], params())
    until_running(system, 2)
    fail(system, end)
    assert sorted(request.handle for request in suspects(system)) == [1, 2]
    assert (system.scheduler.counters.failures, system.scheduler.counters.retried) == (1, 2)


def test_a_retry_is_alone_in_flight_and_ends_two_tokens_later(system: LocalSystem, client: Client) -> None:
    end = system.attach(toy())
    for handle in (1, 2):
        system.submit("s", handle, [9, 10 + handle], params())
    until_running(system, 2)
    known = {handle: len(tokens) for handle, tokens in client.tokens.items()}
    fail(system, end)
    end = system.attach(toy())
    while suspects(system):
        alone = [request for request in suspects(system) if request.held.slot >= 0]
        if alone:
            assert len(alone) == 1
            assert len(end.plans) + len(end.results) <= 1
            assert len(client.tokens[alone[0].handle]) < known[alone[0].handle] + 2
        system.move(*system.moves()[0])
    while len(end.plans) != 2:  # the window is used again
        system.move(*system.moves()[0])
    system.run()
    for handle in (1, 2):
        assert client.tokens[handle] == expected_output([9, 10 + handle], params())
    system.assert_at_rest()


def test_no_request_is_admitted_before_the_suspects(system: LocalSystem, client: Client) -> None:
    end = system.attach(toy())
    system.submit("s", 1, [9, 11], params())
    until_running(system, 1)
    fail(system, end)
    system.submit("s", 2, [9, 12], params(), priority=9)
    end = system.attach(toy())
    while suspects(system):
        assert 2 not in client.tokens
        system.move(*system.moves()[0])
    system.run()
    assert client.tokens == {handle: expected_output([9, 10 + handle], params()) for handle in (1, 2)}


def test_a_suspect_may_be_cancelled_while_it_waits_or_is_retried(system: LocalSystem, client: Client) -> None:
    end = system.attach(toy())
    for handle in (1, 2, 3):
        system.submit("s", handle, [9, 10 + handle], params())
    until_running(system, 3)
    fail(system, end)
    system.cancel("s", 2)
    end = system.attach(toy())
    while not end.plans:
        system.move(*system.moves()[0])
    [tried] = [request for request in suspects(system) if request.held.slot >= 0]
    system.cancel("s", tried.handle)
    system.run()
    [left] = {1, 3} - {tried.handle}
    assert client.tokens[left] == expected_output([9, 10 + left], params())
    assert client.endings[2].reason == client.endings[tried.handle].reason == FinishReason.FINISH_REASON_ABORT
    assert not suspects(system)
    system.assert_at_rest()


def test_a_worker_that_drains_away_blames_no_request(system: LocalSystem, client: Client) -> None:
    end = system.attach(toy())
    system.submit("s", 1, [9, 11], params())
    until_running(system, 1)
    system.scheduler.worker_drain(end.id)
    system.kill(end)
    assert not suspects(system)
    assert system.scheduler.counters.failures == 0


def test_a_lone_request_fails_with_the_second_failure_and_the_reason(system: LocalSystem, client: Client) -> None:
    system.submit("s", 1, [9, 11], params())
    for _ in range(2):
        assert 1 not in client.endings
        end = system.attach(toy())
        while not end.plans:
            system.move(*system.moves()[0])
        fail(system, end, "ValueError: out of cheese")
    message = "request: was the only request in 2 failed steps in a row; the last time, step 1 of worker 2 failed: "
    assert client.endings[1].message == f"{message}ValueError: out of cheese"
    assert system.scheduler.counters.poisoned == 1
    system.attach(toy())
    system.run()
    system.assert_at_rest()


def test_two_tokens_between_failures_clear_a_suspect_but_one_does_not(system: LocalSystem, client: Client) -> None:
    system.submit("s", 1, [9, 11], params(40))
    for _ in range(4):  # each time it gets past the point of the failure before
        end = system.attach(toy())
        known = len(client.tokens.get(1, ()))
        while len(client.tokens.get(1, ())) < known + 3 or not end.plans:
            system.move(*system.moves()[0])
        fail(system, end)
    end = system.attach(toy())
    known = len(client.tokens[1])
    while len(client.tokens[1]) < known + 1 or not end.plans:
        system.move(*system.moves()[0])
    fail(system, end)
    assert client.endings[1].reason == FinishReason.FINISH_REASON_ERROR
    right = expected_output([9, 11], params(40))
    assert client.tokens[1] == right[: len(client.tokens[1])]


def test_a_failure_of_a_step_that_is_not_in_flight_is_a_protocol_error(system: LocalSystem, client: Client) -> None:
    end = system.attach(toy())
    with pytest.raises(ProtocolError, match="steps 1 to 1, which are not in flight"):
        system.scheduler.worker_failed(end.id, StepFailure(first_step=1, last_step=1))
    system.submit("s", 1, [9], params())
    while not end.plans:
        system.move(*system.moves()[0])
    with pytest.raises(ProtocolError, match="not in flight"):
        system.scheduler.worker_failed(end.id, StepFailure(first_step=2, last_step=1))
    with pytest.raises(ProtocolError, match="not in flight"):
        system.scheduler.worker_failed(end.id, StepFailure(first_step=1, last_step=9))


def test_a_request_in_any_step_of_a_failure_is_suspect(system: LocalSystem, client: Client) -> None:
    end = system.attach(toy())
    system.submit("s", 1, [9, 11], params())
    until_running(system, 1)
    while len(end.plans) < 2:
        system.poll()
        system.move(*next(move for move in system.moves() if move[0] != "step"))
    first, last = (plan.step for plan in list(end.plans)[:2])
    system.workers.remove(end)
    system.scheduler.worker_failed(end.id, StepFailure(first_step=first, last_step=last, message="E: no"))
    assert [request.handle for request in suspects(system)] == [1]


def test_a_cleared_suspect_leaves_no_state(system: LocalSystem, client: Client) -> None:
    system.submit("s", 1, [9, 11], params())
    end = system.attach(toy())
    until_running(system, 1)
    fail(system, end)
    assert system.scheduler._retry_groups.active
    system.attach(toy())
    system.run()
    assert client.endings[1].reason == FinishReason.FINISH_REASON_LENGTH
    assert not system.scheduler._retry_groups.active


def test_a_swapped_out_suspect_is_retried_at_the_worker_with_its_blocks() -> None:
    request = cast(Request, SimpleNamespace(phase=Phase.WAITING, matches=None, held=Held(swapped_on=1), grammar=""))
    here, there = (SimpleNamespace(id=id_, has_grammar=lambda _: True) for id_ in (1, 2))
    assert list(retry_candidates([request], cast(WorkerState, here))) == [request]
    assert list(retry_candidates([request], cast(WorkerState, there))) == []


def test_a_retry_step_runs_its_members_and_no_other_sequence() -> None:
    ran: list[int] = []
    running = [SimpleNamespace(request=SimpleNamespace(arrival_index=i), remaining_tokens=1) for i in (1, 2, 3)]
    step: Any = SimpleNamespace(
        running=running,
        budget_tokens=8,
        run=lambda sequence, _: ran.append(sequence.request.arrival_index),
        waiting=lambda: iter(()),
    )
    RetryBatch([cast(Request, SimpleNamespace(arrival_index=2))]).schedule(step)
    assert ran == [2]


def test_a_retry_step_in_which_a_policy_fails_is_scheduled_again_without_the_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors = list[Exception]()
    system, schedule = LocalSystem(SchedulerConfig(), on_policy_error=errors.append), RetryBatch.schedule
    failures = iter([mistake := RuntimeError("a policy's mistake")])

    def fails_once(self: RetryBatch, step: Step) -> None:
        for failure in failures:
            raise failure
        schedule(self, step)

    monkeypatch.setattr(RetryBatch, "schedule", fails_once)
    client, end = system.open("s"), system.attach(toy())
    for handle in (1, 2):
        system.submit("s", handle, [9, 10 + handle], params())
    until_running(system, 2)
    fail(system, end)
    system.attach(toy())
    system.run()
    assert client.tokens == {handle: expected_output([9, 10 + handle], params()) for handle in (1, 2)}
    assert errors == [mistake]
