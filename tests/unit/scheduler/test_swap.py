"""Preempted requests that are swapped to host memory, and what happens to them there."""

from __future__ import annotations

import pytest

from paceline.v1.common_pb2 import SamplingParams
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.types import SchedulerConfig
from scheduler_svc.core.workers.state import WorkerState
from scheduler_svc.policies.registry import build, choose
from simulator.system import Client, LocalSystem, WorkerEnd
from simulator.toy_worker import ToyWorker, expected_output

NUM_TOKENS = 24
SAMPLING = SamplingParams(top_p=1.0, max_tokens=NUM_TOKENS, seed=1, ignore_eos=True)
PROMPTS = {handle: [100 * handle + i for i in range(6)] for handle in range(1, 5)}


def toy(**changes: int) -> ToyWorker:
    """A worker with blocks for one and a half of these requests."""
    sizes = {"block_size": 4, "num_blocks": 12, "max_num_seqs": 8, "max_batched_tokens": 64, "num_host_blocks": 40}
    return ToyWorker(**sizes | changes)


def make(preset: str = "paceline", window: int = 2, prefix_caching: bool = False, **options: object) -> LocalSystem:
    config = SchedulerConfig(window=window, prefix_caching=prefix_caching)
    system = LocalSystem(config, build(choose(preset, options={"mode": "swap"} | options)))
    system.open("s")
    return system


def begin(system: LocalSystem, **changes: int) -> WorkerEnd:
    """Plays until the first request is swapped out and the cache has answered."""
    end = system.attach(toy(**changes))
    for handle, prompt in PROMPTS.items():
        system.submit("s", handle, prompt, SAMPLING)
    while not system.scheduler.counters.swapped_out:
        system.move(*system.moves()[0])
    return end


def swapped(system: LocalSystem) -> list[Request]:
    return [request for request in system.scheduler.queue if request.held.swapped_on]


def only(system: LocalSystem) -> WorkerState:
    (worker,) = system.scheduler.workers.values()
    return worker


def finish(system: LocalSystem, but: int = 0) -> Client:
    system.run()
    client = system.clients["s"]
    for handle, prompt in PROMPTS.items():
        if handle != but:
            assert client.tokens[handle] == expected_output(prompt, SAMPLING)
    system.assert_at_rest()
    return client


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("preset", ["paceline", "vllm-v0", "vllm-v1", "trtllm-max-util", "sglang"])
def test_a_swapped_request_goes_on_where_it_was(preset: str, prefix_caching: bool, window: int) -> None:
    options: dict[str, object] = {"init_new_token_ratio": 0.1} if preset == "sglang" else {}
    system = make(preset, window, prefix_caching, chunked_prefill=True, **options)
    begin(system)
    finish(system)
    counters = system.scheduler.counters
    assert counters.swapped_in == counters.swapped_out == counters.preempted > 0


def test_nothing_is_computed_twice() -> None:
    system = make(window=1)
    end = begin(system)
    prefilled = 0
    while moves := system.moves():
        kind, moving = moves[0]
        if kind == "step":
            prefilled += sum(len(new.token_ids) // 4 - new.num_cached_tokens for new in end.plans[0].new_sequences)
        system.move(kind, moving)
    waiting = [request for request in PROMPTS if request not in system.clients["s"].tokens]
    assert not waiting
    assert prefilled <= system.scheduler.counters.swapped_in + 6 * len(PROMPTS)
    finish(system)


def test_the_oldest_swapped_request_resumes_first_and_before_waiting_ones() -> None:
    system = make("vllm-v0", window=1, requeue="back")
    end = begin(system)
    for handle in (7, 8):
        system.submit("s", handle, [handle], SAMPLING)
    away: list[int] = []
    num_back = last_step = 0
    while moves := system.moves():
        kind, moving = moves[0]
        system.move(kind, moving)
        new_plans = [plan for plan in end.plans if plan.step > last_step]
        come = [int(new.request_id.removeprefix("s-")) for plan in new_plans for new in plan.new_sequences]
        if new_plans:
            last_step = new_plans[-1].step
            back = [handle for handle in come if handle in away]
            assert back == away[: len(back)]
            assert back == come or not set(away) - set(back)
            num_back += len(back)
        live = system.scheduler.sessions["s"].live.values()
        away = sorted(request.handle for request in live if request.held.swapped_on)  # ALLOCATING requests among them
    assert num_back > 1
    finish(system)


def test_a_swapped_request_can_be_cancelled() -> None:
    system = make()
    begin(system)
    (request,) = swapped(system)
    worker = only(system)
    assert worker.host.swap_outs
    system.cancel("s", request.handle)
    assert not worker.host.swap_outs  # its host blocks may soon belong to another request
    system.run_for(2)
    finish(system, but=request.handle)


def test_a_request_may_be_cancelled_while_its_swap_is_under_way() -> None:
    """Before the cache has answered or the copies are sent. No host block is lost, and none is written late."""
    for moves_before in range(60):
        system = make(window=1, prefix_caching=bool(moves_before % 2))
        system.attach(toy())
        for handle, prompt in PROMPTS.items():
            system.submit("s", handle, prompt, SAMPLING)
        while not system.scheduler.counters.preempted:
            system.move(*system.moves()[0])
        system.run_for(moves_before)
        victim = next(iter(swapped(system)), None)
        if victim is None:
            break
        system.cancel("s", victim.handle)
        finish(system, but=victim.handle)
    assert moves_before > 3


def test_a_deadline_that_passes_in_host_memory() -> None:
    system = make()
    system.attach(toy())
    for handle, prompt in PROMPTS.items():
        system.submit("s", handle, prompt, SAMPLING, deadline_s=5.0 if handle > 1 else 0.0)
    while not system.scheduler.counters.swapped_out:
        system.move(*system.moves()[0])
    system.now_s = 6.0
    system.scheduler.tick(6.0)
    system.poll()
    system.run()
    assert "deadline" in system.clients["s"].endings[2].message
    assert system.clients["s"].tokens[1] == expected_output(PROMPTS[1], SAMPLING)
    system.assert_at_rest()


def test_a_lost_worker_takes_the_kv_with_it() -> None:
    system = make()
    end = begin(system)
    system.attach(toy(num_blocks=40))
    system.kill(end)
    assert not swapped(system)
    finish(system)


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("window", [1, 3])
def test_a_lost_cache_does_not_lose_swapped_kv(window: int, prefix_caching: bool) -> None:
    """The scheduler asks for the same host blocks again, whether or not the worker has made the copies."""
    kept = recomputed = pending = 0
    for moves_before in range(40):
        system = make(window=window, prefix_caching=prefix_caching)
        system.attach(toy())
        for handle, prompt in PROMPTS.items():
            system.submit("s", handle, prompt, SAMPLING)
        while not system.scheduler.counters.preempted:
            system.move(*system.moves()[0])
        system.run_for(moves_before)
        before = {request.arrival_index: request.held.host_blocks for request in swapped(system)}
        before |= {r.arrival_index: r.held.host_blocks for r in only(system).bound if r.held.swapped_on}
        pending += len(only(system).host.swap_outs)
        system.restart_cache()
        after = {request.arrival_index: request.held.host_blocks for request in swapped(system)}
        assert after == {arrival_index: blocks for arrival_index, blocks in before.items() if blocks}
        kept, recomputed = kept + len(after), recomputed + len(before) - len(after)
        assert system.scheduler.counters.requeued == 0
        finish(system)
    assert min(kept, recomputed, pending) > 0


def test_a_request_that_a_new_cache_refuses_is_recomputed() -> None:
    system = make()
    begin(system)
    (request,) = swapped(system)
    system.restart_cache()
    exchange = system.to_cache.popleft()
    for op in exchange.ops:
        for entry in op.restore.sequences:
            if entry.sequence == request.held.sequence:
                entry.host_blocks = entry.host_blocks[:4] * 2
    system.from_cache.append(system.cache.exchange(exchange))
    system.move("answer", None)
    assert not request.held.swapped_on
    assert not only(system).host.swap_outs
    finish(system)
    assert system.scheduler.counters.refused_restores == 1


def test_a_worker_that_drains_gives_its_swapped_requests_away() -> None:
    system = make()
    end = begin(system)
    other = system.attach(toy(num_blocks=40))
    system.scheduler.worker_drain(end.id)
    system.poll()
    finish(system)
    assert end.released
    assert not other.released


@pytest.mark.parametrize("drains", [False, True])
def test_the_cache_may_refuse_a_resuming_request(drains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    system = make(window=1)
    end = begin(system)
    while not any(op.HasField("swap_in") for exchange in system.to_cache for op in exchange.ops):
        system.move(*system.moves()[0])
    device = system.cache.workers[end.id].device
    taken = device.take(device.available_blocks)
    if drains:
        system.scheduler.worker_drain(end.id)
        system.poll()
    with monkeypatch.context() as patch:
        patch.setattr(system.cache, "check_invariants", lambda: None)  # it would count the blocks taken above as lost
        system.move("exchange", None)
    device.pool.give_back(taken)
    system.move("answer", None)
    assert system.scheduler.counters.swapped_in == 0
    assert bool(swapped(system)) != drains
    if drains:
        system.attach(toy(num_blocks=40))
    system.run()
    assert all(system.clients["s"].tokens[handle] == expected_output(PROMPTS[handle], SAMPLING) for handle in PROMPTS)


@pytest.mark.parametrize("num_host_blocks", [0, 1])
def test_without_host_blocks_a_request_is_recomputed(num_host_blocks: int) -> None:
    system = make()
    system.attach(toy(num_host_blocks=num_host_blocks))
    for handle, prompt in PROMPTS.items():
        system.submit("s", handle, prompt, SAMPLING)
    finish(system)
    assert system.scheduler.counters.preempted > 0 == system.scheduler.counters.swapped_out


def test_a_cache_may_have_fewer_host_blocks_than_the_scheduler_thinks() -> None:
    system = make()
    system.attach(toy(num_host_blocks=1))
    worker = only(system)
    for handle, prompt in PROMPTS.items():
        system.submit("s", handle, prompt, SAMPLING)
    while moves := system.moves():
        worker.host.free_blocks = 40
        system.move(*moves[0])
    worker.host.free_blocks = 1
    finish(system)
    assert system.scheduler.counters.preempted > 0 == system.scheduler.counters.swapped_out
    assert system.cache.counters.refused_ops > 0


def groups_of_three(mode: str) -> LocalSystem:
    """A lone request, and two prompts with three samples each. The worker has half of the blocks that they need."""
    system = make("vllm-v0", window=1, mode=mode)
    system.attach(toy(num_blocks=26))
    for handle in range(1, 8):
        first = 2 if handle < 5 else 5
        fork_of = first if handle > first else 0
        system.submit("s", handle, PROMPTS[1 if handle == 1 else first - 1], SAMPLING, fork_of=fork_of)
    return system


def all_in_step(system: LocalSystem) -> tuple[list[set[int]], list[set[int]]]:
    """Plays to the end. Returns the handles that were swapped out together, and those that came back together."""
    went, came = [], []
    before: set[int] = set()
    while moves := system.moves():
        system.move(*moves[0])
        away = {request.handle for request in system.scheduler.sessions["s"].live.values() if request.held.swapped_on}
        went += [away - before] if away - before else []
        came += [before - away] if before - away else []
        before = away
    return went, came


def test_samples_of_one_prompt_go_and_come_back_together() -> None:
    system = groups_of_three("auto")
    went, came = all_in_step(system)
    assert sorted(map(min, went)) == sorted(map(min, came)) != []
    assert all(group in ({2, 3, 4}, {5, 6, 7}) for group in (*went, *came))
    assert all(len(tokens) == NUM_TOKENS for tokens in system.clients["s"].tokens.values())
    system.assert_at_rest()


def test_in_mode_swap_each_sample_is_swapped_out_alone() -> None:
    went, _ = all_in_step(groups_of_three("swap"))
    assert min(map(len, went)) == 1


def test_samples_that_no_longer_fit_together_come_back_one_by_one() -> None:
    """In host memory each sample has its own copy of the blocks that the samples shared."""
    system = make("vllm-v0", window=1, mode="auto")
    system.attach(toy(num_blocks=20))
    prompt = list(range(32))
    system.submit("s", 1, [1], SAMPLING)
    for handle in range(2, 5):
        system.submit("s", handle, prompt, SAMPLING, fork_of=2 if handle > 2 else 0)
    went, came = all_in_step(system)
    assert went[0] == {2, 3, 4}
    assert came[0] == {2}
    tokens = system.clients["s"].tokens
    assert tokens[1] == expected_output([1], SAMPLING)
    assert tokens[2] == tokens[3] == tokens[4] == expected_output(prompt, SAMPLING)
    system.assert_at_rest()


def test_the_last_remaining_sample_of_a_prompt_is_recomputed() -> None:
    system = make("vllm-v0", mode="auto")
    system.attach(toy())
    short = SamplingParams(top_p=1.0, max_tokens=1, seed=1, ignore_eos=True)
    system.submit("s", 1, PROMPTS[1], SAMPLING)
    system.submit("s", 2, PROMPTS[2], SAMPLING)
    system.submit("s", 3, PROMPTS[2], short, fork_of=2)
    system.run()
    assert system.scheduler.counters.preempted > 0 == system.scheduler.counters.swapped_out
    system.assert_at_rest()


def test_auto_swaps_samples_of_one_prompt_and_nothing_else() -> None:
    for fork_of, expected in ((0, False), (1, True)):
        system = make("vllm-v0", mode="auto")
        system.attach(toy())
        for handle in PROMPTS:
            system.submit("s", handle, PROMPTS[1], SAMPLING, fork_of=fork_of if handle > 1 else 0)
        system.run()
        assert all(tokens == expected_output(PROMPTS[1], SAMPLING) for tokens in system.clients["s"].tokens.values())
        assert system.scheduler.counters.preempted > 0
        assert (system.scheduler.counters.swapped_out > 0) == expected
        system.assert_at_rest()
