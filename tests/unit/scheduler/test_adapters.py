"""Requests for adapters, and workers that serve a limited number of adapters at once."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import cast

from paceline.v1.common_pb2 import FINISH_REASON_ERROR, FINISH_REASON_LENGTH, SamplingParams
from scheduler_svc.core.rejection import CODE_INVALID_ARGUMENT
from scheduler_svc.core.requests.request import Request, SubmissionMetadata
from scheduler_svc.core.workers.adapters import Adapters
from scheduler_svc.policies.registry import build, choose
from simulator.system import LocalSystem
from simulator.toy_worker import ToyWorker


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(top_p=1.0, max_tokens=max_tokens, seed=1, ignore_eos=True)


def toy(max_loras: int, max_num_seqs: int = 8) -> ToyWorker:
    worker = ToyWorker(block_size=4, num_blocks=200, max_num_seqs=max_num_seqs, max_batched_tokens=64)
    worker.registration.max_loras = max_loras
    return worker


def test_a_batch_has_at_most_max_loras_adapters() -> None:
    system = LocalSystem()
    system.attach(toy(2))
    client = system.open("s")
    for handle, lora in enumerate(["x", "y", "z", "x", ""]):
        system.submit("s", handle, [9] * 6, params(6), lora=lora)
    while moves := system.moves():
        bound = [request.metadata.lora for worker in system.scheduler.workers.values() for request in worker.bound]
        assert len(set(bound) - {""}) <= 2
        system.move(*moves[0])
    assert len(client.endings) == 5


def test_each_worker_has_its_own_limit_of_adapters() -> None:
    """Three workers serve no adapter, one, and any number. An adapter on one worker does not count on another."""
    system = LocalSystem()
    for max_loras in (0, 1, 9):
        system.attach(toy(max_loras, max_num_seqs=2))
    client, most = system.open("s"), dict.fromkeys((0, 1, 9), 0)
    for handle, lora in enumerate(["u", "v", "w", "x", "y", "z"] * 2):
        system.submit("s", handle, [9] * 6, params(6), lora=lora)
    while moves := system.moves():
        for worker in system.scheduler.workers.values():
            limit, loras = worker.registration.max_loras, {request.metadata.lora for request in worker.bound}
            assert len(loras) <= limit
            assert worker.adapters.num_bound.keys() == loras
            most[limit] = max(most[limit], len(loras))
        system.move(*moves[0])
    assert most == {0: 0, 1: 1, 9: 2}
    assert all(client.endings[handle].reason == FINISH_REASON_LENGTH for handle in range(12))


def test_a_request_for_another_adapter_does_not_wait_for_the_less_busy_worker() -> None:
    system = LocalSystem(policies=build(choose("", {"placement": "prefix-first"})))
    for max_loras in (1, 9):
        system.attach(toy(max_loras))
    client, rng = system.open("s"), random.Random(1)

    def play(num_moves: int) -> None:
        for _ in range(num_moves):
            system.move(*rng.choice(system.moves()))

    system.submit("s", 1, [9] * 6, params(400), lora="x")
    play(20)
    for handle in (2, 3):
        system.submit("s", handle, [8] * 6, params(400))
        play(20)
    first, second = system.scheduler.workers.values()
    assert (set(first.adapters.num_bound), first.num_rows < second.num_rows) == ({"x"}, True)
    system.submit("s", 4, [7] * 6, params(5), lora="y")
    play(100)
    assert client.endings[4].reason == FINISH_REASON_LENGTH
    assert client.endings.keys() == {4}, "and the others still run"


def test_a_request_for_an_adapter_fails_as_soon_as_a_worker_without_adapters_comes() -> None:
    system = LocalSystem()
    client = system.open("s")
    system.submit("s", 1, [9] * 6, params(5), lora="x")
    system.submit("s", 2, [9] * 6, params(5))
    system.attach(toy(0))
    system.run()
    assert client.endings[1].reason == FINISH_REASON_ERROR
    assert client.endings[1].code == CODE_INVALID_ARGUMENT
    assert client.endings[1].field == "lora"
    assert client.endings[2].reason == FINISH_REASON_LENGTH


def test_a_batch_has_room_for_an_adapter_that_is_in_it_or_for_one_more() -> None:
    def has(lora: str, *loaded: str) -> bool:
        adapters = Adapters(2, Counter(loaded))
        return adapters.fit(cast(Request, SimpleNamespace(metadata=SubmissionMetadata(lora=lora))))

    assert has("", "a", "b")
    assert has("a", "a", "b")
    assert has("c", "a")
    assert not has("c", "a", "b")
