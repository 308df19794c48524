"""Which requests the order sees when tenants have a limit: those that fit in turn, and the first that does not."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.v1.common_pb2 import SamplingParams
from scheduler_svc.core.admission.queue import WaitingQueue
from scheduler_svc.core.admission.tenant_lines import TenantLines
from scheduler_svc.core.requests.request import Request, SubmissionMetadata
from scheduler_svc.core.types import SchedulerConfig
from scheduler_svc.policies.api import Step
from scheduler_svc.policies.order.fcfs import FirstComeFirstServed
from scheduler_svc.policies.presets import PRESETS
from scheduler_svc.policies.registry import build, choose
from simulator.system import Client, LocalSystem, WorkerEnd
from simulator.toy_worker import ToyWorker

LIMIT = 20
Limited = tuple[LocalSystem, list[WorkerEnd], Client]


def request(arrival_index: int, tenant: str, tokens: int) -> Request:
    sampling, metadata = SamplingParams(max_tokens=tokens - 1), SubmissionMetadata(tenant=tenant)
    return Request(arrival_index, "s", arrival_index, str(arrival_index), b"1234", bytearray(), sampling, 0.0, metadata)


def expected(waiting: dict[int, tuple[Request, int]], running: Counter[str]) -> set[int]:
    shown = set()
    for tenant in {one.metadata.tenant for one, _ in waiting.values()}:
        line = sorted((rank, one.arrival_index, one) for one, rank in waiting.values() if one.metadata.tenant == tenant)
        tokens, free = 0, LIMIT - running[tenant]
        for i, (_, arrival_index, one) in enumerate(line):
            if i and tokens > free:
                break
            shown.add(arrival_index)
            tokens += one.max_total_tokens
    return shown


EVENTS = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(2, 24), st.integers(0, 3)), max_size=40)


@given(events=EVENTS, seed=st.integers(0, 99))
def test_the_order_sees_the_first_requests_that_fit_and_one_more(events: list[tuple[str, int, int]], seed: int) -> None:
    rng, running, waiting, shown = random.Random(seed), Counter[str](), dict[int, tuple[Request, int]](), set[int]()
    lines = TenantLines(lambda tenant: LIMIT - running[tenant])
    for number, (tenant, tokens, rank) in enumerate(events):
        if tenant == "d" and waiting:  # a waiting request leaves
            one, _ = waiting.pop(rng.choice(sorted(waiting)))
            turned = lines.remove(one)
        elif tenant == "c":  # the running tokens of a tenant change
            tenant = rng.choice("ab")
            running[tenant] = tokens
            turned = lines.balance(tenant)
        else:
            one = request(number, tenant, tokens)
            waiting[number] = one, rank
            turned = lines.add(one, rank)
        for one in turned:
            shown ^= {one.arrival_index}
        assert shown == expected(waiting, running)


def test_an_order_with_keys_that_cannot_be_compared_is_replaced() -> None:
    class Mixed(FirstComeFirstServed):
        def key(self, request: object) -> int:
            return cast(int, "x" if cast(Request, request).arrival_index % 2 else 1)

    errors: list[Exception] = []

    def fallback(error: Exception) -> FirstComeFirstServed:
        errors.append(error)
        return FirstComeFirstServed()

    queue = WaitingQueue(Mixed(), fallback, lambda tenant: LIMIT)
    requests = [request(i, "a", 8) for i in range(6)]
    for one in requests:
        queue.add(one)
    assert len(errors) == 1
    assert [one.arrival_index for one in queue.ordered(0.0)] == [0, 1, 2]
    for one in requests[:5]:
        queue.remove(one)
    assert list(queue.ordered(0.0)) == requests[5:]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_flood_of_one_tenant_costs_the_others_nothing(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tenants keep their turn, and steps stay short: a step looks at a few of the 100 waiting requests.

    Each further request costs this test 8 ms of CPU time. With 300 requests, it took 22 s on a busy machine, and the
    suite's limit is 120 s a test.
    """
    system = LocalSystem(SchedulerConfig(tenant_max_running_tokens=40), build(choose(preset)))
    system.attach(ToyWorker(block_size=4, num_blocks=400, max_num_seqs=16, max_batched_tokens=64))
    client = system.open("s", window=1 << 20)
    sampling = SamplingParams(top_p=1.0, max_tokens=8, ignore_eos=True)
    for handle in range(100):
        system.submit("s", handle, [9 + handle] * 8, sampling, tenant="flood")
    waiting, looks = Step.waiting, list[int]()

    def counted(self: Step) -> object:
        looks.append(0)
        for one in waiting(self):
            looks[-1] += 1
            yield one

    monkeypatch.setattr(Step, "waiting", counted)
    for handle in range(100, 110):
        system.submit("s", handle, [9 + handle] * 8, sampling, tenant=f"t{handle}")
    while not set(range(100, 110)) <= set(client.endings):
        system.move(*system.moves()[0])
    assert len(client.endings) < 60, "the flood has not had its turn before them"
    assert max(looks) < 30
    system.run()
    flood = [handle for handle in client.tokens if handle < 100]
    assert flood == sorted(flood)
    assert len(client.endings) == 110
    system.assert_at_rest()


def limited_system(
    workers: int = 1, limit: int = 24, overrides: dict[str, str] | None = None, **options: Any
) -> Limited:
    system = LocalSystem(SchedulerConfig(tenant_max_running_tokens=limit), build(choose("", overrides, options)))
    sizes = {"block_size": 4, "max_num_seqs": 16, "max_batched_tokens": 64}
    ends = [system.attach(ToyWorker(num_blocks=400 if i == 0 else 40, **sizes)) for i in range(workers)]
    return system, ends, system.open("s", window=1 << 20)


def settle(system: LocalSystem) -> None:
    system.run()
    for _ in range(10):
        system.now_s += 1.0
        system.scheduler.tick(system.now_s)
        system.poll()
        system.run()


@pytest.mark.parametrize(("order", "seed"), [("priority", 0), *(("random", seed) for seed in range(20))])
def test_samples_do_not_hide_the_first_sample_that_they_wait_for(order: str, seed: int) -> None:
    options = {"seed": seed} if order == "random" else {}
    system, _, client = limited_system(overrides={"order": order}, **options)
    sampling = SamplingParams(top_p=1.0, max_tokens=4, ignore_eos=True)
    for handle in range(1, 5):
        fields = {"fork_of": 1, "priority": 1.0} if handle > 1 else {}
        system.submit("s", handle, [9] * 8, sampling, tenant="t", **fields)
    system.submit("s", 9, [3] * 8, sampling, tenant="t", priority=-1.0)
    settle(system)
    assert set(client.endings) == {1, 2, 3, 4, 9}
    system.assert_at_rest()


def test_a_request_that_fits_no_worker_any_more_does_not_hide_the_others() -> None:
    system, ends, client = limited_system(workers=2, limit=200)
    sampling = SamplingParams(top_p=1.0, max_tokens=6, ignore_eos=True)
    system.submit("s", 1, [9] * 300, sampling, tenant="t")
    for handle in range(10, 15):
        system.submit("s", handle, [handle] * 8, sampling, tenant="t")
    system.kill(ends[0])
    settle(system)
    assert set(client.endings) == {10, 11, 12, 13, 14}
    system.attach(ToyWorker(block_size=4, num_blocks=400, max_num_seqs=16, max_batched_tokens=64))
    settle(system)
    assert 1 in client.endings
    system.assert_at_rest()


def test_a_request_that_waits_for_an_adapter_does_not_hide_the_others() -> None:
    system, _, client = limited_system(workers=0, limit=40)
    worker = ToyWorker(block_size=4, num_blocks=400, max_num_seqs=16, max_batched_tokens=64)
    worker.registration.max_loras = 1
    system.attach(worker)
    long, short = (SamplingParams(top_p=1.0, max_tokens=n, ignore_eos=True) for n in (400, 6))
    system.submit("s", 1, [5] * 8, long, tenant="other", lora="x")
    system.run_for(10)
    system.submit("s", 2, [9] * 30, short, tenant="t", lora="y")
    for handle in range(10, 15):
        system.submit("s", handle, [handle] * 8, short, tenant="t")
    while not set(range(10, 15)) <= set(client.endings):
        system.move(*system.moves()[0])
    assert set(client.endings) == {10, 11, 12, 13, 14}
    settle(system)
    assert len(client.endings) == 7
    system.assert_at_rest()


def test_a_request_that_waits_for_its_tenant_takes_no_slot_of_max_utilization() -> None:
    system = LocalSystem(SchedulerConfig(tenant_max_running_tokens=40), build(choose("trtllm-max-util")))
    system.attach(ToyWorker(block_size=4, num_blocks=400, max_num_seqs=4, max_batched_tokens=64))
    client = system.open("s", window=1 << 20)
    long, short = (SamplingParams(top_p=1.0, max_tokens=n, ignore_eos=True) for n in (20, 4))
    for handle in range(60):
        system.submit("s", handle, [9 + handle] * 16, long, tenant=f"flood{handle % 2}")
    system.run_for(20)
    before = len(client.endings)
    for handle in range(60, 63):
        system.submit("s", handle, [9 + handle] * 8, short, tenant=f"t{handle}")
    while not {60, 61, 62} <= set(client.endings):
        system.move(*system.moves()[0])
    assert len(client.endings) - 3 - before <= 2
    system.run()
    system.assert_at_rest()


def test_a_request_that_is_too_late_is_given_up_at_once_though_a_limit_hides_it() -> None:
    system, _, client = limited_system(limit=60, overrides={"order": "deadline"}, prefill_tokens_per_s=10.0)
    long, short = (SamplingParams(top_p=1.0, max_tokens=n, ignore_eos=True) for n in (50, 10))
    system.submit("s", 1, [9] * 8, long, tenant="a")
    system.run_for(8)
    for handle in range(10, 20):
        system.submit("s", handle, [handle] * 40, short, tenant="a", deadline_s=3.0)
    system.now_s += 0.25
    system.scheduler.tick(system.now_s)
    system.poll()
    assert set(client.endings) == set(range(10, 20))
