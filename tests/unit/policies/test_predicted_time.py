"""Placement by predicted time, alone: what a request costs on each worker, and when a prefix is copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from scheduler_svc.core.policy.worker_view import FleetView, WorkerView
from scheduler_svc.core.requests.request import RequestView
from scheduler_svc.core.workers.step_time import StepTime
from scheduler_svc.policies.placement.predicted_time import MAX_PREFIXES, PredictedTime

BLOCK = 16
SPEED = StepTime(base_s=5e-3, token_s=2e-5, context_s=3e-8, row_s=1e-5)
SHARED = 1500


@dataclass
class FakeWorker:
    """A WorkerView of given load. `cached`: tokens of any request that are cached here."""

    id: int
    cached: int = 0
    num_rows: int = 0
    queued_prefill_tokens: int = 0
    step_time: StepTime = SPEED
    in_flight_s: float = 0.0
    block_size: int = BLOCK
    max_batched_tokens: int = 8192
    context_per_row: int = 1500

    @property
    def context_tokens(self) -> int:
        return self.num_rows * self.context_per_row

    def cached_tokens(self, request: object) -> int:
        return self.cached


@dataclass
class FakeRequest:
    arrival_index: int
    num_tokens: int = SHARED + 8
    max_new_tokens: int = 96
    num_output_tokens: int = 0
    ignores_eos: bool = True
    namespace: tuple[str, str] = ("", "")
    token_ids: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        self.token_ids = self.token_ids or bytes(4 * self.num_tokens)


@dataclass
class Fleet:
    workers: Sequence[FakeWorker]
    mean_output_tokens: float | None = None


class Rounds:
    """Places and binds requests one by one, each in its own round."""

    def __init__(self, *workers: FakeWorker, mean_output_tokens: float | None = None) -> None:
        self.workers = workers
        self.policy = PredictedTime()
        self.fleet = Fleet(workers, mean_output_tokens)
        self.count = 0
        self.said = ""

    def place(self, **fields: object) -> int:
        self.count += 1
        request = cast(RequestView, FakeRequest(self.count, **fields))  # type: ignore[arg-type]
        self.policy.begin(cast(FleetView, self.fleet))
        chosen = self.policy.place(request, cast(Sequence[WorkerView], self.workers), ())
        self.said = self.policy.bound(request, chosen.id)
        return chosen.id


def test_equal_idle_workers_take_turns() -> None:
    rounds = Rounds(FakeWorker(1), FakeWorker(2), FakeWorker(3))
    assert [rounds.place() for _ in range(6)] == [1, 2, 3, 1, 2, 3]


def test_fits_that_differ_by_noise_take_turns_too() -> None:
    rounds = Rounds(FakeWorker(1), FakeWorker(2, step_time=StepTime(*(1.01 * value for value in SPEED))))
    assert [rounds.place() for _ in range(4)] == [1, 2, 1, 2]


def test_a_prefix_is_worth_the_prefill_that_it_saves() -> None:
    """1,500 tokens save 30 ms. Rows that slow 96 steps by more than that send the request elsewhere."""
    assert Rounds(FakeWorker(1, cached=SHARED, num_rows=1), FakeWorker(2)).place() == 1
    assert Rounds(FakeWorker(1, cached=SHARED, num_rows=40), FakeWorker(2)).place() == 2


def test_queued_prefill_counts_at_the_workers_own_rate() -> None:
    assert Rounds(FakeWorker(1, queued_prefill_tokens=4000), FakeWorker(2)).place() == 2
    slow = StepTime(*(4 * value for value in SPEED))
    assert Rounds(FakeWorker(1, queued_prefill_tokens=4000), FakeWorker(2, step_time=slow)).place() == 1


def test_a_faster_worker_gets_more_until_it_is_no_faster() -> None:
    fast = StepTime(*(value / 2 for value in SPEED))
    slow, quick = FakeWorker(1), FakeWorker(2, step_time=fast)
    rounds = Rounds(slow, quick)
    for _ in range(300):
        next(worker for worker in (slow, quick) if worker.id == rounds.place()).num_rows += 1
    assert quick.num_rows > 1.3 * slow.num_rows > 0


def test_a_short_answer_goes_where_it_begins_sooner_and_a_long_one_where_it_runs_faster() -> None:
    """Worker 1 has a long prompt ahead and few rows, worker 2 the other way round."""
    workers = FakeWorker(1, queued_prefill_tokens=4000), FakeWorker(2, num_rows=40)
    assert Rounds(*workers).place(max_new_tokens=1, num_tokens=16) == 2
    assert Rounds(*workers).place(max_new_tokens=2000, num_tokens=16) == 1


def test_the_mean_output_of_ended_requests_bounds_max_new_tokens_unless_eos_is_ignored() -> None:
    workers = FakeWorker(1, queued_prefill_tokens=4000), FakeWorker(2, num_rows=40)
    assert Rounds(*workers, mean_output_tokens=2.0).place(max_new_tokens=2000, num_tokens=16, ignores_eos=False) == 2
    assert Rounds(*workers, mean_output_tokens=2.0).place(max_new_tokens=2000, num_tokens=16, ignores_eos=True) == 1


def test_a_prefix_that_many_follow_is_copied() -> None:
    warm, cold = FakeWorker(1, cached=SHARED, num_rows=1), FakeWorker(2)
    rounds = Rounds(warm, cold)
    placed: list[int] = []
    while not placed or placed[-1] == 1:
        placed.append(rounds.place())
        assert len(placed) < 20
    assert len(placed) > 2, "one request alone does not pay for a copy"
    assert "makes a copy of a prefix of 1488 tokens" in rounds.said
    assert rounds.place() == 1, "after the copy the sum starts again at zero"


def test_a_prefix_is_copied_even_where_each_request_runs_alone() -> None:
    rounds = Rounds(FakeWorker(1, cached=SHARED), FakeWorker(2))
    placed = [rounds.place() for _ in range(30)]
    assert 9 <= placed.index(2) <= 11, "each request adds 1/20 of a copy, and an idle worker copies at half of one"
    assert 2 <= placed.count(2) <= 3, "after each copy the sum starts again at zero"


def test_a_worker_without_rows_copies_a_prefix_earlier_than_a_worker_with_rows() -> None:
    """The two workers differ in nothing but the cached prefix, so each request adds only 1/20 of a copy."""

    def requests_before_the_copy(num_rows: int) -> int:
        rounds = Rounds(FakeWorker(1, cached=SHARED, num_rows=num_rows), FakeWorker(2, num_rows=num_rows))
        return [rounds.place() for _ in range(30)].index(2)

    assert 9 <= requests_before_the_copy(0) <= 11
    assert 18 <= requests_before_the_copy(1) <= 22


def test_each_prefix_has_its_own_sum_of_lost_time() -> None:
    """For example, each turn of a conversation has a longer prefix, which no other request has."""
    warm, cold = FakeWorker(1, cached=SHARED, num_rows=1), FakeWorker(2)
    rounds = Rounds(warm, cold)
    for turn in range(40):
        warm.cached = SHARED + 100 * turn
        assert rounds.place(num_tokens=warm.cached + 50) == 1
    warm.cached = SHARED
    tenants = [rounds.place(namespace=("", f"salt {i}")) for i in range(40)]
    assert tenants == [1] * 40


def test_a_burst_of_one_prefix_copies_within_its_round() -> None:
    """Nothing is bound between the placements of a round, and still the sum counts."""
    warm, cold = FakeWorker(1, cached=SHARED, num_rows=1), FakeWorker(2)
    rounds = Rounds(warm, cold)
    rounds.policy.begin(cast(FleetView, rounds.fleet))
    workers = cast(Sequence[WorkerView], rounds.workers)
    placed = [rounds.policy.place(cast(RequestView, FakeRequest(i)), workers, ()).id for i in range(10)]
    assert 2 in placed
    rounds.policy.begin(cast(FleetView, rounds.fleet))
    again = [rounds.policy.place(cast(RequestView, FakeRequest(i)), workers, ()).id for i in range(10)]
    assert again == placed, "a round leaves nothing behind"


def test_a_slow_model_copies_as_a_fast_one_does() -> None:
    def burst(slower: float) -> list[int]:
        speed = StepTime(*(slower * seconds for seconds in SPEED))
        warm, cold = FakeWorker(1, cached=SHARED, step_time=speed), FakeWorker(2, step_time=speed)
        placed = []
        for _ in range(40):
            rounds = Rounds(warm, cold)
            placed.append(rounds.place(max_new_tokens=48))
            (warm if placed[-1] == 1 else cold).num_rows += 1
        return placed

    assert set(burst(1)) == {1, 2}
    assert burst(20) == burst(1)


def test_a_placement_reason_names_the_next_best_workers() -> None:
    rounds = Rounds(
        FakeWorker(1, cached=SHARED, num_rows=1), FakeWorker(2), FakeWorker(3), FakeWorker(4), FakeWorker(5)
    )
    assert rounds.place() == 1
    said = rounds.said
    assert said.startswith("predicted: first token after 0.005 s, cost 0.5")
    assert said.count("; worker ") == 3, "the three next best workers"
    assert rounds.policy.bound(cast(RequestView, FakeRequest(99)), 1) == "", "the policy did not place this request"


def test_the_policys_memory_is_bounded() -> None:
    rounds = Rounds(FakeWorker(1, cached=SHARED, num_rows=1), FakeWorker(2))
    for i in range(MAX_PREFIXES + 10):
        rounds.place(namespace=("", str(i)))
    assert len(rounds.policy._lost_s) == MAX_PREFIXES
