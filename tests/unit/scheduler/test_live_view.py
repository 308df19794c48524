"""What the scheduler shows of itself: its steps while there is a reader, and snapshots that agree with its counters."""

from __future__ import annotations

import grpc
import pytest

from paceline.v1.common_pb2 import SamplingParams
from paceline.v1.live_pb2 import WatchRequest
from scheduler_svc.admin import Admin
from scheduler_svc.core.cache import namespaces
from scheduler_svc.core.step import step_log
from scheduler_svc.live_view import MAX_TENANTS, LiveView, snapshot
from scheduler_svc.policies.registry import choose
from simulator.system import LocalSystem
from simulator.toy_worker import ToyWorker
from tests.unit.scheduler.test_admin import Aborted, Context

PARAMS = SamplingParams(top_p=1.0, max_tokens=4, seed=1, ignore_eos=True)
UNIX_S = 1000.0


def system_with_worker() -> LocalSystem:
    system = LocalSystem()
    system.open("s")
    system.attach(ToyWorker(block_size=4, num_blocks=64, max_num_seqs=4, max_batched_tokens=8))
    return system


def test_steps_are_noted_only_while_they_are_read() -> None:
    system = system_with_worker()
    log = system.scheduler.step_log
    system.submit("s", 1, list(range(10)), PARAMS)
    system.run()
    assert log.num_steps == 0
    with log.reading(), log.reading():
        system.submit("s", 2, list(range(20, 30)), PARAMS)
        system.run()
        steps = log.since(0)
        assert len(steps) == log.num_steps == 5
        assert [(step.num_prefills, step.num_decodes, step.new_tokens) for step in steps[:3]] == [
            (1, 0, 8),
            (1, 0, 2),
            (0, 1, 0),
        ]
        assert log.since(4) == steps[4:]
        assert log.since(5) == []
        assert all(step.planned_s <= step.sent_s <= step.ended_s for step in steps)
    assert log.since(0) == []
    system.submit("s", 3, list(range(10)), PARAMS)
    system.run()
    assert log.num_steps == 5


def test_a_slow_reader_misses_the_oldest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_log, "MAX_STEPS", 3)
    system = system_with_worker()
    log = system.scheduler.step_log
    log.__init__()  # type: ignore[misc]  # with the smaller limit
    with log.reading():
        system.submit("s", 1, list(range(10)), PARAMS)
        system.run()
        assert log.num_steps == 5
        assert len(log.since(0)) == 3
        assert len(log.since(3)) == 2


def test_a_snapshot_agrees_with_the_core() -> None:
    system = system_with_worker()
    core = system.scheduler
    with core.step_log.reading():
        for handle in range(1, 7):
            system.submit("s", handle, list(range(10 * handle, 10 * handle + 10)), PARAMS, tenant=f"t{handle % 2}")
        while core.counters.tokens < 6:
            system.move(*system.moves()[0])
        policies = Admin(core, choose()).policies
        steps = core.step_log.since(0)
        shown = snapshot(core, policies, steps, system.now_s, UNIX_S)
    [worker] = shown.workers
    assert (shown.load, shown.policies) == (core.load(system.now_s), policies)
    assert shown.at_s == system.now_s + UNIX_S
    assert (worker.num_running, worker.num_slots) == (shown.load.num_running, 4)
    assert worker.num_blocks - worker.num_available_blocks == shown.load.num_used_blocks
    assert shown.num_generated_tokens == core.counters.tokens
    assert shown.cache_connected
    assert not shown.failed_policies
    assert {tenant.tenant for tenant in shown.tenants} == {"t0", "t1"}
    assert sum(tenant.waiting_tokens for tenant in shown.tenants) == shown.load.num_waiting_tokens
    assert [step.step for step in shown.steps] == [step.step for step in steps]
    assert shown.steps[0].ended_s == steps[0].ended_s + UNIX_S


def test_a_snapshot_shows_the_largest_tenants() -> None:
    system = LocalSystem()
    system.open("s")
    for handle in range(1, MAX_TENANTS + 9):
        system.submit("s", handle, list(range(handle)), PARAMS, tenant=f"t{handle}")
    shown = snapshot(system.scheduler, Admin(system.scheduler, choose()).policies, [], 0.0, 0.0)
    assert shown.num_tenants == MAX_TENANTS + 8
    assert [tenant.waiting_tokens for tenant in shown.tenants] == list(range(MAX_TENANTS + 8, 8, -1))


@pytest.mark.parametrize("interval_ms", [1, 99, 10_001])
async def test_an_interval_out_of_range_is_refused(interval_ms: int) -> None:
    core = LocalSystem().scheduler
    view = LiveView(core, Admin(core, choose()), lambda: 0.0)
    with pytest.raises(Aborted) as aborted:
        await anext(view.Watch(WatchRequest(interval_ms=interval_ms), Context()))  # type: ignore[arg-type]
    assert aborted.value.args[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert core.step_log.num_readers == 0


async def test_each_watcher_gets_each_step_once() -> None:
    system = system_with_worker()
    view = LiveView(system.scheduler, Admin(system.scheduler, choose()), lambda: 0.5)
    one, other = (
        view.Watch(WatchRequest(interval_ms=100), Context())  # type: ignore[arg-type]
        for _ in range(2)
    )
    await anext(one), await anext(other)
    system.submit("s", 1, list(range(10)), PARAMS)
    system.run()
    for watcher in (one, other):
        told = await anext(watcher)
        assert (len(told.steps), told.num_missed_steps, told.core_s) == (5, 0, 0.5)
        assert not (await anext(watcher)).steps
        await watcher.aclose()  # type: ignore[attr-defined]
    assert system.scheduler.step_log.num_readers == 0


async def test_a_watcher_is_told_the_tenants_of_new_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "MAX_OWNERS", 2)
    system = system_with_worker()
    names = system.scheduler.namespaces
    watcher = LiveView(system.scheduler, Admin(system.scheduler, choose()), lambda: 0.0).Watch(
        WatchRequest(interval_ms=100),
        Context(),  # type: ignore[arg-type]
    )

    async def told() -> list[tuple[str, str]]:
        return [(one.namespace, one.tenant) for one in (await anext(watcher)).namespaces]

    for handle, tenant in enumerate(("", "t1", "t2", "t3", "t2"), 1):
        system.submit("s", handle, [handle] * 5, PARAMS, tenant=tenant)
    assert await told() == [(names.name(tenant, "")[:16], tenant) for tenant in ("t2", "t3")]
    system.submit("s", 9, [9] * 5, PARAMS, tenant="t3", cache_salt="salt")
    assert await told() == [(names.name("t3", "salt")[:16], "t3")]
    assert await told() == []
    await watcher.aclose()  # type: ignore[attr-defined]


def test_a_timeline_has_what_the_first_admission_found() -> None:
    system = system_with_worker()
    for handle in (1, 2):
        system.submit("s", handle, list(range(10)), PARAMS)
        system.run()
    timeline = system.scheduler.timeline
    [first], [second] = timeline.find("s-1"), timeline.find("s-2")
    assert first.prefix is not None
    assert second.prefix is not None
    assert (first.prefix.num_tokens, first.prefix.num_cached_tokens) == (10, 0)
    assert [(one.reason, one.num_tokens) for one in first.prefix.missed()] == [("new", 8), ("block_border", 2)]
    assert [(one.reason, one.num_tokens) for one in second.prefix.missed()] == [
        ("block_border", 10 - second.prefix.num_cached_tokens)
    ]
