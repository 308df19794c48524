"""What a heartbeat tells gateways of the load of all workers."""

from __future__ import annotations

import pytest

from paceline.v1.common_pb2 import SamplingParams
from paceline.v1.inference_pb2 import QUEUE_LIMIT_REQUESTS, QUEUE_LIMIT_TOKENS, QUEUE_LIMIT_UNSPECIFIED, QueueLimit
from scheduler_svc.core.types import SchedulerConfig
from simulator.system import LocalSystem
from simulator.toy_worker import ToyWorker

PARAMS = SamplingParams(top_p=1.0, max_tokens=3, seed=1, ignore_eos=True)


def at(system: LocalSystem, now_s: float) -> None:
    system.now_s = now_s
    system.scheduler.event_at(now_s)


def test_without_workers_the_oldest_request_says_how_long_work_waits() -> None:
    system = LocalSystem()
    system.open("s")
    assert system.scheduler.load(5.0).waiting_s == 0.0
    at(system, 10.0)
    system.submit("s", 1, list(range(10)), PARAMS)
    at(system, 12.0)
    system.submit("s", 2, list(range(20)), PARAMS)
    load = system.scheduler.load(13.5)
    assert (load.num_waiting, load.num_waiting_tokens, load.num_running) == (2, 30, 0)
    assert load.waiting_s == pytest.approx(3.5)
    assert (load.num_blocks, load.num_slots, load.block_size) == (0, 0, 0)


def test_blocks_and_slots_are_those_of_all_workers() -> None:
    system = LocalSystem()
    system.open("s")
    for _ in range(2):
        system.attach(ToyWorker(block_size=4, num_blocks=64, max_num_seqs=4, max_batched_tokens=8))
    system.submit("s", 1, list(range(10)), PARAMS)
    while not system.scheduler.load(0.0).num_running:
        system.move(*system.moves()[0])
    load = system.scheduler.load(0.0)
    assert (load.num_blocks, load.num_slots, load.block_size, load.num_waiting) == (128, 8, 4, 0)
    assert load.num_used_blocks == 2  # of the first step, which has 8 tokens
    system.run()
    assert system.scheduler.load(0.0).num_running == 0


def test_a_measured_rate_says_how_long_the_queue_takes() -> None:
    system = LocalSystem()
    system.open("s")
    budgets = system.scheduler.life.budgets.online
    worker = ToyWorker(block_size=4, num_blocks=64, max_num_seqs=1, max_batched_tokens=64)
    at(system, 0.0)
    for handle in range(1, 21):
        system.submit("s", handle, list(range(10)), PARAMS)
    system.scheduler.tick(0.0)
    system.attach(worker)
    for step in range(1, 400):
        at(system, step * 0.05)
        if not (moves := system.moves()) or len(system.scheduler.queue) < 5:
            break
        system.move(*moves[0])
        if not step % 5:
            system.scheduler.tick(step * 0.05)
    assert budgets.tokens_per_s is not None
    load = system.scheduler.load(99.0)
    assert load.num_waiting
    assert load.waiting_s == pytest.approx(load.num_waiting_tokens / budgets.tokens_per_s)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_the_load_counts_prefix_queries_and_hits(prefix_caching: bool) -> None:
    system = LocalSystem(SchedulerConfig(prefix_caching=prefix_caching))
    system.open("s")
    system.attach(ToyWorker(block_size=4, num_blocks=64, max_num_seqs=4, max_batched_tokens=64))
    for handle in (1, 2):
        system.submit("s", handle, list(range(10)), PARAMS)
        system.run()
    scored = SamplingParams(top_p=1.0, max_tokens=3, seed=1, ignore_eos=True, prompt_logprobs=True)
    system.submit("s", 3, list(range(10)), scored)  # looks nothing up: its whole prompt is computed
    system.run()
    load = system.scheduler.load(0.0)
    assert (load.prefix_query_tokens, load.prefix_hit_tokens) == ((20, 9) if prefix_caching else (0, 0))


def test_the_load_counts_steps_by_their_tokens() -> None:
    """A prompt of 10 tokens in chunks of 8: 8 tokens, then 2 and the first sampled one, then 1 for each other token."""
    system = LocalSystem()
    system.open("s")
    system.attach(ToyWorker(block_size=4, num_blocks=64, max_num_seqs=4, max_batched_tokens=8))
    system.submit("s", 1, list(range(10)), PARAMS)
    system.run()
    steps = system.scheduler.load(0.0).step_tokens
    counts = dict(zip([*steps.bounds, None], steps.counts, strict=True))
    assert {bound: count for bound, count in counts.items() if count} == {1: 2, 8: 2}
    assert steps.total == 10 + PARAMS.max_tokens


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (SchedulerConfig(max_queued_requests=1), QUEUE_LIMIT_REQUESTS),
        (SchedulerConfig(max_queued_tokens=10), QUEUE_LIMIT_TOKENS),
    ],
)
def test_the_status_says_which_limit_the_queue_has_reached(
    config: SchedulerConfig, limit: QueueLimit.ValueType
) -> None:
    system = LocalSystem(config)
    client = system.open("s")
    told = []
    for handle in (1, 2):
        assert client.status is not None
        told.append((client.status.full, client.status.queue_limit))
        system.submit("s", handle, list(range(10)), PARAMS)
    assert told == [(False, QUEUE_LIMIT_UNSPECIFIED), (True, limit)]
