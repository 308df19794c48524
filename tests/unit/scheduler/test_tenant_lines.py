"""Who stands in the order where tenants have a limit: what fits one after the other, and the first that does not."""

from __future__ import annotations

import random
from collections import Counter
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.v1.common_pb2 import SamplingParams
from scheduler_svc.core.queue import WaitingQueue
from scheduler_svc.core.request import Request
from scheduler_svc.core.tenant_lines import TenantLines
from scheduler_svc.core.types import SchedulerConfig
from scheduler_svc.policies.api import Step
from scheduler_svc.policies.order.fcfs import FirstComeFirstServed
from scheduler_svc.policies.presets import PRESETS
from scheduler_svc.policies.registry import build, choose
from simulator.system import LocalSystem
from simulator.toy_worker import ToyWorker

LIMIT = 20


def request(seniority: int, tenant: str, tokens: int) -> Request:
    sampling = SamplingParams(max_tokens=tokens - 1)
    return Request(seniority, "s", seniority, str(seniority), b"1234", bytearray(), sampling, 0.0, tenant=tenant)


def expected(waiting: dict[int, tuple[Request, int]], running: Counter[str]) -> set[int]:
    shown = set()
    for tenant in {one.tenant for one, _ in waiting.values()}:
        line = sorted((rank, one.seniority, one) for one, rank in waiting.values() if one.tenant == tenant)
        tokens, free = 0, LIMIT - running[tenant]
        for i, (_, seniority, one) in enumerate(line):
            if i and tokens > free:
                break
            shown.add(seniority)
            tokens += one.max_total_tokens
    return shown


EVENTS = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(2, 24), st.integers(0, 3)), max_size=40)


@given(events=EVENTS, seed=st.integers(0, 99))
def test_the_first_that_fit_and_one_more(events: list[tuple[str, int, int]], seed: int) -> None:
    rng, running, waiting, shown = random.Random(seed), Counter[str](), dict[int, tuple[Request, int]](), set[int]()
    lines = TenantLines(lambda tenant: LIMIT - running[tenant])
    for number, (tenant, tokens, rank) in enumerate(events):
        if tenant == "d" and waiting:  # one of them leaves
            one, _ = waiting.pop(rng.choice(sorted(waiting)))
            turned = lines.remove(one)
        elif tenant == "c":  # what runs of a tenant changes
            tenant = rng.choice("ab")
            running[tenant] = tokens
            turned = lines.balance(tenant)
        else:
            one = request(number, tenant, tokens)
            waiting[number] = one, rank
            turned = lines.add(one, rank)
        for one in turned:
            shown ^= {one.seniority}
        assert shown == expected(waiting, running)


def test_an_order_whose_ranks_cannot_be_compared_gives_way() -> None:
    class Mixed(FirstComeFirstServed):
        def key(self, request: object) -> int:
            return cast(int, "x" if cast(Request, request).seniority % 2 else 1)

    errors: list[Exception] = []

    def fallback(error: Exception) -> FirstComeFirstServed:
        errors.append(error)
        return FirstComeFirstServed()

    queue = WaitingQueue(Mixed(), fallback, lambda tenant: LIMIT)
    requests = [request(i, "a", 8) for i in range(6)]
    for one in requests:
        queue.add(one)
    assert len(errors) == 1
    assert [one.seniority for one in queue.ordered(0.0)] == [0, 1, 2]
    for one in requests[:5]:
        queue.remove(one)
    assert list(queue.ordered(0.0)) == requests[5:]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_flood_of_one_tenant_costs_the_others_nothing(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither their turn nor the steps' time: of hundreds that wait, a step looks at a few."""
    system = LocalSystem(SchedulerConfig(tenant_max_running_tokens=40), build(choose(preset)))
    system.attach(ToyWorker(block_size=4, num_blocks=400, max_num_seqs=16, max_batched_tokens=64))
    client = system.open("s", window=1 << 20)
    sampling = SamplingParams(top_p=1.0, max_tokens=8, ignore_eos=True)
    for handle in range(300):
        system.submit("s", handle, [9 + handle] * 8, sampling, tenant="flood")
    waiting, looks = Step.waiting, list[int]()

    def counted(self: Step) -> object:
        looks.append(0)
        for one in waiting(self):
            looks[-1] += 1
            yield one

    monkeypatch.setattr(Step, "waiting", counted)
    for handle in range(300, 310):
        system.submit("s", handle, [9 + handle] * 8, sampling, tenant=f"t{handle}")
    while not set(range(300, 310)) <= set(client.endings):
        system.move(*system.moves()[0])
    assert len(client.endings) < 60, "the flood has not had its turn before them"
    assert max(looks) < 30
    system.run()
    flood = [handle for handle in client.tokens if handle < 300]
    assert flood == sorted(flood)
    assert len(client.endings) == 310
    system.assert_at_rest()
