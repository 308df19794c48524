"""A worker that was lost and comes back was not killed by its requests, so no request is blamed for the loss."""

from __future__ import annotations

import pytest

from paceline.v1.common_pb2 import FinishReason, SamplingParams
from paceline.v1.worker_pb2 import Heartbeat, StepFailure
from scheduler_svc.core.faults.suspects import RETURN_S, Absence, Loss, Suspects
from scheduler_svc.core.types import SchedulerConfig
from simulator.system import Client, LocalSystem, WorkerEnd
from simulator.toy_worker import ToyWorker, expected_output

PROMPT = [9 + i for i in range(190)]


def toy(incarnation: str = "") -> ToyWorker:
    worker = ToyWorker(block_size=4, num_blocks=80, max_num_seqs=8, max_batched_tokens=64)
    worker.registration.incarnation = incarnation
    return worker


def params() -> SamplingParams:
    return SamplingParams(top_p=1.0, max_tokens=12, seed=1, ignore_eos=True)


@pytest.fixture
def system() -> LocalSystem:
    return LocalSystem(SchedulerConfig())


@pytest.fixture
def client(system: LocalSystem) -> Client:
    return system.open("s")


def until_in_flight(system: LocalSystem, end: WorkerEnd) -> None:
    while not end.plans:
        system.move(*system.moves()[0])


def lose(system: LocalSystem, end: WorkerEnd, loss: Loss) -> None:
    until_in_flight(system, end)
    system.workers.remove(end)
    system.scheduler.worker_lost(end.id, loss)
    system.poll()


def pass_time(system: LocalSystem, seconds: float) -> None:
    end_s = system.now_s + seconds
    while system.now_s < end_s:
        tick(system, min(0.25, end_s - system.now_s))


def tick(system: LocalSystem, after_s: float) -> None:
    system.now_s += after_s
    system.scheduler.tick(system.now_s)
    system.poll()


def back(system: LocalSystem, end: WorkerEnd) -> WorkerEnd:
    """The same process registers again, with the KV in its blocks."""
    assert isinstance(end.worker, ToyWorker)
    end.worker.registration.kept.extend(end.worker.kept())
    return system.attach(end.worker, keeps_blocks=True)


def finishes(system: LocalSystem) -> None:
    client = system.clients["s"]
    system.run()
    assert client.tokens[1] == expected_output(PROMPT, params())
    assert client.endings[1].reason == FinishReason.FINISH_REASON_LENGTH
    system.assert_at_rest()


@pytest.mark.parametrize(("loss", "times"), [(Loss.LINK, 10), (Loss.SILENCE, 3)])
def test_a_worker_that_is_back_each_time_fails_no_request(
    system: LocalSystem, client: Client, loss: Loss, times: int
) -> None:
    end = system.attach(toy("a"))
    system.submit("s", 1, PROMPT, params())
    for _ in range(times):
        lose(system, end, loss)
        end = back(system, end)
    assert not client.endings
    finishes(system)


def test_two_links_cut_before_either_worker_is_back_fail_no_request(system: LocalSystem, client: Client) -> None:
    ends = [system.attach(toy(name)) for name in "ab"]
    system.submit("s", 1, PROMPT, params())
    while not (running := [end for end in ends if end.plans]):
        system.move(*system.moves()[0])
    first = running[0]
    second = ends[1 - ends.index(first)]
    lose(system, first, Loss.LINK)
    lose(system, second, Loss.LINK)  # the second worker had retried the request
    third = system.attach(toy("c"))
    pass_time(system, RETURN_S - 1)
    system.run()
    assert not third.plans, "the request is held"
    assert not client.endings
    back(system, second)
    finishes(system)


def test_other_requests_run_while_a_suspect_waits(system: LocalSystem, client: Client) -> None:
    system.submit("s", 1, PROMPT, params())
    for name in "ab":
        lose(system, system.attach(toy(name)), Loss.LINK)
    system.attach(toy("c"))
    system.submit("s", 2, [9, 10], params())
    system.run()
    assert client.tokens == {2: expected_output([9, 10], params())}
    assert [request.handle for request in system.scheduler.queue] == [1]


def test_a_scheduler_that_stood_still_itself_does_not_count_that_time(system: LocalSystem, client: Client) -> None:
    system.submit("s", 1, PROMPT, params())
    for name in "ab":
        lose(system, system.attach(toy(name)), Loss.LINK)
    tick(system, 2 * RETURN_S)  # only after this tick, the scheduler reads messages of workers that came back
    assert not client.endings
    system.attach(toy("c"))
    pass_time(system, RETURN_S)
    assert client.endings[1].reason == FinishReason.FINISH_REASON_ERROR


def test_a_request_is_poisoned_when_its_workers_do_not_come_back(system: LocalSystem, client: Client) -> None:
    system.submit("s", 1, PROMPT, params())
    for name in "ab":
        lose(system, system.attach(toy(name)), Loss.LINK)
    pass_time(system, RETURN_S - 0.1)
    assert not client.endings
    system.attach(toy("c"))  # another process
    pass_time(system, 0.2)
    message = "request: was the only request in 2 failed steps in a row; the last time, worker 2 was lost in step 1"
    assert client.endings[1].message == message
    assert system.scheduler.counters.poisoned == 1
    system.run()
    system.assert_at_rest()


def test_a_held_request_may_be_cancelled(system: LocalSystem, client: Client) -> None:
    system.submit("s", 1, PROMPT, params())
    for name in "ab":
        lose(system, system.attach(toy(name)), Loss.LINK)
    system.cancel("s", 1)
    pass_time(system, 2 * RETURN_S)
    assert client.endings[1].reason == FinishReason.FINISH_REASON_ABORT
    assert system.scheduler.counters.poisoned == 0
    system.attach(toy("c"))
    system.run()
    system.assert_at_rest()


@pytest.mark.parametrize("times", [5, Loss.LINK + 2])
def test_a_worker_may_be_back_before_its_old_link_is_seen_to_end(
    system: LocalSystem, client: Client, times: int
) -> None:
    end = system.attach(toy("a"))
    system.submit("s", 1, PROMPT, params())
    for _ in range(times):
        until_in_flight(system, end)
        another = system.attach(toy("a"))
        lose(system, end, Loss.LINK)
        end = another
    if times <= Loss.LINK:
        finishes(system)
    else:
        assert "2 failed steps in a row" in client.endings[1].message


def test_a_failure_that_the_worker_reports_always_counts(system: LocalSystem, client: Client) -> None:
    """The same process registers again, but it has reported a failed step: the blame is not withdrawn."""
    system.submit("s", 1, PROMPT, params())
    for _ in range(2):
        assert not client.endings
        end = system.attach(toy("a"))
        until_in_flight(system, end)
        system.workers.remove(end)
        step = end.plans[0].step
        system.scheduler.worker_failed(end.id, StepFailure(first_step=step, last_step=step, message="E: no"))
        system.poll()
    assert "2 failed steps in a row" in client.endings[1].message


@pytest.mark.parametrize("arrived", [True, False])
def test_the_blame_for_a_hanging_step_stays_and_for_a_plan_that_never_arrived_is_withdrawn(
    system: LocalSystem, client: Client, arrived: bool
) -> None:
    """The scheduler noticed both failures. The blame stays only if the plan had arrived."""
    system.submit("s", 1, PROMPT, params())
    for _ in range(2):
        assert not client.endings
        worker = toy("a")
        worker.registration.heartbeats = True
        end = system.attach(worker)
        until_in_flight(system, end)
        system.workers.remove(end)
        while end.id in system.scheduler.workers:
            received = end.plans[0].step if arrived else 0
            system.scheduler.worker_heartbeat(end.id, Heartbeat(received=received, allowed_s=1.0))
        system.poll()
    system.attach(toy("a"))
    if arrived:
        assert "2 failed steps in a row" in client.endings[1].message
    else:
        finishes(system)


@pytest.mark.parametrize("loss", list(Loss))
def test_a_request_that_keeps_losing_its_worker_is_poisoned_in_the_end(
    system: LocalSystem, client: Client, loss: Loss
) -> None:
    system.submit("s", 1, PROMPT, params())
    num_losses = 0
    while not client.endings:
        lose(system, system.attach(toy("a")), loss)
        num_losses += 1
    assert num_losses == loss + 2


def test_only_the_blame_of_that_worker_is_withdrawn() -> None:
    suspects = Suspects(3)
    suspects.blame([7], 1)
    suspects.blame([7], 1, Absence("a", Loss.LINK, 0.0))
    suspects.blame([7], 1, Absence("b", Loss.LINK, 1.0))
    assert suspects.held == {7}
    assert suspects.waiting() == []
    assert suspects.find_poisoned(RETURN_S) == []
    suspects.came_back("another")
    assert suspects.held == {7}
    suspects.came_back("a")
    assert suspects.waiting() == [[7]]
    assert suspects.blame([7], 1) is None
    assert suspects.held == {7}
    assert suspects.find_poisoned(RETURN_S) == []
    assert suspects.find_poisoned(RETURN_S + 1.0) == [7]
    assert 7 not in suspects


def test_a_worker_may_come_back_late_while_no_request_awaits_a_verdict() -> None:
    """While no request awaits a verdict, a worker may come back at any time and its blame is withdrawn."""
    suspects = Suspects(2)
    suspects.blame([7], 1, Absence("a", Loss.LINK, 0.0))
    assert suspects.find_poisoned(10 * RETURN_S) == []
    suspects.came_back("a")
    assert suspects.blame([7], 1) is None
    assert suspects.held == set()


def test_a_cleared_suspect_may_lose_its_worker_as_often_as_a_new_one() -> None:
    suspects = Suspects(2)
    for _ in range(4 * Loss.SILENCE):
        for _ in range(Loss.SILENCE):
            suspects.blame([7], 1, Absence("a", Loss.SILENCE, 0.0))
            suspects.came_back("a")
        suspects.clear(7)
    assert suspects.blame([7], 1) is None
