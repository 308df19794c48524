"""Which requests are preempted, where they wait afterwards, and which are swapped. How much output is expected. When a
draining worker is released."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.v1.common_pb2 import SamplingParams
from scheduler_svc.core.cache.swapping import Swaps
from scheduler_svc.core.policy.interfaces import Policies
from scheduler_svc.core.policy.step import Step
from scheduler_svc.core.policy.views import Running
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.requests.state import Held
from scheduler_svc.core.step.decide import Decider
from scheduler_svc.core.types import SchedulerConfig
from scheduler_svc.core.workers.state import WorkerState
from scheduler_svc.core.workers.swap_space import SwapSpace
from simulator.system import LocalSystem
from simulator.toy_worker import ToyWorker
from tests.unit.scheduler.test_placement import Recorder, submit_at_once, system_of

PARAMS = SamplingParams(top_p=1.0, max_tokens=10, seed=1, ignore_eos=True)


def with_one_of_two_running() -> tuple[LocalSystem, Request, Request]:
    system = LocalSystem()
    system.open("s")
    system.attach(ToyWorker(block_size=4, num_blocks=64, max_num_seqs=1, max_batched_tokens=64))
    for handle in (1, 2):
        system.submit("s", handle, [9] * 6, PARAMS)
    [worker] = system.scheduler.workers.values()
    while not worker.batch.running:
        system.move(*system.moves()[0])
    [runs], [waits] = worker.batch.running.values(), system.scheduler.queue
    return system, runs, waits


@pytest.mark.parametrize(("place", "first"), [("front", 1), ("back", 2)])
def test_a_preempted_request_waits_where_the_policy_says(place: str, first: int) -> None:
    system, runs, waits = with_one_of_two_running()
    system.scheduler.life.preempt(runs, place, "recompute", "for a test")
    assert min(runs, waits, key=lambda request: request.queue_position).handle == first
    system.run()
    assert len(system.clients["s"].endings) == 2


def test_cancelled_requests_do_not_count_in_the_mean_output_length() -> None:
    """A cancelled request does not count in the mean output length."""
    system, _, _ = with_one_of_two_running()
    system.cancel("s", 1)
    system.cancel("s", 2)
    system.run()
    assert system.scheduler.life._output_length.mean_tokens is None


@pytest.mark.parametrize("offline", [False, True])
def test_an_offline_request_is_not_swapped_out(offline: bool) -> None:
    """Also in a step that retries offline suspects, which asks the online preemption policy."""
    system = LocalSystem()
    system.open("s")
    system.attach(ToyWorker(block_size=4, num_blocks=64, num_host_blocks=64, max_num_seqs=1, max_batched_tokens=64))
    system.submit("s", 1, [9] * 6, PARAMS, offline=offline)
    [worker] = system.scheduler.workers.values()
    while not worker.batch.num_decoding or not next(iter(worker.batch.running.values())).held.prompt_is_computed:
        system.move(*system.moves()[0])
    [(slot, request)] = worker.batch.running.items()
    Decider(system.scheduler.life)._preempt(worker, Running(worker, slot, request), "front", "swap", "for a test")
    assert bool(request.held.swapped_on) == (not offline)
    system.run()
    assert len(system.clients["s"].endings) == 1


def test_the_remaining_output_of_a_sequence_in_prefill() -> None:
    """During prefill, all of max_tokens remain."""
    system = LocalSystem()
    system.open("s")
    system.attach(ToyWorker(block_size=4, num_blocks=64, max_num_seqs=4, max_batched_tokens=16))
    system.submit("s", 1, [9] * 4, PARAMS)
    system.submit("s", 2, [9] * 90, PARAMS)
    [worker] = system.scheduler.workers.values()
    seen = 0
    while moves := system.moves():
        for slot in worker.batch.prefills:
            if worker.batch.num_tokens(slot) == 90:
                assert worker.batch.remaining_new_tokens()[list(worker.batch.running).index(slot)] == 10
                seen += 1
        system.move(*moves[0])
    assert seen > 2


def test_the_remaining_output_of_a_paused_sequence() -> None:
    """A pause changes nothing, and the steps of other sequences do not count for it."""
    system = LocalSystem()
    system.open("s")
    system.attach(ToyWorker(block_size=4, num_blocks=64, max_num_seqs=4, max_batched_tokens=16))
    for handle in (1, 2):
        system.submit("s", handle, [9] * 4, PARAMS)
    [worker] = system.scheduler.workers.values()
    batch = worker.batch
    while batch.num_decoding < 2 or batch.prefills:
        system.move(*system.moves()[0])
    slots = list(batch.running)
    left = batch.remaining_new_tokens().tolist()
    batch.choose_decodes(slots[1:])
    assert batch.remaining_new_tokens().tolist() == left
    batch.decode_step += 1
    assert batch.remaining_new_tokens().tolist() == [left[0], left[1] - 1]


@pytest.mark.parametrize(
    ("computed", "member", "suits"), [(True, False, True), (False, False, False), (True, True, False)]
)
def test_a_sequence_is_swapped_only_if_its_prompt_is_computed_and_it_is_no_beam(
    computed: bool, member: bool, suits: bool
) -> None:
    host = SwapSpace(free_blocks=1)
    batch = SimpleNamespace(num_tokens=lambda _: 5)
    worker = SimpleNamespace(draining=False, blocks_for=lambda _: 1, batch=batch, host=host)
    held = Held(worker=1, slot=0, prompt_is_computed=computed)
    request = SimpleNamespace(held=held, is_member=member, is_one_of_several=False)
    swaps: Any = SimpleNamespace(workers={1: worker})
    assert Swaps.suits(swaps, cast(Request, request), "swap") is suits


@pytest.mark.parametrize("mode", ["auto", "recompute"])
def test_samples_of_one_prompt_are_preempted_together_in_mode_auto_only(mode: str) -> None:
    samples = object()
    of = {0: None, 1: samples, 2: samples, 3: None}
    running = {slot: SimpleNamespace(family=SimpleNamespace(samples=one)) for slot, one in of.items()}
    worker = SimpleNamespace(batch=SimpleNamespace(running=running))
    sequences = [SimpleNamespace(slot=slot) for slot in of]
    policies: Any = SimpleNamespace(preemption=SimpleNamespace(mode=mode))
    step: Any = SimpleNamespace(running=sequences)
    victims = cast(list[Running], [sequences[3], sequences[2], sequences[1]])
    units = Decider._units(cast(WorkerState, worker), cast(Policies, policies), cast(Step, step), victims)
    together = [[3], [2, 1]] if mode == "auto" else [[3], [2], [1]]
    assert [[sequence.slot for sequence in unit] for unit in units] == together


@pytest.mark.parametrize("seed", range(12))
def test_a_draining_worker_is_released_when_nothing_runs_there_any_more(seed: int) -> None:
    rng, system = random.Random(seed), LocalSystem(SchedulerConfig(window=1))
    system.open("s")
    end = system.attach(ToyWorker(block_size=4, num_blocks=64, max_num_seqs=4, max_batched_tokens=8))
    for handle in range(4):
        system.submit("s", handle, [handle] * 11, PARAMS)
    [worker] = system.scheduler.workers.values()
    while not worker.batch.running:
        system.move(*rng.choice(system.moves()))
    system.scheduler.worker_drain(end.id)
    while worker.batch.running:
        assert not end.released
        system.move(*rng.choice(system.moves()))
    system.poll()
    assert end.released


def test_a_drained_worker_is_released_once() -> None:
    system = LocalSystem()
    system.open("s")
    end = system.attach(ToyWorker(block_size=4, num_blocks=64, max_num_seqs=4, max_batched_tokens=8))
    system.run()
    system.scheduler.worker_drain(end.id)
    outboxes = [system.scheduler.poll(float(now_s)) for now_s in range(3)]
    released = [message.HasField("released") for outbox in outboxes for _, message in outbox.to_workers]
    assert released == [True]


def test_preemption_goes_on_until_every_block_that_is_missing_is_found() -> None:
    """The pool has five blocks. Five sequences hold one block each, and each needs a second one. A victim frees its
    block and needs no second one. After two victims, one block is still missing."""
    system = system_of([Recorder(num_blocks=5, max_num_seqs=8)], "vllm-v1")
    submit_at_once(system, [[handle] * 4 for handle in range(1, 6)])
    while not system.scheduler.counters.preempted:
        system.move(*system.moves()[0])
    assert system.scheduler.counters.preempted == 3
    system.run()
