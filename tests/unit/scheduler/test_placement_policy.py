"""Placement as a plug-in decision: what a policy sees, what it may answer, and what its mistakes cost."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

import pytest

from paceline.v1.common_pb2 import SamplingParams
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.step import schedule
from scheduler_svc.core.step.placement import Placement
from scheduler_svc.policies.api import FleetView, PlacementPolicy, RequestView, WorkerView
from scheduler_svc.policies.registry import build, choose
from simulator.system import LocalSystem
from tests.unit.scheduler.test_placement import Recorder, submit_at_once


class LastWorker(PlacementPolicy):
    """Places each request on the last worker with room, and notes what it sees."""

    def __init__(self) -> None:
        self.fleets: list[FleetView] = []
        self.seen: list[tuple[str, list[tuple[int, int, int, int]]]] = []
        self.bound_to: list[tuple[str, int]] = []

    def begin(self, fleet: FleetView) -> None:
        self.fleets.append(fleet)
        self.seen.clear()

    def place(self, request: RequestView, workers: Sequence[WorkerView], full: Sequence[WorkerView]) -> WorkerView:
        views = [(w.id, w.num_rows, w.queued_prefill_tokens, w.cached_tokens(request)) for w in workers]
        self.seen.append((request.request_id, views))
        return workers[-1]

    def bound(self, request: RequestView, worker_id: int) -> str:
        self.bound_to.append((request.request_id, worker_id))
        return "it is the last one"


def system_with(policy: PlacementPolicy, workers: Sequence[Recorder], errors: list[Exception]) -> LocalSystem:
    policies = dataclasses.replace(build(choose()), placement=policy)
    system = LocalSystem(policies=policies, on_policy_error=errors.append)
    for worker in workers:
        system.attach(worker)
    system.open("s", window=1 << 20)
    return system


def let_in(worker: Recorder) -> list[str]:
    return [name for names in worker.let_in for name in names]


def test_a_policy_decides_which_worker_runs_a_request() -> None:
    policy, workers = LastWorker(), [Recorder(), Recorder(max_num_seqs=3)]
    system = system_with(policy, workers, [])
    submit_at_once(system, [[9 + i] * 4 for i in range(5)], max_tokens=50)
    system.run()
    assert [let_in(worker) for worker in workers] == [["4", "5"], ["1", "2", "3"]], "3 slots, then the other worker"
    assert sorted(policy.bound_to) == [("1", 2), ("2", 2), ("3", 2), ("4", 1), ("5", 1)]
    spans = system.scheduler.timeline.explain("1", system.now_s)
    assert spans is not None
    assert [span.detail for span in spans if span.reason == "running"] == ["on worker 2: it is the last one"]
    system.assert_at_rest()


def test_a_prefix_that_an_earlier_request_of_the_round_computes_counts_as_cached() -> None:
    seen: dict[str, list[tuple[int, int, int, int]]] = {}

    class Notes(LastWorker):
        def place(self, request: RequestView, workers: Sequence[WorkerView], full: Sequence[WorkerView]) -> WorkerView:
            chosen = super().place(request, workers, full)
            seen.setdefault(request.request_id, self.seen[-1][1])
            return chosen

    workers = [Recorder(max_batched_tokens=256), Recorder(max_batched_tokens=256)]
    system = system_with(Notes(), workers, [])
    shared = [100 + i for i in range(40)]
    submit_at_once(system, [[*shared, 5, 6], [*shared, 7, 8], [9] * 10])
    system.run()
    assert seen["1"] == [(1, 0, 0, 0), (2, 0, 0, 0)]
    assert seen["2"] == [(1, 0, 0, 0), (2, 1, 42, 40)], "ten blocks of four tokens are computed ahead of it"
    assert seen["3"] == [(1, 0, 0, 0), (2, 2, 44, 0)]


def test_a_request_may_wait_for_a_full_worker_and_for_no_other_one() -> None:
    class WaitsForTheFirst(LastWorker):
        def place(self, request: RequestView, workers: Sequence[WorkerView], full: Sequence[WorkerView]) -> WorkerView:
            return min([*workers, *full], key=lambda worker: worker.id)

    workers = [Recorder(max_num_seqs=2), Recorder()]
    system = system_with(WaitsForTheFirst(), workers, [])
    submit_at_once(system, [[9 + i] * 4 for i in range(6)])
    system.run()
    assert [let_in(worker) for worker in workers] == [["1", "2", "3", "4", "5", "6"], []]
    system.assert_at_rest()


def test_placements_per_request_do_not_grow_with_the_number_of_workers() -> None:
    asked = Counter[str]()

    class GoesRound(LastWorker):
        def place(self, request: RequestView, workers: Sequence[WorkerView], full: Sequence[WorkerView]) -> WorkerView:
            asked[request.request_id] += 1
            return min(workers, key=lambda worker: worker.num_rows)

    workers = [Recorder() for _ in range(12)]
    system = system_with(GoesRound(), workers, [])
    submit_at_once(system, [[9 + i] * 8 for i in range(150)])
    system.run()
    assert all(let_in(worker) for worker in workers)
    assert len(asked) == 150
    assert max(asked.values()) <= 3, "once in each round in which it is looked at"
    assert sum(asked.values()) < 2 * 150
    system.assert_at_rest()


def test_the_warmest_workers_and_others_in_turn_are_compared() -> None:
    class ComparesFour(LastWorker):
        max_compared = 4
        compared: ClassVar[list[list[tuple[int, int]]]] = []

        def place(self, request: RequestView, workers: Sequence[WorkerView], full: Sequence[WorkerView]) -> WorkerView:
            self.compared.append([(worker.id, worker.matched_tokens(request)) for worker in workers])
            return max(workers, key=lambda worker: (worker.matched_tokens(request), -worker.num_rows))

    policy = ComparesFour()
    system = system_with(policy, [Recorder() for _ in range(20)], [])
    shared = [100 + i for i in range(40)]
    submit_at_once(system, [shared])
    system.run()
    policy.compared.clear()
    submit_at_once(system, [[*shared, 5, 6 + i] for i in range(2)] + [[9 + i] * 8 for i in range(30)], first=2)
    system.run()
    assert all(len(workers) == 4 for workers in policy.compared)
    warm = [workers for workers in policy.compared if any(tokens for _, tokens in workers)]
    assert len(warm) >= 2, "a warm worker is always compared"
    assert {number for workers in policy.compared for number, _ in workers} == set(range(1, 21)), "no worker is missing"
    system.assert_at_rest()


def test_a_burst_is_placed_in_parts_so_that_other_messages_are_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "MAX_PLACEMENTS", 10)
    asked = list[str]()

    class Asked(LastWorker):
        def place(self, request: RequestView, workers: Sequence[WorkerView], full: Sequence[WorkerView]) -> WorkerView:
            asked.append(request.request_id)
            return super().place(request, workers, full)

    workers = [Recorder(), Recorder(), Recorder()]
    system = system_with(Asked(), workers, [])
    submit_at_once(system, [[9 + i] * 4 for i in range(60)])
    counts = [len(asked)]
    while not system.run_for(1):
        counts.append(len(asked))
    assert max(later - earlier for earlier, later in itertools.pairwise([0, *counts])) == 10
    assert sorted(int(name) for worker in workers for name in let_in(worker)) == list(range(1, 61))
    system.assert_at_rest()


def test_requests_placed_on_a_worker_that_leaves_are_placed_again() -> None:
    policies = dataclasses.replace(build(choose()), placement=(policy := LastWorker()))
    system = LocalSystem(policies=policies)
    first, last = Recorder(), Recorder(max_batched_tokens=8)
    system.attach(first)
    end = system.attach(last)
    system.open("s", window=1 << 20)
    submit_at_once(system, [[9 + i] * 8 for i in range(6)])
    while not policy.bound_to:
        system.run_for(1)
    assert policy.bound_to == [("1", 2)], "its step takes one"
    system.kill(end)
    system.run()
    assert sorted(let_in(first)) == ["1", "2", "3", "4", "5", "6"]
    system.assert_at_rest()


class Raises(LastWorker):
    def place(self, request: RequestView, workers: Sequence[WorkerView], full: Sequence[WorkerView]) -> WorkerView:
        raise ZeroDivisionError("division by zero")


class NamesNone(LastWorker):
    def place(self, request: RequestView, workers: Sequence[WorkerView], full: Sequence[WorkerView]) -> WorkerView:
        return None  # type: ignore[return-value]


class NamesAViewOfItsOwn(LastWorker):
    def place(self, request: RequestView, workers: Sequence[WorkerView], full: Sequence[WorkerView]) -> WorkerView:
        return WorkerView(workers[0]._worker)


@pytest.mark.parametrize("policy", [Raises, NamesNone, NamesAViewOfItsOwn])
def test_a_policy_that_fails_is_counted_and_costs_no_request(policy: type[LastWorker]) -> None:
    errors: list[Exception] = []
    workers = [Recorder(), Recorder()]
    system = system_with(policy(), workers, errors)
    submit_at_once(system, [[9 + i] * 4 for i in range(6)])
    system.run()
    assert sorted(let_in(workers[0]) + let_in(workers[1])) == ["1", "2", "3", "4", "5", "6"]
    assert let_in(workers[0]), "the default policy places them on both"
    assert let_in(workers[1])
    assert len(errors) == system.scheduler.counters.policy_errors > 0
    system.assert_at_rest()


def test_a_policy_is_not_asked_while_one_worker_is_attached() -> None:
    errors: list[Exception] = []
    policy = Raises()
    system = system_with(policy, [Recorder()], errors)
    submit_at_once(system, [[9] * 4])
    system.run()
    assert not errors
    assert not policy.fleets


def test_prefix_first_is_a_choice_by_name() -> None:
    policies = build(choose("", {"placement": "prefix-first"}, {"row_cost_tokens": 3}))
    assert policies.placement.row_cost_tokens == 3  # type: ignore[attr-defined]


def test_a_round_is_over_when_a_worker_schedules_for_the_second_time() -> None:
    system = LocalSystem()
    for worker in (Recorder(), Recorder()):
        system.attach(worker)
    first, second = system.scheduler.workers.values()
    placement = Placement([first, second], LastWorker())
    assert [placement.turn_of(worker) for worker in (first, second, first)] == [True, True, False]


def test_a_worker_that_was_sent_a_step_in_the_round_is_looked_at_again() -> None:
    system = LocalSystem()
    for worker in (Recorder(), Recorder()):
        system.attach(worker)
    first, second = system.scheduler.workers.values()
    first.available_blocks = second.available_blocks = 400
    placement = Placement([first, second], LastWorker())
    assert placement.place(request_of(1)) is second
    second.steps_sent += 1
    second.available_blocks = 0
    assert placement.place(request_of(2)) is first, "the step took all blocks"


def request_of(number: int) -> Request:
    return Request(number, "s", number, str(number), bytes(16), bytearray(), SamplingParams(max_tokens=4), 0.0)
