"""The order that is fair among tenants: busy tenants, idle tenants, and how many idle tenants it remembers."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.v1.common_pb2 import SamplingParams
from paceline.v1.inference_pb2 import BeamOptions
from scheduler_svc.core.admission.queue import WaitingQueue
from scheduler_svc.core.requests.request import Request, RequestView, Siblings, SubmissionMetadata
from scheduler_svc.policies.order.fair import CHARGE_INTERVAL_S, MAX_IDLE, FairAmongTenants
from scheduler_svc.policies.registry import build, choose
from simulator.system import LocalSystem
from simulator.toy_worker import ToyWorker

WEIGHTS = {"a": 3.0, "b": 0.5}
CLOCK = itertools.count(step=10 * CHARGE_INTERVAL_S)  # running requests are charged at every look at the order


@dataclass(eq=False)
class FakeRequest:
    arrival_index: int
    tenant: str
    num_prompt_tokens: int = 1
    best_matched_tokens: int = 0
    num_output_tokens: int = 0
    has_run: bool = False
    siblings: Siblings = field(default_factory=lambda: Siblings(0))
    is_beam: bool = False

    @property
    def arrival_s(self) -> float:
        return next(CLOCK)

    @property
    def client_request(self) -> int:
        return self.siblings.first or self.arrival_index

    @property
    def num_running_siblings(self) -> int:
        return self.siblings.num_bound

    @property
    def queue_position(self) -> int:
        return self.arrival_index

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def prompt_cost(self) -> int:
        """A prompt is charged once."""
        return self.num_tokens - self.best_matched_tokens if not self.has_run else 0


def view(request: FakeRequest) -> RequestView:
    return cast(RequestView, request)


@dataclass
class Simple:
    """The rule, in a few lines: remembers every tenant that ever was."""

    counters: dict[str, float] = field(default_factory=dict)
    waiting: list[FakeRequest] = field(default_factory=list)
    running: dict[FakeRequest, int] = field(default_factory=dict)
    last: str = ""  # the last tenant that had a waiting request

    @property
    def waiting_tenants(self) -> set[str]:
        return {one.tenant for one in self.waiting}

    def left(self, tenant: str) -> None:
        if tenant not in self.waiting_tenants:
            self.last = tenant

    def charge(self, tenant: str, tokens: float) -> None:
        self.counters[tenant] = self.counters.get(tenant, 0.0) + tokens / WEIGHTS.get(tenant, 1.0)

    def add(self, request: FakeRequest) -> None:
        for tenant in {one.tenant for one in self.running}:
            self.charge_output(tenant)
        if request.tenant not in self.waiting_tenants and not request.has_run:
            tenants = self.waiting_tenants or {self.last}
            lowest = min(self.counters.get(one, 0.0) for one in tenants)
            self.counters[request.tenant] = max(self.counters.get(request.tenant, 0.0), lowest)
        self.counters.setdefault(request.tenant, 0.0)
        self.waiting.append(request)

    def start(self, request: FakeRequest) -> None:
        self.waiting.remove(request)
        self.left(request.tenant)
        self.charge(request.tenant, request.prompt_cost)
        self.running[request] = request.num_output_tokens

    def charge_output(self, tenant: str) -> None:
        for request, charged in self.running.items():
            if request.tenant == tenant:
                self.charge(tenant, 2.0 * (request.num_output_tokens - charged))
                self.running[request] = request.num_output_tokens

    def stop(self, request: FakeRequest) -> None:
        self.charge_output(request.tenant)
        del self.running[request]

    def ordered(self) -> list[FakeRequest]:
        for tenant in {request.tenant for request in self.running}:
            self.charge_output(tenant)
        counters, left, order = dict(self.counters), sorted(self.waiting, key=lambda one: one.arrival_index), []
        while left:
            least = min((counters[one.tenant], one.tenant) for one in left)[1]
            request = next(one for one in left if one.tenant == least)
            left.remove(request)
            order.append(request)
            counters[least] += request.prompt_cost / WEIGHTS.get(least, 1.0)
        return order


def names(order: FairAmongTenants) -> list[int]:
    return [request.arrival_index for request in order.ordered(next(CLOCK))]


@settings(deadline=None, max_examples=300)
@given(st.randoms(use_true_random=False), st.integers(1, 60))
def test_the_order_is_that_of_a_rule_that_forgets_no_tenant(rng: Any, num_events: int) -> None:
    order, simple = FairAmongTenants(dict(WEIGHTS)), Simple()
    for arrival_index in range(num_events):
        event = rng.choice(["add", "add", "start", "start", "cancel", "grow", "stop", "preempt"])
        waiting, running = simple.waiting, list(simple.running)
        if event == "add":
            prompt = rng.randrange(1, 20)
            request = FakeRequest(arrival_index, rng.choice("abcd"), prompt, rng.randrange(prompt))
            simple.add(request)
            order.add(view(request))
        elif event in ("start", "cancel") and waiting:
            request = rng.choice(waiting)
            order.remove(view(request))
            if event == "start":
                simple.start(request)
                order.started(view(request))
                request.has_run = True  # as Lifecycle.bind does
            else:
                waiting.remove(request)
                simple.left(request.tenant)
        elif event == "grow" and running:
            rng.choice(running).num_output_tokens += rng.randrange(1, 9)
        elif event in ("stop", "preempt") and running:
            request = rng.choice(running)
            simple.stop(request)
            order.stopped(view(request))
            if event == "preempt":
                simple.add(request)
                order.add(view(request))
        if rng.random() < 0.5:
            assert names(order) == [request.arrival_index for request in simple.ordered()]
    assert names(order) == [request.arrival_index for request in simple.ordered()]


def serve(order: FairAmongTenants, request: FakeRequest) -> None:
    order.add(view(request))
    order.remove(view(request))
    order.started(view(request))
    request.has_run = True
    order.stopped(view(request))


def test_a_new_tenant_gets_no_credit_for_earlier_service() -> None:
    order = FairAmongTenants()
    serve(order, FakeRequest(0, "old", num_prompt_tokens=1_000_000))
    for arrival_index in range(1, 9):
        order.add(view(FakeRequest(arrival_index, "new" if arrival_index < 5 else "old", num_prompt_tokens=100)))
    assert names(order) == [1, 5, 2, 6, 3, 7, 4, 8]


def test_only_the_last_idle_tenants_are_remembered() -> None:
    order = FairAmongTenants()
    for i in range(3 * MAX_IDLE):
        serve(order, FakeRequest(i, f"user-{i}", num_prompt_tokens=10))
    assert not order.busy
    assert list(order.idle) == [f"user-{i}" for i in range(2 * MAX_IDLE, 3 * MAX_IDLE)]


def test_a_tenant_that_comes_again_is_remembered_longer() -> None:
    order = FairAmongTenants()
    for i in range(3 * MAX_IDLE):
        serve(order, FakeRequest(i, f"user-{i}", num_prompt_tokens=10))
        if i % 100 == 0:
            serve(order, FakeRequest(i, "regular", num_prompt_tokens=10))
    assert "regular" in order.idle
    assert "user-0" not in order.idle
    assert len(order.idle) == MAX_IDLE


def test_a_forgotten_tenant_does_not_get_ahead_of_busy_tenants() -> None:
    order = FairAmongTenants()
    serve(order, FakeRequest(0, "greedy", num_prompt_tokens=1000))
    for i in range(1, MAX_IDLE + 2):
        serve(order, FakeRequest(i, f"user-{i}", num_prompt_tokens=10))
    assert "greedy" not in order.idle
    busy = FakeRequest(5000, "busy", num_prompt_tokens=300)
    order.add(view(busy))
    order.remove(view(busy))
    order.started(view(busy))
    order.add(view(FakeRequest(5001, "busy", num_prompt_tokens=1)))
    order.add(view(FakeRequest(5002, "greedy", num_prompt_tokens=1)))
    order.add(view(FakeRequest(5003, "greedy", num_prompt_tokens=1)))
    assert names(order) == [5001, 5002, 5003]


def test_a_running_tenant_gets_no_credit_for_idle_time() -> None:
    order = FairAmongTenants()
    long = FakeRequest(1, "modest", num_prompt_tokens=10)
    order.add(view(long))
    order.remove(view(long))
    order.started(view(long))
    for arrival_index in range(2, 12):
        serve(order, FakeRequest(arrival_index, "busy", num_prompt_tokens=100))
    for arrival_index in (20, 21):
        order.add(view(FakeRequest(arrival_index, "busy", num_prompt_tokens=100)))
    for arrival_index in (30, 31):
        order.add(view(FakeRequest(arrival_index, "modest", num_prompt_tokens=100)))
    assert names(order) == [20, 30, 21, 31], "the running request gives its tenant no credit"


def test_recomputation_after_preemption_is_charged_to_no_tenant() -> None:
    order = FairAmongTenants()
    victim = FakeRequest(1, "victim", num_prompt_tokens=100)
    serve(order, victim)
    victim.num_output_tokens = 50
    for _ in range(5):
        serve(order, victim)
    other = FakeRequest(2, "other", num_prompt_tokens=100)
    order.add(view(victim))
    serve(order, other)
    order.add(view(FakeRequest(3, "victim", num_prompt_tokens=1000)))
    order.add(view(FakeRequest(4, "other", num_prompt_tokens=10)))
    assert [tenant.counter for tenant in order.busy.values()] == [100.0, 200.0]
    assert names(order) == [1, 3, 4], "the victim does not wait behind others for its recomputation"


def test_a_search_pays_for_each_of_its_beams() -> None:
    """Each beam is charged as a request of one token, also after its search has begun."""
    system = LocalSystem(policies=build(choose("", {"order": "fair"})))
    system.attach(ToyWorker(block_size=4, num_blocks=200, max_num_seqs=8, max_batched_tokens=64))
    system.open("s")
    sampling = SamplingParams(top_p=1.0, max_tokens=40, ignore_eos=True)
    system.submit("s", 1, [7] * 20, sampling, tenant="t", beam=BeamOptions(width=4, num_return=1))
    system.run()
    order = system.scheduler.policies.order
    assert isinstance(order, FairAmongTenants)
    assert order.idle["t"] >= 20 + 4 * 39


def test_a_tenant_hidden_by_its_limit_still_waits() -> None:
    """A request of a tenant starts, and the next one is hidden by the limit. The tenant does not count as new."""
    order, running = FairAmongTenants(), {"modest": 0, "busy": 0}
    queue = WaitingQueue(order, lambda error: pytest.fail(str(error)), lambda tenant: 20 - running[tenant])
    requests = [limited(arrival_index, "modest") for arrival_index in range(1, 5)]
    others = [limited(arrival_index, "busy") for arrival_index in range(10, 20)]
    for one in (*requests, *others):
        queue.add(one)
    running["modest"] = 20
    queue.remove(requests[0])
    queue.started(requests[0])
    for one in others[:8]:
        queue.remove(one)
        queue.started(one)
    before = {tenant.name: tenant.counter for tenant in order.busy.values()}
    assert before["modest"] < before["busy"]
    queue.remove(requests[1])  # its client goes
    assert {tenant.name: tenant.counter for tenant in order.busy.values()} == before


def limited(arrival_index: int, tenant: str) -> Request:
    sampling = SamplingParams(max_tokens=18)
    return Request(
        arrival_index,
        "s",
        arrival_index,
        "",
        b"12345678",
        bytearray(),
        sampling,
        0.0,
        SubmissionMetadata(tenant=tenant),
        queue_position=arrival_index,
    )


class Samples:
    """Requests with several samples each. `order` is under test; `expected` sorts them by the plain rule."""

    def __init__(self) -> None:
        self.order = FairAmongTenants()
        self.waiting: list[FakeRequest] = []
        self.running: list[FakeRequest] = []

    def submit(self, arrival_index: int, count: int = 1, is_beam: bool = False) -> None:
        siblings = Siblings(arrival_index)
        for number in range(arrival_index, arrival_index + count):
            self.waiting.append(FakeRequest(number, "t", siblings=siblings, is_beam=is_beam))
            self.order.add(view(self.waiting[-1]))

    def start(self, request: FakeRequest) -> None:
        self.waiting.remove(request)
        self.order.remove(view(request))
        request.siblings.num_bound += 1
        self.order.started(view(request))
        request.has_run = True
        self.running.append(request)

    def stop(self, request: FakeRequest, requeue: bool = False) -> None:
        self.running.remove(request)
        request.siblings.num_bound -= 1
        self.order.stopped(view(request))
        if requeue:
            self.waiting.append(request)
            self.order.add(view(request))

    def expected(self) -> list[int]:
        counts = {id(one.siblings): one.siblings.num_bound for one in self.waiting}
        left, order = list(self.waiting), []
        while left:
            request = min(left, key=lambda one: (counts[id(one.siblings)], one.arrival_index))
            left.remove(request)
            counts[id(request.siblings)] += 1
            order.append(request.arrival_index)
        return order


def test_samples_take_turns_with_later_requests() -> None:
    samples = Samples()
    samples.submit(1, 4)
    samples.submit(11, 2)
    samples.submit(21)
    assert names(samples.order) == [1, 11, 21, 2, 12, 3, 4]
    for request in samples.waiting[:3]:  # three of the first request's samples have started
        samples.start(request)
    assert names(samples.order) == [11, 21, 12, 4]
    samples.stop(samples.running[-1], requeue=True)
    assert names(samples.order) == [11, 21, 12, 3, 4]


def test_the_other_beams_of_a_search_come_together_after_one_sequence_of_each_request() -> None:
    samples = Samples()
    samples.submit(1, 3, is_beam=True)
    samples.submit(11, 3, is_beam=True)
    samples.submit(21)
    assert names(samples.order) == [1, 11, 21, 2, 3, 12, 13]


@pytest.mark.parametrize("seed", range(30))
def test_the_request_with_fewest_running_sequences_is_first(seed: int) -> None:
    rng, samples = random.Random(seed), Samples()
    for number in range(80):
        event = rng.choice(["submit", "start", "start", "stop", "preempt"])
        if event == "submit":
            samples.submit(1 + 100 * number, rng.choice([1, 1, 2, 5]))
        elif event == "start" and samples.waiting:
            samples.start(rng.choice(samples.waiting))
        elif event in ("stop", "preempt") and samples.running:
            samples.stop(rng.choice(samples.running), requeue=event == "preempt")
        assert names(samples.order) == samples.expected()


def test_comparing_unknown_tenants_stores_nothing() -> None:
    """The order that replaces a failed one compares requests that were not added to it."""
    order = FairAmongTenants()
    for i in range(10):
        waiting, running = FakeRequest(2 * i, f"waiting-{i}"), FakeRequest(2 * i + 1, f"running-{i}")
        order.goes_before(view(waiting), view(running), 0.0)
    assert not order.busy
    assert not order.idle


def test_running_requests_are_looked_at_only_while_two_tenants_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    order = FairAmongTenants()
    running = [FakeRequest(number, "t") for number in range(1, 50)]
    for request in running:
        order.add(view(request))
        order.remove(view(request))
        order.started(view(request))
    waiting = [FakeRequest(number, "t" if number < 60 else "other") for number in range(50, 61)]
    looks: list[Any] = []
    monkeypatch.setattr(FakeRequest, "num_output_tokens", property(looks.append))
    monkeypatch.setattr(FakeRequest, "num_tokens", 1)
    assert not names(order)
    for request in waiting[:-1]:
        order.add(view(request))
        assert names(order)[0] == 50
    assert not looks
    monkeypatch.setattr(FakeRequest, "num_output_tokens", property(lambda self: looks.append(self) or 0))  # type: ignore[func-returns-value]
    order.add(view(waiting[-1]))
    assert len(looks) == len(running), "another tenant waits, so the running requests are charged once"
