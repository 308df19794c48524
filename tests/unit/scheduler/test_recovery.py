"""A cache is lost and comes back. Running requests go on; a request that is refused its blocks is recomputed."""

from __future__ import annotations

import dataclasses
import random
from array import array
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from paceline.v1.cache_pb2 import CacheServiceLinkRequest, RestoredSequence
from paceline.v1.common_pb2 import SamplingParams
from paceline.v1.inference_pb2 import BeamOptions
from paceline.v1.worker_pb2 import KeptSequence
from scheduler_svc.core.cache import link as cache_link
from scheduler_svc.core.lifecycle import recovery
from scheduler_svc.core.lifecycle.beam_groups import make_search
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.types import SchedulerConfig
from scheduler_svc.core.workers import slots
from scheduler_svc.policies.registry import build, choose
from simulator.system import Client, LocalSystem, WorkerEnd
from simulator.toy_worker import EOS, ToyWorker, expected_hypotheses, expected_output

SAMPLING = SamplingParams(top_p=1.0, max_tokens=24, seed=1, ignore_eos=True)
SHARED = list(range(100, 110))
PROMPTS = {handle: [*SHARED, *range(100 * handle, 100 * handle + 2 * handle)] for handle in range(2, 6)}


PLAIN = Request(0, "s", 1, "r", b"1234", bytearray(), SAMPLING, 0.0)


def pack(values: Sequence[int]) -> bytes:
    return np.array(values, np.int32).tobytes()


def toy(**changes: int) -> ToyWorker:
    return ToyWorker(**{"block_size": 4, "num_blocks": 64, "max_num_seqs": 8, "max_batched_tokens": 64} | changes)


def make(prefix_caching: bool = True, preset: str = "paceline") -> LocalSystem:
    system = LocalSystem(SchedulerConfig(prefix_caching=prefix_caching), build(choose(preset)))
    system.open("s")
    return system


def begin(system: LocalSystem, num_moves: int = 30, **changes: int) -> WorkerEnd:
    end = system.attach(toy(**changes))
    for handle, prompt in PROMPTS.items():
        system.submit("s", handle, prompt, SAMPLING)
    system.run_for(num_moves)
    return end


def running(system: LocalSystem) -> list[Request]:
    return [request for worker in system.scheduler.workers.values() for request in worker.batch.running.values()]


def finish(system: LocalSystem, but: int = 0) -> Client:
    system.run()
    client = system.clients["s"]
    for handle, prompt in PROMPTS.items():
        if handle != but:
            assert client.tokens[handle] == expected_output(prompt, SAMPLING)
    system.assert_at_rest()
    return client


def exchange(system: LocalSystem, tamper: Callable[[CacheServiceLinkRequest], None]) -> None:
    """The cache executes another operation than the scheduler sent."""
    request = system.to_cache.popleft()
    tamper(request)
    system.from_cache.append(system.cache.exchange(request))


def restore_entries(request: CacheServiceLinkRequest) -> list[RestoredSequence]:
    return [entry for op in request.ops for entry in op.restore.sequences]


def restored_ids(request: CacheServiceLinkRequest) -> list[int]:
    return [entry.sequence for entry in restore_entries(request)]


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("num_moves", range(0, 60, 3))
def test_running_sequences_are_not_computed_again(num_moves: int, prefix_caching: bool) -> None:
    system = make(prefix_caching)
    end = begin(system, num_moves)
    before = [request.arrival_index for request in running(system)]
    steps = system.scheduler.counters.steps
    system.restart_cache()
    placed = 0
    while moves := system.moves():
        kind, moving = moves[0]
        if kind == "step" and end.plans[0].step > steps:
            placed += len(end.plans[0].new_sequences)
        system.move(kind, moving)
    assert placed == len(PROMPTS) - len(before)
    counters = system.scheduler.counters
    assert (counters.restored, counters.requeued, counters.refused_restores) == (len(before), 0, 0)
    finish(system)


def test_no_step_is_planned_before_the_cache_has_answered() -> None:
    system = make()
    end = begin(system, block_size=64)  # steps that need nothing of the cache
    steps = system.scheduler.counters.steps
    system.restart_cache()
    assert len(restored_ids(system.to_cache[0])) == len(PROMPTS)
    while end.plans or end.results:
        system.move("step" if end.plans else "result", end)
    assert system.scheduler.counters.steps == steps
    system.move("exchange", None)
    system.poll()
    assert system.scheduler.counters.steps == steps
    system.move("answer", None)
    assert system.to_cache or end.plans
    finish(system)


def test_a_request_may_end_while_there_is_no_cache() -> None:
    system = make()
    begin(system)
    system.lose_cache()
    system.run()
    assert running(system)
    system.cancel("s", 3)
    assert 3 in system.clients["s"].endings
    system.connect_cache()
    assert len(restored_ids(system.to_cache[0])) == len(PROMPTS) - 1
    finish(system, but=3)


@pytest.mark.parametrize("meanwhile", ["nothing", "cancel", "worker lost", "cache lost"])
@pytest.mark.parametrize("how", ["an entry", "the operation"])
def test_a_refused_request_is_recomputed(how: str, meanwhile: str) -> None:
    system = make()
    end = begin(system)
    victim = running(system)[1]
    sequence = victim.held.sequence
    system.restart_cache()
    cancelled = 0
    if meanwhile == "cancel":
        cancelled = victim.handle
        system.cancel("s", cancelled)
    elif meanwhile == "worker lost":
        system.kill(end)
        system.attach(toy())
    elif meanwhile == "cache lost":
        system.restart_cache()

    def corrupt(request: CacheServiceLinkRequest) -> None:
        (restore,) = (op.restore for op in request.ops if op.HasField("restore"))
        if how == "the operation":
            restore.worker = 77
        else:
            entry = next(entry for entry in restore.sequences if entry.sequence == sequence)
            entry.block_table = entry.block_table[:4]

    exchange(system, corrupt)
    finish(system, but=cancelled)
    counters = system.scheduler.counters
    refused = 1 if how == "an entry" else len(PROMPTS)
    assert (counters.refused_restores, counters.restored) == (refused, len(PROMPTS) - refused)
    if meanwhile != "worker lost":
        assert counters.requeued == refused - (meanwhile == "cancel")
    if meanwhile == "nothing":
        spans = system.scheduler.timeline.explain(victim.request_id, system.now_s)
        assert spans is not None
        why = "block_table: 1 blocks of 4 tokens" if how == "an entry" else "worker 77 is not known"
        assert any(why in span.detail for span in spans if span.reason == "requeued")


def test_a_large_restore_takes_several_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchanges of a restore may be mixed with any other events."""
    monkeypatch.setattr(recovery, "MAX_EXCHANGE_BYTES", 100)
    for events_after in range(4):
        system = make()
        begin(system)
        system.attach(toy())
        system.restart_cache()
        num_exchanges = 0
        while system.to_cache and restored_ids(system.to_cache[0]):
            num_exchanges += 1
            system.move("exchange", None)
            if num_exchanges == events_after + 1:
                system.cancel("s", 3)
                system.submit("s", 9, [9], SAMPLING)
                system.attach(toy())
                system.kill(system.workers[1])
            system.move("answer", None)
        assert num_exchanges == len(PROMPTS)
        client = finish(system, but=3)
        assert client.tokens[9] == expected_output([9], SAMPLING)
        assert system.scheduler.counters.restored == len(PROMPTS)


def test_the_restores_of_several_workers_fill_no_exchange_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 300
    monkeypatch.setattr(recovery, "MAX_EXCHANGE_BYTES", limit)
    system = make()
    for worker in range(3):
        system.attach(toy(max_num_seqs=4))
        for handle, prompt in PROMPTS.items():
            system.submit("s", 10 * worker + handle, prompt, SAMPLING)
        system.run_for(30)
    assert len(running(system)) == 3 * len(PROMPTS)
    system.restart_cache()
    sizes = []
    while system.to_cache and (entries := restore_entries(system.to_cache[0])):
        sizes.append(sum(len(entry.token_ids) + len(entry.block_table) for entry in entries))
        system.move("exchange", None)
        system.move("answer", None)
    largest_entry = 4 * (len(PROMPTS[5]) + SAMPLING.max_tokens) + 4 * 10
    assert len(sizes) > 3
    assert max(sizes) <= limit + largest_entry
    system.run()
    assert system.scheduler.counters.restored == 3 * len(PROMPTS)


def test_a_long_queue_takes_several_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_link, "MAX_EXCHANGE_BYTES", 100)
    system = make()
    system.run()
    for handle, prompt in PROMPTS.items():
        system.submit("s", handle, prompt, SAMPLING)
    system.run()
    system.restart_cache()
    assert 1 <= sum(op.HasField("match") for op in system.to_cache[0].ops) < len(PROMPTS)
    system.attach(toy())
    finish(system)


def test_kept_sequences_and_a_long_queue_share_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a scheduler restarts: workers report the KV they have kept, and gateways submit their requests again."""
    limit = 4000
    monkeypatch.setattr(cache_link, "MAX_EXCHANGE_BYTES", limit)
    system = make()
    tokens = {worker: [worker * 1000 + i for i in range(600)] for worker in range(1, 5)}
    for worker, ids in tokens.items():
        kept = KeptSequence(token_ids=pack(ids), num_computed_tokens=600, block_table=pack(range(1, 151)))
        one = toy(num_blocks=400)
        one.registration.kept.append(kept)
        system.attach(one, keeps_blocks=True)
        system.submit("s", worker, [7, *ids], SAMPLING)
    sizes = []
    while moves := system.moves():
        if system.to_cache:
            sizes.append(system.to_cache[0].ByteSize())
        system.move(*moves[0])
    assert max(sizes) < 2 * limit
    client = system.clients["s"]
    for worker, ids in tokens.items():
        assert client.tokens[worker] == expected_output([7, *ids], SAMPLING)
    assert system.cache.counters.restored_sequences == len(tokens)
    system.assert_at_rest()


def test_a_restored_search_keeps_the_blocks_that_beams_fork_from() -> None:
    sampling, beam = SamplingParams(top_p=1, max_tokens=8, ignore_eos=True), BeamOptions(width=3, num_return=3)
    right = expected_hypotheses(SHARED, make_search(beam, sampling, [EOS]))
    restored = 0
    for num_moves in range(6, 60, 3):
        system = make(prefix_caching=bool(num_moves % 2))
        system.attach(toy())
        system.submit("s", 1, SHARED, sampling, beam=beam)
        system.run_for(num_moves)
        system.restart_cache()
        system.run()
        found = system.clients["s"].endings[1].hypotheses
        assert [h.token_ids for h in found] == [pack(tokens) for tokens, _ in right]
        assert system.scheduler.counters.requeued == 0
        restored += system.scheduler.counters.restored
        system.assert_at_rest()
    assert restored > 20


def test_a_restored_search_with_longer_beams_keeps_the_blocks_that_beams_fork_from() -> None:
    """The prompt was computed in chunks, and each chunk got its blocks."""
    sampling, beam = SamplingParams(top_p=1, max_tokens=4, ignore_eos=True), BeamOptions(width=3, num_return=3)
    prompt = list(range(100, 140))
    right = expected_hypotheses(prompt, make_search(beam, sampling, [EOS]))
    parked = 0
    for num_moves in range(20, 60):
        system = make(preset="vllm-v1", prefix_caching=False)
        system.attach(toy(max_batched_tokens=8))
        system.submit("s", 1, prompt, sampling, beam=beam)
        system.run_for(num_moves)
        (worker,) = system.scheduler.workers.values()
        parked += len(worker.parked)
        system.restart_cache()
        system.run()
        found = system.clients["s"].endings[1].hypotheses
        assert [h.token_ids for h in found] == [pack(tokens) for tokens, _ in right]
        system.assert_at_rest()
    assert parked > 3


def test_a_refused_beam_is_recomputed() -> None:
    sampling, beam = SamplingParams(top_p=1, max_tokens=8, ignore_eos=True), BeamOptions(width=3, num_return=3)
    right = expected_hypotheses(SHARED, make_search(beam, sampling, [EOS]))
    parked = 0
    for num_moves in range(6, 60, 3):
        system = make()
        system.attach(toy())
        system.submit("s", 1, SHARED, sampling, beam=beam)
        system.run_for(num_moves)
        (worker,) = system.scheduler.workers.values()
        parked += len(worker.parked)
        system.restart_cache()
        if any(restored_ids(request) for request in system.to_cache):

            def refuse(request: CacheServiceLinkRequest) -> None:
                next(op.restore for op in request.ops if op.HasField("restore")).worker = 77

            exchange(system, refuse)
        system.run()
        found = system.clients["s"].endings[1].hypotheses
        assert [h.token_ids for h in found] == [pack(tokens) for tokens, _ in right]
        system.assert_at_rest()
    assert parked > 5


@pytest.mark.parametrize("noted", [1, 3, 1000])
def test_tables_are_those_that_were_granted(noted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However late the tables are completed, and whichever request had the slot before."""
    monkeypatch.setattr(slots, "NOTED_GROWTHS", noted)
    rng = random.Random(noted)
    table = slots.SlotLedger(4, block_size=4)
    right: dict[int, list[int]] = {}  # by slot
    placed: dict[int, Request] = {}
    block, checks = 0, 0
    for _ in range(2_000):
        grown = [slot for slot in placed for _ in range(rng.randrange(3))]
        if grown and rng.random() < 0.8:
            rng.shuffle(grown)
            blocks = range(block, block + len(grown))
            block += len(grown)
            table.note_growth(pack(grown), pack(blocks))
            for slot, new in zip(grown, blocks, strict=True):
                right[slot].append(new)
        if table.num_free and rng.random() < 0.3:
            request = dataclasses.replace(PLAIN)
            slot = table.occupy(request, 0, num_blocks=1)
            request.held.block_table, right[slot], placed[slot] = array("i", [block]), [block], request
            block += 1
        if placed and rng.random() < 0.2:
            slot = rng.choice([*placed])
            table.release(slot, 0)
            del placed[slot], right[slot]
        if rng.random() < 0.05:
            table.complete_tables()
            assert {slot: request.held.block_table.tolist() for slot, request in placed.items()} == right
            checks += 1
    assert checks > 50


def test_another_scheduler_reuses_the_kv_of_the_worker() -> None:
    before = make()
    worker = begin(before, num_moves=60).worker
    assert isinstance(worker, ToyWorker)
    delivered = {handle: before.clients["s"].tokens[handle] for handle in PROMPTS}
    assert all(len(tokens) > 3 for tokens in delivered.values())
    computed = worker.num_computed
    worker.registration.kept.extend(worker.kept())
    after = make()
    after.attach(worker, keeps_blocks=True)
    assert not worker.registration.kept, "kept sequences are used only once"
    for handle, prompt in PROMPTS.items():
        after.submit("s", handle, prompt, SAMPLING, output_token_ids=pack(delivered[handle]), accepted_before=True)
    after.run()
    for handle, prompt in PROMPTS.items():
        assert delivered[handle] + after.clients["s"].tokens[handle] == expected_output(prompt, SAMPLING)
    left = sum(SAMPLING.max_tokens - len(tokens) for tokens in delivered.values())
    assert worker.num_computed - computed <= left, "each token is computed once, the last delivered one among them"
    after.assert_at_rest()


def test_kept_sequences_stay_in_their_namespace() -> None:
    """KV of a tenant and a salt must not be found without them, nor with others, after a restart of the scheduler. The
    next scheduler finds it if it has the same secret; the worker knows only the name of the namespace."""
    before = make()
    before.scheduler.namespaces.secret = b"known to both"
    worker = before.attach(toy(num_blocks=256)).worker
    assert isinstance(worker, ToyWorker)
    prompt = [*SHARED, *SHARED]
    before.submit("s", 1, prompt, SAMPLING, tenant="mine", cache_salt="secret")
    before.run_for(20)
    worker.registration.kept.extend(worker.kept())
    names = [kept.cache_salt for kept in worker.registration.kept]
    assert names == [before.scheduler.namespaces.name("mine", "secret")]
    after = make()
    after.scheduler.namespaces.secret = b"known to both"
    after.attach(worker, keeps_blocks=True)
    asked = [("", ""), ("", "secret"), ("mine", ""), ("mine", "other"), ("other", "secret"), ("", names[0])]
    for handle, (tenant, salt) in enumerate([*asked, ("mine", "secret")], start=2):
        after.submit("s", handle, prompt, SAMPLING, tenant=tenant, cache_salt=salt)
        after.run()
        expected = len(prompt) - 1 if (tenant, salt) == ("mine", "secret") else 0
        assert after.clients["s"].endings[handle].cached_tokens == expected


def test_a_wrong_kept_sequence_does_no_harm() -> None:
    """Each wrong entry is refused by itself, and an entry that is too large is left out."""
    system = make()
    worker = toy()
    good = KeptSequence(token_ids=pack(SHARED), num_computed_tokens=8, block_table=pack([1, 2]))
    bad = [
        KeptSequence(token_ids=b"123", num_computed_tokens=1, block_table=pack([3])),
        KeptSequence(token_ids=pack(SHARED), num_computed_tokens=8, block_table=pack([3])),
        KeptSequence(token_ids=pack(SHARED), num_computed_tokens=8, block_table=pack([3, 9999])),
        KeptSequence(token_ids=pack([*SHARED, 1]), num_computed_tokens=8, block_table=pack([2, 1])),
    ]
    huge = KeptSequence(token_ids=bytes(cache_link.MAX_EXCHANGE_BYTES), num_computed_tokens=0)
    worker.registration.kept.extend([*bad, good, huge, good])
    system.attach(worker, keeps_blocks=True)
    for _ in range(2):
        request = system.to_cache.popleft() if system.to_cache else None
        if request is not None:
            system.from_cache.append(system.cache.exchange(request))
            system.move("answer", None)
    assert (system.cache.counters.restored_sequences, system.cache.counters.refused_claims) == (1, 4)
    system.assert_at_rest()
