"""The queue, prefill and decode times that a request's ending reports, with a clock that the tests set."""

from __future__ import annotations

import time

import pytest

from paceline.v1.common_pb2 import SamplingParams
from paceline.v1.inference_pb2 import BeamOptions, Ending
from scheduler_svc.links import SchedulerServer
from simulator.system import LocalSystem
from simulator.toy_worker import ToyWorker

PARAMS = SamplingParams(top_p=1.0, max_tokens=3, seed=1, ignore_eos=True)


def at(system: LocalSystem, now_s: float) -> None:
    system.now_s = now_s
    system.scheduler.event_at(now_s)


def started(num_blocks: int = 64, max_num_seqs: int = 4) -> LocalSystem:
    system = LocalSystem()
    system.open("s")
    system.attach(ToyWorker(block_size=4, num_blocks=num_blocks, max_num_seqs=max_num_seqs, max_batched_tokens=8))
    return system


def until_tokens(system: LocalSystem, handle: int, count: int) -> None:
    """Makes one move after the other until the client has this many tokens of the request."""
    for _ in range(100):
        if len(system.clients["s"].tokens.get(handle, ())) >= count:
            return
        kind, end = system.moves()[0]
        system.move(kind, end)
    raise AssertionError(f"request {handle} has fewer than {count} tokens after 100 moves")


def ending(system: LocalSystem, handle: int = 1) -> Ending:
    return system.clients["s"].endings[handle]


def test_queue_prefill_and_decode_times_follow_the_clock() -> None:
    system = LocalSystem()
    system.open("s")
    at(system, 10.0)
    system.submit("s", 1, list(range(10)), PARAMS)
    at(system, 12.0)
    system.attach(ToyWorker(block_size=4, num_blocks=64, max_num_seqs=4, max_batched_tokens=8))
    while len(system.scheduler.queue):
        system.move(*system.moves()[0])
    at(system, 15.0)
    until_tokens(system, 1, 1)
    at(system, 21.0)
    system.run()
    timing = ending(system).timing
    assert (timing.queue_s, timing.prefill_s, timing.decode_s) == (2.0, 3.0, 6.0)
    assert timing.num_preemptions == 0


def test_a_request_that_ends_in_the_queue_has_only_a_queue_time() -> None:
    system = LocalSystem()
    system.open("s")
    system.submit("s", 1, [1, 2], PARAMS)
    at(system, 4.0)
    system.cancel("s", 1)
    timing = ending(system).timing
    assert (timing.queue_s, timing.prefill_s, timing.decode_s) == (4.0, 0.0, 0.0)


def test_a_refused_request_has_no_times() -> None:
    system = started()
    system.submit("s", 1, [], PARAMS)
    assert not ending(system).HasField("timing")


def test_a_preemption_is_counted_and_the_second_prefill_is_decode_time() -> None:
    """The pool holds two prompts and not their outputs: the later request is preempted after its first token."""
    system, params = started(num_blocks=8), SamplingParams(top_p=1.0, max_tokens=20, seed=1, ignore_eos=True)
    for handle in (1, 2):
        system.submit("s", handle, [handle] * 8, params)
    for second in range(400):
        at(system, float(second))
        if not system.moves():
            break
        system.move(*system.moves()[0])
    timings = [ending(system, handle).timing for handle in (1, 2)]
    assert timings[0].num_preemptions == 0
    assert timings[1].num_preemptions >= 1
    assert timings[1].decode_s > timings[0].decode_s


def test_the_server_gives_each_event_the_time_at_which_it_comes() -> None:
    """Not the time of the previous message, which may be long ago."""
    core, seen = LocalSystem().scheduler, list[float]()
    server = SchedulerServer(core, "127.0.0.1:1", [], 1.0)
    core.event_at(0.0)
    before_s = time.monotonic()
    server.event(lambda: seen.append(core.life.now_s))
    assert seen[0] >= before_s


@pytest.mark.parametrize("width", [1, 3])
def test_a_beam_search_has_its_first_token_after_its_first_step(width: int) -> None:
    system = started()
    at(system, 1.0)
    system.submit(
        "s", 1, [5, 6, 7], SamplingParams(top_p=1.0, max_tokens=4, ignore_eos=True), beam=BeamOptions(width=width)
    )
    second = 1.0
    while 1 not in system.clients["s"].endings:
        second += 1.0
        at(system, second)
        system.move(*system.moves()[0])
    timing = ending(system).timing
    assert timing.prefill_s > 0
    assert timing.decode_s > 0
    assert timing.queue_s + timing.prefill_s + timing.decode_s == second - 1.0


def test_cached_tokens_of_host_memory_are_counted_separately() -> None:
    """Six blocks: other prompts evict the first prompt to host memory, and its repetition takes it from there."""
    system = LocalSystem()
    system.open("s")
    system.attach(ToyWorker(block_size=4, num_blocks=6, max_num_seqs=4, max_batched_tokens=64, num_host_blocks=16))
    first = list(range(13))
    for handle, prompt in enumerate([first, first, [*range(50, 63)], [*range(70, 83)], first], 1):
        system.submit("s", handle, prompt, PARAMS)
        system.run()
    reused = [(end.cached_tokens, end.timing.num_cached_host_tokens) for end in (ending(system, i) for i in (1, 2, 5))]
    assert reused == [(0, 0), (12, 0), (12, 12)]


def test_a_lost_worker_counts_as_a_loss_and_as_no_preemption() -> None:
    system = started()
    system.submit("s", 1, [1, 2, 3], SamplingParams(top_p=1.0, max_tokens=20, seed=1, ignore_eos=True))
    until_tokens(system, 1, 2)
    system.kill(system.workers[0])
    system.attach(ToyWorker(block_size=4, num_blocks=64, max_num_seqs=4, max_batched_tokens=8))
    system.run()
    assert (ending(system).timing.num_losses, ending(system).timing.num_preemptions) == (1, 0)
