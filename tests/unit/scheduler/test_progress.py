"""A worker that answers but makes no progress is lost. A worker in a long step is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.v1.common_pb2 import SamplingParams
from paceline.v1.worker_pb2 import Heartbeat
from scheduler_svc.core.cache.link import ProtocolError
from scheduler_svc.core.types import SchedulerConfig
from scheduler_svc.core.workers.progress import HEARTBEAT_S, TIMES_ALLOWED, WorkerProgress
from simulator.system import Client, LocalSystem, WorkerEnd
from simulator.toy_worker import ToyWorker, expected_output

STALL_S = SchedulerConfig().stall_s
PARAMS = SamplingParams(max_tokens=10, seed=1, top_p=1.0, ignore_eos=True)


def toy(*, heartbeats: bool = True) -> ToyWorker:
    worker = ToyWorker(block_size=4, num_blocks=64, max_num_seqs=8, max_batched_tokens=64)
    worker.registration.heartbeats = heartbeats
    return worker


@pytest.fixture
def system() -> LocalSystem:
    return LocalSystem()


@pytest.fixture
def client(system: LocalSystem) -> Client:
    return system.open("s")


def with_a_plan(system: LocalSystem, worker: ToyWorker) -> WorkerEnd:
    """A worker that has got its first plan, and has not run it."""
    end = system.attach(worker)
    system.submit("s", 1, [9], PARAMS)
    while not end.plans:
        system.move(*system.moves()[0])
    return end


def beat(system: LocalSystem, end: WorkerEnd, seconds: float, heartbeat: Heartbeat) -> list[str]:
    """The worker repeats this heartbeat for so many seconds. Returns why it was lost, if it was."""
    for _ in range(int(seconds / HEARTBEAT_S)):
        system.scheduler.worker_heartbeat(end.id, heartbeat)
        outbox = system.scheduler.poll(system.now_s)
        system.to_cache.extend(outbox.to_cache)
        if outbox.lost_workers:
            assert [worker for worker, _ in outbox.lost_workers] == [end.id]
            assert end.id not in system.scheduler.workers
            return [reason for _, reason in outbox.lost_workers]
    return []


@pytest.mark.parametrize(
    ("heartbeat", "why"),
    [
        (Heartbeat(received=1, allowed_s=2.0), "step 1 is not done after 5.8 s; it was allowed 2.0 s"),
        (Heartbeat(received=0), "the plan of step 1 has not arrived after 1.8 s"),
        (Heartbeat(received=1), "step 1 has no result after 1.8 s, and the worker does not run it"),
    ],
)
def test_another_worker_continues_the_requests_of_a_stuck_worker(
    system: LocalSystem, client: Client, heartbeat: Heartbeat, why: str
) -> None:
    """Another worker continues the requests of a worker that makes no progress."""
    end = with_a_plan(system, toy())
    assert beat(system, end, 10.0, heartbeat) == [why]
    system.workers.clear()
    system.attach(toy())
    system.run()
    assert client.tokens[1] == expected_output([9], PARAMS)


def test_a_long_prefill_is_no_hang(system: LocalSystem, client: Client) -> None:
    end = with_a_plan(system, toy())
    assert not beat(system, end, 300.0, Heartbeat(received=1, allowed_s=200.0))
    system.run()
    assert client.tokens[1] == expected_output([9], PARAMS)


def test_an_idle_worker_is_not_lost(system: LocalSystem, client: Client) -> None:
    worker = toy()
    end = system.attach(worker)
    assert not beat(system, end, 60.0, Heartbeat())
    system.submit("s", 1, [9], PARAMS)
    system.run()
    assert not beat(system, end, 60.0, Heartbeat(step=worker.step, received=worker.step))


def test_a_worker_that_reports_only_its_step_is_not_lost_for_it(system: LocalSystem, client: Client) -> None:
    end = with_a_plan(system, toy(heartbeats=False))
    assert not beat(system, end, 60.0, Heartbeat())


def test_a_heartbeat_after_a_step_without_a_result_is_a_protocol_error(system: LocalSystem, client: Client) -> None:
    end = with_a_plan(system, toy())
    with pytest.raises(ProtocolError, match="after step 1, which has no result"):
        system.scheduler.worker_heartbeat(end.id, Heartbeat(step=1, received=1))


@given(st.lists(st.tuples(st.floats(0.001, 30.0), st.floats(0.0, 0.99)), min_size=1, max_size=5), st.integers(0, 5))
def test_steps_within_their_time_are_never_blamed(steps: list[tuple[float, float]], late: int) -> None:
    """Each step takes a share of its allowed time, and its plan arrives some heartbeats late."""
    progress = WorkerProgress()
    for step, (allowed_s, share) in enumerate(steps, start=1):
        for beat in range(late + int(allowed_s * share / HEARTBEAT_S)):
            heartbeat = Heartbeat(step=step - 1, received=step, allowed_s=allowed_s)
            if beat < late:
                heartbeat = Heartbeat(step=step - 1, received=step - 1)
            assert not progress.find_stall(heartbeat, step, STALL_S)


@given(st.floats(0.001, 30.0), st.integers(1, 4))
def test_a_hang_is_noticed_in_time(allowed_s: float, step: int) -> None:
    progress = WorkerProgress()
    heartbeat = Heartbeat(step=step - 1, received=step + 1, allowed_s=allowed_s)
    num_heartbeats = next(n for n in range(1, 10_000) if progress.find_stall(heartbeat, step, STALL_S))
    age_s = num_heartbeats * HEARTBEAT_S
    bound_s = STALL_S + TIMES_ALLOWED * allowed_s
    assert bound_s < age_s <= bound_s + 3 * HEARTBEAT_S


def test_the_first_heartbeat_of_a_step_does_not_count() -> None:
    progress = WorkerProgress()
    heartbeat = Heartbeat(received=1)
    wrong = [progress.find_stall(heartbeat, 1, 4 * HEARTBEAT_S) for _ in range(6)]
    assert [bool(one) for one in wrong] == [False] * 5 + [True]
