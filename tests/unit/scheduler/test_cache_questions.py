"""When the scheduler sends operations to the cache: as rarely as the decisions allow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.v1.cache_pb2 import CacheOp
from paceline.v1.common_pb2 import SamplingParams
from scheduler_svc.core.cache import link
from scheduler_svc.core.requests.phases import Phase
from scheduler_svc.core.step.exchange import StepExchanges
from scheduler_svc.core.types import SchedulerConfig
from simulator.system import LocalSystem
from simulator.toy_worker import ToyWorker


def operations(num_requests: int, max_tokens: int, max_batched_tokens: int) -> list[list[CacheOp]]:
    """The operations of each exchange, for requests of three blocks each, on a worker with one step in flight."""
    system = LocalSystem(SchedulerConfig(window=1))
    system.open("s")
    for handle in range(1, num_requests + 1):
        sampling = SamplingParams(top_p=1.0, max_tokens=max_tokens, seed=1, ignore_eos=True)
        system.submit("s", handle, [handle, *range(10, 21)], sampling)
    system.attach(ToyWorker(block_size=4, num_blocks=64, max_num_seqs=8, max_batched_tokens=max_batched_tokens))
    seen = []
    while moves := system.moves():
        if moves[0][0] == "exchange":
            seen.append(list(system.to_cache[0].ops))
        system.move(*moves[0])
    system.assert_at_rest()
    return seen


def exchanges(max_tokens: int) -> list[list[str]]:
    """The operation names of each exchange, from the first that admits. Each step admits one of four requests."""
    seen = [[str(op.WhichOneof("op")) for op in ops] for ops in operations(4, max_tokens, 12)]
    first = next(number for number, ops in enumerate(seen) if "admit" in ops)
    return seen[first:]


def test_candidates_are_matched_again_in_the_exchange_after_an_admission() -> None:
    """No request ends for a while, so the next step is scheduled with the answer to that exchange."""
    answered = ["commit", "rematch"]
    assert exchanges(max_tokens=64)[:4] == [["admit"], answered, ["extend", "admit"], answered]


def test_commits_wait_for_the_exchange_that_frees_an_ended_request() -> None:
    steps = [["admit"], ["commit", "free", "rematch"]] * 3
    assert exchanges(max_tokens=1)[:6] == steps


def test_all_that_end_in_a_step_are_freed_in_one_operation() -> None:
    ops = [op for ops in operations(4, 3, 64) for op in ops]
    frees = [len(op.free.sequences) for op in ops if op.HasField("free")]
    assert frees == [1, 4]  # the first `free` ends the sequence id that a request had before the model was known


def test_no_more_candidates_are_matched_again_than_a_step_can_begin() -> None:
    ops = [op for ops in operations(8, 8, 12) for op in ops]
    asked = [len(op.rematch.sequences) for op in ops if op.HasField("rematch")]
    assert set(asked) == {1}, "each prompt fills the budget of a step"


def test_an_answered_request_does_not_wait_for_the_answers_of_later_ones() -> None:
    """While requests keep coming, the scheduler always has a question for the cache."""
    system = LocalSystem(SchedulerConfig(window=1))
    system.open("s")
    system.attach(ToyWorker(block_size=4, num_blocks=64, max_num_seqs=8, max_batched_tokens=64))
    system.run()
    sampling = SamplingParams(top_p=1.0, max_tokens=4, seed=1, ignore_eos=True)
    system.submit("s", 1, [1, *range(10, 21)], sampling)
    system.submit("s", 2, [2, *range(10, 21)], sampling)  # the question about the first is on its way
    assert [op.WhichOneof("op") for op in system.to_cache[0].ops] == ["match"]
    system.move("exchange", None)
    system.move("answer", None)
    assert {op.WhichOneof("op") for op in system.to_cache[0].ops} == {"match", "admit"}


def test_a_worker_that_only_decodes_does_not_wait_for_the_blocks_of_another_worker() -> None:
    system = LocalSystem(SchedulerConfig(window=1))
    system.open("s")
    toys = [ToyWorker(block_size=32, num_blocks=8, max_num_seqs=8, max_batched_tokens=64) for _ in range(2)]
    _, second = (system.attach(toy) for toy in toys)
    sampling = SamplingParams(top_p=1.0, max_tokens=20, seed=1, ignore_eos=True)
    for handle in (1, 2):
        system.submit("s", handle, [handle, *range(10, 15)], sampling)
    while any(link.batch.prefills or not link.batch.running for link in system.scheduler.workers.values()):
        system.move(*system.moves()[0])
    system.submit("s", 3, [3, *range(10, 15)], sampling)
    while not (system.to_cache and system.to_cache[0].ops[-1].HasField("admit")):
        system.move(*next(move for move in system.moves() if move[1] is not second))
    for kind in ("step", "result"):  # while the cache has yet to answer for the first worker
        system.move(kind, second)
    assert second.plans
    assert toys[0].step > 0


def test_a_step_that_is_not_made_admits_no_request() -> None:
    """A request that the step was to admit waits again, unless the request has ended meanwhile."""
    requests = [SimpleNamespace(phase=Phase.ALLOCATING), SimpleNamespace(phase=Phase.ENDED)]
    worker, requeued = SimpleNamespace(allocating_tokens=5), list[object]()
    rounds: Any = SimpleNamespace(_workers={1: worker}, _life=SimpleNamespace(requeue=requeued.append))
    admissions = [SimpleNamespace(request=request) for request in requests]
    pending_step: Any = SimpleNamespace(worker=1, decision=SimpleNamespace(admissions=admissions))
    StepExchanges._undo_pending_step(rounds, pending_step)
    assert requeued == requests[:1]
    assert worker.allocating_tokens == 0


def test_an_exchange_may_pass_its_limit_by_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """So an exchange takes a request of any size. Each request here has 12 tokens, 48 bytes."""
    monkeypatch.setattr(link, "MAX_EXCHANGE_BYTES", 96)
    seen = operations(8, 4, 96)
    assert max(sum(op.HasField("match") for op in ops) for ops in seen) == 3


@pytest.mark.parametrize(("max_num_seqs", "must_ask"), [(2, True), (1, False)])
def test_a_step_waits_for_the_cache_if_the_last_free_slot_may_go_to_an_offline_request(
    max_num_seqs: int, must_ask: bool
) -> None:
    """The cache's answer is on its way, and the online request only decodes."""
    system = LocalSystem(SchedulerConfig(window=1))
    system.open("s")
    system.attach(ToyWorker(block_size=64, num_blocks=8, max_num_seqs=max_num_seqs, max_batched_tokens=64))
    sampling = SamplingParams(top_p=1.0, max_tokens=20, seed=1, ignore_eos=True)
    system.submit("s", 1, list(range(10, 15)), sampling)
    [worker] = system.scheduler.workers.values()
    while worker.batch.prefills or not worker.batch.running:
        system.move(*system.moves()[0])
    system.submit("s", 2, list(range(20, 25)), sampling, offline=True)
    asking: Any = SimpleNamespace(idle=False)
    assert system.scheduler._step_scheduler.must_ask(worker, asking) == must_ask
