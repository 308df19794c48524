"""Budgets of tenants and adapters, queue caps, time-outs, and requests that can never run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.v1.common_pb2 import FinishReason, SamplingParams
from paceline.v1.inference_pb2 import QUEUE_LIMIT_REQUESTS, QUEUE_LIMIT_TOKENS, BeamOptions, QueueLimit
from scheduler_svc.core.admission.budgets import Budgets
from scheduler_svc.core.policy.step import CapacityPolicy, Step, Verdict
from scheduler_svc.core.rejection import (
    CODE_DEADLINE_EXCEEDED,
    CODE_INTERNAL,
    CODE_INVALID_ARGUMENT,
    CODE_RESOURCE_EXHAUSTED,
)
from scheduler_svc.core.requests.request import RequestView
from scheduler_svc.core.types import SchedulerConfig
from scheduler_svc.policies.order.fcfs import FirstComeFirstServed
from scheduler_svc.policies.presets import PRESETS
from scheduler_svc.policies.registry import build, choose
from services.gateway.errors import from_scheduler
from simulator.system import Client, LocalSystem
from simulator.toy_worker import ToyWorker, expected_output

LENGTH = FinishReason.FINISH_REASON_LENGTH


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(top_p=1.0, max_tokens=max_tokens, seed=1, ignore_eos=True)


def system_with(policies: Any = None, **config: Any) -> tuple[LocalSystem, Client]:
    system = LocalSystem(SchedulerConfig(**config), policies)
    system.attach(ToyWorker(block_size=4, num_blocks=64, max_num_seqs=8, max_batched_tokens=64))
    return system, system.open("s")


def running(system: LocalSystem) -> list[int]:
    return sorted(request.handle for worker in system.scheduler.workers.values() for request in worker.bound)


def test_a_tenant_runs_no_more_than_its_token_limit_and_other_tenants_overtake_it() -> None:
    system, client = system_with(tenant_max_running_tokens=50)
    for handle, tenant in enumerate("aaab"):
        system.submit("s", handle, [9] * 10, params(10), tenant=tenant)
    seen = set()
    while moves := system.moves():
        tenants = [request.metadata.tenant for worker in system.scheduler.workers.values() for request in worker.bound]
        assert tenants.count("a") <= 2, "a third request would grow to 60 tokens"
        seen.add(tuple(running(system)))
        system.move(*moves[0])
    assert (0, 1, 3) in seen, "tenant b did not wait behind the third request of tenant a"
    assert all(client.endings[handle].reason == LENGTH for handle in range(4))


def test_a_request_larger_than_its_tenants_budget_runs_alone() -> None:
    system, client = system_with(tenant_max_running_tokens=5)
    for handle in range(2):
        system.submit("s", handle, [9] * 10, params(10), tenant="a")
    while moves := system.moves():
        assert len(running(system)) <= 1
        system.move(*moves[0])
    assert [client.endings[handle].reason for handle in range(2)] == [LENGTH, LENGTH]


@pytest.mark.parametrize(
    ("config", "name", "limit"),
    [
        ({"max_queued_requests": 2}, "queue: full with 2 requests", QUEUE_LIMIT_REQUESTS),
        ({"max_queued_tokens": 25}, "queue: 20 tokens wait, the limit is 25", QUEUE_LIMIT_TOKENS),
        ({"tenant_max_queued_tokens": 25}, "tenant: 20 tokens of tenant 'a' wait, its limit is 25", QUEUE_LIMIT_TOKENS),
    ],
)
def test_a_full_queue_says_what_is_full_and_when_to_come_back(
    config: dict[str, Any], name: str, limit: QueueLimit.ValueType
) -> None:
    system = LocalSystem(SchedulerConfig(**config))
    client = system.open("s")
    for handle in range(3):
        system.submit("s", handle, [9] * 10, params(4), tenant="a")
    ending = client.endings[2]
    assert (ending.code, ending.message, ending.queue_limit) == (CODE_RESOURCE_EXHAUSTED, name, limit)
    assert ending.retry_after_s > 0
    if "tenant_max_queued_tokens" in config:
        system.submit("s", 3, [9] * 10, params(4), tenant="b")
        assert 3 not in client.endings, "the limit does not affect another tenant"


@pytest.mark.parametrize("limit", ["max_queued_tokens", "tenant_max_queued_tokens"])
def test_a_request_larger_than_the_queues_limit_waits_alone(limit: str) -> None:
    """Otherwise the client would get a 429 for each attempt."""
    system, client = system_with(**{limit: 15})
    system.kill(system.workers[0])
    for handle in range(2):
        system.submit("s", handle, [9] * 20, params(4), tenant="a")
    assert [client.endings[handle].code for handle in client.endings] == [CODE_RESOURCE_EXHAUSTED]
    system.attach(ToyWorker(block_size=4, num_blocks=64, max_num_seqs=8, max_batched_tokens=64))
    system.run()
    assert client.endings[0].reason == LENGTH


@pytest.mark.parametrize("config", [{"max_queued_tokens": 50}, {"max_queued_requests": 3}])
def test_samples_count_as_one_request_in_the_queue(config: dict[str, Any]) -> None:
    """Otherwise a request with n samples could fill the queue by itself and be refused for ever."""
    system = LocalSystem(SchedulerConfig(**config))
    client = system.open("s")
    for handle in range(1, 9):
        system.submit("s", handle, [9] * 20, params(4), fork_of=min(handle - 1, 1))
    assert not client.endings
    system.submit("s", 9, [9] * 20, params(4))
    assert client.endings[9].code == CODE_RESOURCE_EXHAUSTED
    system.attach(ToyWorker(block_size=4, num_blocks=64, max_num_seqs=8, max_batched_tokens=64))
    system.run()
    assert [client.endings[handle].reason for handle in range(1, 9)] == [LENGTH] * 8


def test_a_sample_of_another_tenant_counts_for_that_tenant() -> None:
    system = LocalSystem(SchedulerConfig(tenant_max_queued_tokens=50))
    client = system.open("s")
    for handle, tenant in enumerate("abbb", start=1):
        system.submit("s", handle, [9] * 20, params(4), tenant=tenant, fork_of=int(handle > 1))
    assert [client.endings[handle].code for handle in client.endings] == [CODE_RESOURCE_EXHAUSTED]


def test_the_retry_time_is_the_time_to_drain_the_surplus() -> None:
    """20 tokens leave the queue each second. The third request exceeds the limit by 20 tokens."""
    system, client = system_with(max_queued_tokens=100)
    for second in range(8):
        system.submit("s", second, [9] * 20, params(1))
        system.run()
        system.now_s += 1.0
        system.scheduler.tick(system.now_s)
    system.kill(system.workers[0])
    for handle in (10, 11, 12):
        system.submit("s", handle, [9] * 40, params(1))
    assert client.endings[12].retry_after_s == pytest.approx(20 / 20, rel=0.05)


@pytest.mark.parametrize(("own", "others"), [(10, 200), (200, 10)])
def test_the_retry_time_of_a_queue_full_of_requests_is_the_time_until_they_leave(own: int, others: int) -> None:
    """The tokens of the refused request do not count. Ten steps run per second, each with room for all slots'
    prompts."""
    system = LocalSystem(SchedulerConfig(max_queued_requests=10))
    system.attach(ToyWorker(block_size=4, num_blocks=1000, max_num_seqs=2, max_batched_tokens=500))
    client, handles = system.open("s"), itertools.count(1)

    def step() -> None:
        while len(system.scheduler.queue) < 10:
            system.submit("s", next(handles), [9] * others, params(4))
        while others_first := [move for move in system.moves() if move[0] != "step"]:
            system.move(*others_first[0])
        system.now_s += 0.1
        system.move(*system.moves()[0])
        system.scheduler.tick(system.now_s)

    for _ in range(300):
        step()
    while len(system.scheduler.queue) < 10:
        system.submit("s", next(handles), [9] * others, params(4))
    system.submit("s", refused := next(handles), [9] * own, params(4))
    ending = client.endings[refused]
    assert ending.message == "queue: full with 10 requests"
    assert ending.retry_after_s == pytest.approx(0.2, abs=0.1), "two requests leave in four or five steps"


def test_the_beams_of_a_search_do_not_count_in_the_queue() -> None:
    """Beams come and go in each step of the search. They do not count as requests that leave the queue either."""
    system, client = system_with(tenant_max_queued_tokens=60, max_queued_requests=3, max_queued_tokens=60)
    system.submit("s", 1, [9] * 20, SamplingParams(top_p=1.0, max_tokens=20), tenant="a", beam=BeamOptions(width=4))
    most_waiting = handle = 1
    while (moves := system.moves()) and 1 not in client.endings:
        system.move(*moves[0])
        most_waiting = max(most_waiting, len(system.scheduler.queue))
        if len(client.endings) == handle - 1:  # one at a time
            system.submit("s", handle := handle + 1, [8] * 10, params(1), tenant="a")
    assert most_waiting >= 4, "beams wait"
    assert all(not ending.code for ending in client.endings.values())
    budgets, queue = system.scheduler.life.budgets.online, system.scheduler.queue.online
    assert budgets._estimates[None]._finished_amount <= 20 + 10 * (handle - 1)
    system.run()
    assert (queue.num_requests, queue.num_tokens) == (0, 0)


def test_a_search_that_has_not_begun_waits_like_any_other_request() -> None:
    system = LocalSystem(SchedulerConfig(max_queued_requests=2, waiting_timeout_s=5.0))
    client = system.open("s")
    for handle in (1, 2, 3):
        system.submit("s", handle, [9] * 20, params(4), beam=BeamOptions(width=2))
    assert client.endings[3].message == "queue: full with 2 requests"
    system.cancel("s", 1)
    system.poll()
    assert client.endings[1].reason == FinishReason.FINISH_REASON_ABORT
    system.submit("s", 4, [9] * 20, params(4), beam=BeamOptions(width=2))
    system.now_s = 5.1
    system.scheduler.tick(5.1)
    system.poll()
    assert client.endings[2].message == client.endings[4].message == "queue: waited for more than 5 s"
    assert not len(system.scheduler.queue)
    system.run()
    system.assert_at_rest()


def test_each_tenant_has_its_own_retry_time() -> None:
    """The other tenant's tokens leave the queue ten times as fast."""
    system, client = system_with(tenant_max_queued_tokens=30)
    for second in range(8):
        system.submit("s", 2 * second, [9] * 20, params(1), tenant="slow")
        for i in range(10):
            system.submit("s", 100 + 10 * second + i, [8] * 20, params(1), tenant="fast")
            system.run()
        system.now_s += 1.0
        system.scheduler.tick(system.now_s)
    system.kill(system.workers[0])
    for handle, tenant in ((200, "slow"), (201, "slow"), (202, "fast"), (203, "fast")):
        system.submit("s", handle, [9] * 20, params(1), tenant=tenant)
    assert client.endings[201].retry_after_s == pytest.approx(10 / 20, rel=0.05)
    assert client.endings[203].retry_after_s == pytest.approx(0.1, rel=0.05), "10 / 200 s, but at least 0.1 s"


def test_the_deadline_order_gives_up_a_request_that_would_be_late() -> None:
    system, client = system_with(build(choose("", {"order": "deadline"}, {"prefill_tokens_per_s": 10})))
    system.kill(system.workers[0])
    system.submit("s", 1, [9] * 40, params(4), deadline_s=5.0)
    system.submit("s", 2, [9] * 40, params(4), deadline_s=3.0)
    system.submit("s", 3, [9] * 40, params(4))
    system.scheduler.tick(0.1)
    system.poll()
    assert client.endings.keys() == {2}
    assert client.endings[2].code == CODE_DEADLINE_EXCEEDED
    assert client.endings[2].message == "deadline_s: 2.9 s are left, which is too little"
    system.scheduler.tick(1.2)
    system.poll()
    assert client.endings.keys() == {1, 2}


def test_waiting_and_running_have_separate_time_limits() -> None:
    system, client = system_with(waiting_timeout_s=5.0, running_timeout_s=7.0)
    system.submit("s", 1, [9] * 4, params(200))
    system.run_for(10)
    system.kill(system.workers[0])
    system.submit("s", 2, [9] * 4, params(4))
    for now_s, ended in ((4.9, set()), (5.1, {2}), (6.9, {2}), (7.2, {2})):
        system.now_s = now_s
        system.scheduler.tick(now_s)
        system.poll()
        assert client.endings.keys() == ended, "the waiting limit does not end a request that has run"
    assert client.endings[2].code == CODE_DEADLINE_EXCEEDED
    assert client.endings[2].message == "queue: waited for more than 5 s"
    system.attach(ToyWorker(block_size=4, num_blocks=64, max_num_seqs=8, max_batched_tokens=64))
    system.run_for(10)
    system.scheduler.tick(7.3)
    system.poll()
    assert client.endings[1].message == "request: ran for more than 7 s"
    system.run()
    system.assert_at_rest()


def test_a_request_beyond_two_time_limits_ends_once() -> None:
    system, client = system_with(waiting_timeout_s=5.0)
    system.kill(system.workers[0])
    system.submit("s", 1, [9] * 4, params(4), deadline_s=5.0)
    system.scheduler.tick(5.1)
    system.poll()
    assert client.endings[1].message == "deadline_s: 5 s are over"
    assert system.scheduler.counters.finished == {"error": 1}


def test_the_running_limit_also_holds_for_a_preempted_request() -> None:
    system, client = system_with(build(choose("vllm-v1-priority")), running_timeout_s=7.0)
    system.submit("s", 1, [9] * 100, params(100), priority=0.0)
    system.run_for(10)
    system.submit("s", 2, [8] * 100, params(100), priority=1.0)
    while not system.scheduler.counters.preempted:
        system.move(*system.moves()[0])
    assert [request.handle for request in system.scheduler.queue] == [1]
    system.scheduler.tick(7.1)
    system.poll()
    assert client.endings[1].message == "request: ran for more than 7 s"


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_the_deadline_order_knows_that_a_sample_is_forked(prefix_caching: bool) -> None:
    """At a hundred tokens a second both requests are in time, because the second one forks from the first."""
    policies = build(choose("", {"order": "deadline"}, {"prefill_tokens_per_s": 100.0}))
    system, client = system_with(policies, prefix_caching=prefix_caching)
    system.submit("s", 1, [9] * 100, params(4), deadline_s=1.5)
    system.submit("s", 2, [9] * 100, params(4), deadline_s=1.5, fork_of=1)
    system.run_for(8)
    system.scheduler.tick(0.6)
    system.poll()
    assert not client.endings
    system.run()
    assert [client.endings[handle].reason for handle in (1, 2)] == [LENGTH, LENGTH]


def test_the_deadline_order_knows_what_is_in_host_memory() -> None:
    policies = build(choose("", {"order": "deadline"}, {"prefill_tokens_per_s": 100.0, "mode": "swap"}))
    system = LocalSystem(SchedulerConfig(), policies)
    system.attach(ToyWorker(block_size=4, num_blocks=64, max_num_seqs=8, max_batched_tokens=256, num_host_blocks=99))
    client = system.open("s")
    for handle in (1, 2):
        system.submit("s", handle, [handle] * 110, params(60), deadline_s=5.0)
    (worker,) = system.scheduler.workers.values()
    while not worker.host.swapped:
        system.move(*system.moves()[0])
    system.scheduler.tick(3.9)
    system.poll()
    assert not client.endings, "a swapped request computes only one token when it resumes"


def test_a_deadline_ends_a_running_request() -> None:
    system, client = system_with()
    system.submit("s", 1, [9] * 4, params(200), deadline_s=3.0)
    system.run_for(20)
    assert client.tokens[1]
    system.scheduler.tick(3.1)
    system.poll()
    assert client.endings[1].code == CODE_DEADLINE_EXCEEDED
    assert client.endings[1].message == "deadline_s: 3 s are over"
    system.run()
    system.assert_at_rest()


class GivesUp(FirstComeFirstServed):
    def hopeless(self, now_s: float) -> Iterator[RequestView]:
        return self.ordered(now_s)


def test_an_order_may_give_up_requests_without_a_deadline() -> None:
    system = LocalSystem(SchedulerConfig(), build(choose("", {"order": f"{__name__}:{GivesUp.__name__}"})))
    client = system.open("s")
    system.submit("s", 1, [9] * 4, params(4))
    system.scheduler.tick(0.1)
    system.poll()
    assert client.endings[1].code == CODE_DEADLINE_EXCEEDED
    assert client.endings[1].message == "queue: the order policy gave up the request"


class ShortPromptsOnly(CapacityPolicy):
    """Admits only prompts of fewer than 10 tokens."""

    def admit(self, step: Step, request: RequestView, need_blocks: int) -> Verdict:
        return Verdict.ADMIT if request.num_prompt_tokens < 10 else Verdict.STOP


def test_a_request_that_no_policy_admits_fails_and_the_others_go_on() -> None:
    policies = build(choose("", {"capacity": f"{__name__}:{ShortPromptsOnly.__name__}"}))
    system, client = system_with(policies, stuck_decisions=5)
    system.submit("s", 1, [9] * 12, params(4))
    system.submit("s", 2, [9] * 5, params(4))
    for _ in range(20):
        system.run()
        system.poll()
    ending = client.endings[1]
    assert ending.code == CODE_INTERNAL  # nothing is wrong with the request
    assert ending.message.startswith("capacity: no progress is possible for this request")
    error = from_scheduler(ending.code, ending.message, ending.field, ending.retry_after_s)
    assert (error.status, error.type) == (500, "InternalServerError")
    assert client.tokens[2] == expected_output([9] * 5, params(4))
    system.assert_at_rest()


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("prompt_len", [1, 8, 63, 64])
def test_a_request_that_just_fits_the_pool_runs_under_every_preset(preset: str, prompt_len: int) -> None:
    """The last token is never computed, so prompt and output may have one token more than the pool holds."""
    system = LocalSystem(SchedulerConfig(stuck_decisions=5), build(choose(preset)))
    system.attach(ToyWorker(block_size=4, num_blocks=16, max_num_seqs=8, max_batched_tokens=64))
    client = system.open("s")
    system.submit("s", 1, [9] * prompt_len, params(65 - prompt_len))
    system.submit("s", 2, [9] * prompt_len, params(66 - prompt_len))
    for _ in range(20):
        system.run()
        system.poll()
    assert client.tokens[1] == expected_output([9] * prompt_len, params(65 - prompt_len))
    assert client.endings[2].code == CODE_INVALID_ARGUMENT
    assert "pool of 64 tokens" in client.endings[2].message
    system.assert_at_rest()


def test_explain_names_the_blocks_that_a_request_needs_to_its_end() -> None:
    system = LocalSystem(SchedulerConfig(), build(choose("trtllm-no-evict")))
    system.attach(ToyWorker(block_size=4, num_blocks=16, max_num_seqs=8, max_batched_tokens=64))
    system.open("s")
    for handle in (1, 2):
        system.submit("s", handle, [handle] * 8, params(40))
    system.run_for(10)
    spans = system.scheduler.timeline.explain("s-2", system.now_s)
    assert spans is not None
    # The other request has 3 blocks, for 9 tokens.
    assert "needs 2 blocks, 13 are available; it may need 12 until its end" in [span.detail for span in spans]


def test_a_tenant_s_tokens_are_those_of_its_running_requests() -> None:
    system = LocalSystem(SchedulerConfig())
    system.attach(ToyWorker(block_size=4, num_blocks=64, max_num_seqs=8, max_batched_tokens=64))
    client = system.open("s")
    for handle, length in ((1, 4), (2, 40)):
        system.submit("s", handle, [handle] * 8, params(length))
    while len(client.tokens.get(1, [])) < 4:
        system.move(*system.moves()[0])
    assert [*system.scheduler.life.budgets.online.tenant_tokens.values()] == [48], "the other one still runs"
    system.run()
    assert not system.scheduler.life.budgets.online.tenant_tokens


def test_refused_clients_get_retry_times_one_after_another() -> None:
    budgets = Budgets(SchedulerConfig())
    assert budgets.retry_after_s(10, 10, 0.0) == 1.0, "no rate has been measured"
    budgets.measure(0.0)
    budgets._estimate(None, 0.0).finished(amount=200)
    budgets.measure(10.0)  # 20 tokens a second
    told = [budgets.retry_after_s(10, 10, 10.0) for _ in range(4)]
    assert told == pytest.approx([0.5, 1.0, 1.5, 2.0])
    for _ in range(1000):
        last_s = budgets.retry_after_s(10, 10, 10.0)
    assert 30 <= last_s <= 60, "OpenAI's clients ignore times above a minute"
    assert budgets.retry_after_s(10, 10, 100.0) == pytest.approx(0.5), "no client is expected any more"


def test_the_rate_counts_seconds_without_a_departure_while_a_request_waits() -> None:
    """A request of 10 tokens leaves every fifth second. So the rate is 2 tokens a second, not 10."""
    budgets = Budgets(SchedulerConfig())
    budgets.measure(0.0, ["a"])
    for second in range(1, 101):
        for name in ("a", None) if second % 5 == 0 else ():
            budgets._estimate(name, 0.0).finished(amount=10)
        budgets.measure(float(second), ["a"])
    assert budgets.retry_after_s(10, 10, 100.0) == pytest.approx(5.0, rel=0.5)
    assert budgets.retry_after_s(10, 10, 100.0, "a") == pytest.approx(5.0, rel=0.5)
    for second in range(101, 201):
        budgets.measure(float(second), [])
    assert budgets.retry_after_s(10, 10, 200.0, "a") == pytest.approx(5.0, rel=0.5), "no request was waiting"


def test_with_a_full_queue_the_scheduler_is_not_ready() -> None:
    system, _ = system_with(max_queued_requests=1)
    system.submit("s", 1, [9], params(4))
    assert system.scheduler._status.now(None).full
    assert not system.scheduler._status.now(None).ready
    system.run()
    assert system.scheduler._status.now(None).ready


def test_the_smallest_limit_of_a_tenant_is_one_token() -> None:
    assert Budgets(SchedulerConfig(tenant_max_running_tokens=1)).limits_tenants
    assert not Budgets(SchedulerConfig()).limits_tenants
