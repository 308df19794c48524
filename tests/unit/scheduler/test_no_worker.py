"""While no worker takes requests, a request waits for a limited time and then ends with UNAVAILABLE."""

from __future__ import annotations

import pytest

from paceline.v1.common_pb2 import FINISH_REASON_ERROR, FINISH_REASON_LENGTH, SamplingParams
from paceline.v1.inference_pb2 import BeamOptions
from scheduler_svc.core.rejection import CODE_UNAVAILABLE
from scheduler_svc.core.types import SchedulerConfig
from simulator.system import Client, LocalSystem
from simulator.toy_worker import ToyWorker, expected_output

LIMIT_S = 30.0
PARAMS = SamplingParams(top_p=1.0, max_tokens=8, seed=1, ignore_eos=True)


def toy() -> ToyWorker:
    return ToyWorker(block_size=4, num_blocks=64, max_num_seqs=2, max_batched_tokens=64)


@pytest.fixture
def system() -> LocalSystem:
    system = LocalSystem()
    tick(system, 1000.0)
    return system


@pytest.fixture
def client(system: LocalSystem) -> Client:
    return system.open("s")


def tick(system: LocalSystem, now_s: float) -> None:
    system.now_s = now_s
    system.scheduler.tick(now_s)
    system.poll()


def assert_unavailable(client: Client, handle: int) -> None:
    ending = client.endings[handle]
    assert (ending.reason, ending.code) == (FINISH_REASON_ERROR, CODE_UNAVAILABLE)
    assert ending.message == "no worker takes requests: waited 30 s for one"
    assert ending.retry_after_s > 0


def test_a_request_ends_when_no_worker_is_attached_within_the_limit(system: LocalSystem, client: Client) -> None:
    system.submit("s", 1, [9, 10], PARAMS)
    tick(system, 1000.0 + LIMIT_S - 0.01)
    assert not client.endings
    tick(system, 1000.0 + LIMIT_S)
    assert_unavailable(client, 1)
    system.run()
    system.assert_at_rest()


def test_each_request_waits_for_the_whole_limit(system: LocalSystem, client: Client) -> None:
    """The outage may be old when the request comes."""
    tick(system, 2000.0)
    system.submit("s", 1, [9, 10], PARAMS)
    tick(system, 2000.0 + LIMIT_S / 2)
    system.submit("s", 2, [9, 10], PARAMS)
    tick(system, 2000.0 + LIMIT_S)
    assert_unavailable(client, 1)
    assert 2 not in client.endings
    tick(system, 2000.0 + 1.5 * LIMIT_S)
    assert_unavailable(client, 2)


def test_a_worker_that_comes_back_in_time_costs_no_request(system: LocalSystem, client: Client) -> None:
    first = system.attach(toy())
    for handle in (1, 2, 3):  # two run, one waits
        system.submit("s", handle, [9, handle], PARAMS)
    while not client.tokens:
        system.move(*system.moves()[0])
        system.poll()
    tick(system, 1100.0)
    system.kill(first)
    tick(system, 1100.25)  # the scheduler notices the outage
    tick(system, 1100.25 + LIMIT_S - 0.01)
    assert not client.endings
    system.attach(toy())
    tick(system, 1200.0)
    system.run()
    assert {handle: client.tokens[handle] for handle in (1, 2, 3)} == {
        handle: expected_output([9, handle], PARAMS) for handle in (1, 2, 3)
    }
    assert all(ending.reason == FINISH_REASON_LENGTH for ending in client.endings.values())


def test_a_request_that_ran_before_its_worker_died_ends_too(system: LocalSystem, client: Client) -> None:
    worker = system.attach(toy())
    system.submit("s", 1, [9, 10], PARAMS)
    while not client.tokens:
        system.move(*system.moves()[0])
        system.poll()
    system.kill(worker)
    tick(system, 1500.0)
    tick(system, 1500.0 + LIMIT_S)
    assert_unavailable(client, 1)
    system.run()
    system.assert_at_rest()


def test_two_outages_do_not_add_up(system: LocalSystem, client: Client) -> None:
    """Between two ticks a worker was attached."""
    system.submit("s", 1, [9, 10], PARAMS)
    tick(system, 1000.0 + LIMIT_S - 1)
    system.kill(system.attach(toy()))
    tick(system, 1000.0 + LIMIT_S + 1)
    assert not client.endings
    tick(system, 1000.0 + 2 * LIMIT_S + 1)
    assert_unavailable(client, 1)


def test_a_draining_worker_finishes_its_requests_and_counts_as_absent_for_others(
    system: LocalSystem, client: Client
) -> None:
    leaving = system.attach(toy())
    for handle in (1, 2, 3):
        system.submit("s", handle, [9, handle], PARAMS)
    while len(client.tokens) < 2:
        system.move(*system.moves()[0])
        system.poll()
    system.scheduler.worker_drain(leaving.id)
    tick(system, 1500.0)
    tick(system, 1500.0 + LIMIT_S)
    assert_unavailable(client, 3)
    system.run()
    assert {client.endings[handle].reason for handle in (1, 2)} == {FINISH_REASON_LENGTH}


def test_a_search_ends_once_as_a_whole(system: LocalSystem, client: Client) -> None:
    worker = system.attach(toy())
    system.kill(worker)
    tick(system, 1500.0)
    system.submit("s", 1, [9, 10], PARAMS, beam=BeamOptions(width=2))
    tick(system, 1500.0 + LIMIT_S)
    assert_unavailable(client, 1)
    system.run()
    system.assert_at_rest()


def test_a_limit_of_zero_waits_for_ever(client: Client) -> None:
    system = LocalSystem(SchedulerConfig(no_worker_timeout_s=0))
    client = system.open("s")
    system.submit("s", 1, [9, 10], PARAMS)
    for now_s in (1000.0, 10_000.0, 100_000.0):
        tick(system, now_s)
    assert not client.endings
    system.attach(toy())
    system.run()
    assert client.tokens[1] == expected_output([9, 10], PARAMS)


def test_gateways_learn_how_long_requests_wait_for_a_worker(system: LocalSystem, client: Client) -> None:
    assert client.status is not None
    assert client.status.no_worker_timeout_s == LIMIT_S


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_request_ends_when_no_worker_that_can_hold_it_is_attached_within_the_limit(
    system: LocalSystem, client: Client, comes_back: bool
) -> None:
    """A smaller worker stays attached, and serves what fits."""
    large = system.attach(toy())
    system.attach(ToyWorker(block_size=4, num_blocks=8, max_num_seqs=2, max_batched_tokens=64))
    tick(system, 1001.0)
    system.submit("s", 1, [9, 10], SamplingParams(top_p=1.0, max_tokens=100, seed=1, ignore_eos=True))
    system.run_for(20)
    system.kill(large)
    system.run()
    tick(system, 1002.0)
    tick(system, 1002.0 + LIMIT_S - 0.01)
    assert not client.endings
    if comes_back:
        system.attach(toy())
    tick(system, 1002.0 + LIMIT_S)
    system.submit("s", 2, [9, 10], PARAMS)
    system.run()
    assert client.endings[2].reason == FINISH_REASON_LENGTH
    if comes_back:
        assert client.endings[1].reason == FINISH_REASON_LENGTH
    else:
        message = "no attached worker can run this request of 102 tokens, and no suitable worker came within 30 s"
        assert (client.endings[1].code, client.endings[1].message) == (CODE_UNAVAILABLE, message)
    system.assert_at_rest()
