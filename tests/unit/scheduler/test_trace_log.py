"""What the scheduler notes for a trace: nothing without a reader; with a reader, each step and exchange once."""

from __future__ import annotations

import pytest

from paceline.v1.common_pb2 import SamplingParams
from paceline.v1.live_pb2 import TracedRun
from paceline.v1.worker_pb2 import StepPlan, StepResult, WorkerServiceLinkResponse
from scheduler_svc.core.step import trace_log
from scheduler_svc.core.step.trace_log import TraceLog
from simulator.system import LocalSystem
from simulator.toy_worker import ToyWorker

PARAMS = SamplingParams(top_p=1.0, max_tokens=4, seed=1, ignore_eos=True)


class TracedWorker(ToyWorker):
    """Puts fixed times into the result of a plan that asks for times: received at 5 us, sent at 9 us."""

    num_traced = num_plans = 0

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        self.num_plans += 1
        if plan.traced:
            self.num_traced += 1
            result.received_us, result.sent_us = 5, 9
        return result


def system_with_worker() -> tuple[LocalSystem, TracedWorker]:
    system, worker = LocalSystem(), TracedWorker(block_size=4, num_blocks=64, max_num_seqs=4, max_batched_tokens=8)
    system.open("s")
    system.attach(worker)
    return system, worker


def test_nothing_is_noted_or_asked_without_a_reader() -> None:
    system, worker = system_with_worker()
    log = system.scheduler.trace_log
    system.submit("s", 1, list(range(10)), PARAMS)
    system.run()
    assert worker.num_plans
    assert not worker.num_traced
    with log.reading() as seen:
        assert log.since(seen)[1:] == ([], [], [], 0)


def test_a_reader_gets_each_step_and_exchange_once() -> None:
    system, worker = system_with_worker()
    log = system.scheduler.trace_log
    with log.reading() as seen:
        system.submit("s", 1, list(range(10)), PARAMS)
        system.run()
        seen, steps, exchanges, _, num_missed = log.since(seen)
        assert (len(steps), num_missed) == (5, 0)
        assert worker.num_traced == worker.num_plans == 5
        assert [(one.received_us, one.result_sent_us) for one in steps] == [(5, 9)] * 5
        assert [one.step for one in steps] == [1, 2, 3, 4, 5]
        assert all(one.planned_us <= one.sent_us <= one.ended_us for one in steps)
        assert exchanges
        assert all(one.sent_us <= one.ended_us and one.num_ops for one in exchanges)
        assert log.since(seen)[1:] == ([], [], [], 0)
    system.submit("s", 2, list(range(10)), PARAMS)
    system.run()
    assert worker.num_traced == 5


def test_a_slow_reader_misses_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_log, "MAX_KEPT", 3)
    log = TraceLog()
    with log.reading() as seen:
        for number in range(5):
            log.ran("tick", number, number, number, 0, 0)
        _, _, _, runs, num_missed = log.since(seen)
        assert ([one.began_us for one in runs], num_missed) == ([2_000_000, 3_000_000, 4_000_000], 2)


def test_a_run_is_noted_with_all_its_fields_and_kept_until_the_last_reader_leaves() -> None:
    log = TraceLog()
    with log.reading() as seen:
        with log.reading():
            log.ran("tick", 1, 2, 3, 4, 5)
        _, _, _, runs, _ = log.since(seen)
        expected = TracedRun(
            event="tick", began_us=1_000_000, applied_us=2_000_000, ended_us=3_000_000, num_plans=4, num_exchanges=5
        )
        assert runs == [expected]
    assert not log._runs.items


def test_only_a_message_with_a_plan_asks_the_worker_for_its_times() -> None:
    log, plan, other = TraceLog(), WorkerServiceLinkResponse(plan=StepPlan(step=1)), WorkerServiceLinkResponse()
    log.plan_sent(plan)
    log.plan_sent(other)
    assert plan.plan.traced
    assert not other.HasField("plan")
