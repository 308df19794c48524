"""No tenant keeps more of a memory than its share. Blocks that it wants to retain beyond that are evicted as usual.

The driver checks all invariants after every exchange, those of the shares among them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from cache_svc.core import admin
from cache_svc.core.retention import DEFAULT_RETENTION
from cache_svc.core.tree.nodes import BlockResidency
from paceline.v1 import cache_pb2 as pb
from paceline.v1.common_pb2 import RetentionRange, SamplingParams
from simulator.system import LocalSystem
from simulator.toy_worker import ToyWorker
from tests.unit.cache import driver as d
from tests.unit.cache.driver import Driver

FOR_EVER = [(0, 0, 100, 0)]
BLOCK = 4


def link(num_blocks: int, retained: float = 0.25, total: float = 0.5, num_host: int = 0) -> Driver:
    cache = Driver(retained=retained, total_retained=total)
    cache.add_worker(0, num_blocks, num_host_blocks=num_host, host_tier=num_host > 0)
    return cache


def prompt(number: int, num_blocks: int) -> list[int]:
    return [1000 * number + token for token in range(num_blocks * BLOCK)]


def stored(
    cache: Driver, sequence: int, tokens: Sequence[int], retention: d.Retention = FOR_EVER, tenant: str = ""
) -> int:
    """Run the request to its end; returns its cached tokens."""
    cache.one(d.match_op(sequence, tokens, retention=retention, tenant=tenant))
    cached, _ = cache.admit(sequence, 0)
    cache.commit(sequence, [], len(tokens))
    cache.free(sequence)
    return cached


def retained_blocks(cache: Driver, tenant: str = "", on_host: bool = False) -> int:
    worker = cache.core.workers[0]
    share = (worker.host if on_host else worker.device).shares.tenants.get(tenant)
    return 0 if share is None else share.num_blocks


def test_requests_that_retain_everything_do_not_reduce_another_tenants_cache_hits() -> None:
    """One tenant sends 22 requests at priority 100 for ever, each as large as a sixth of the pool. Between them another
    tenant repeats its prompt."""
    cache, own = link(num_blocks=96), prompt(0, 30)
    stored(cache, 1, own, retention=(), tenant="other")
    for number in range(1, 23):
        stored(cache, 100 + number, prompt(number, 16), tenant="greedy")
        assert stored(cache, 200 + number, own, retention=(), tenant="other") == 30 * BLOCK - 1 - 3
    assert retained_blocks(cache, "greedy") == 24


def test_the_tenants_own_oldest_blocks_fall_back_to_the_default_priority() -> None:
    cache = link(num_blocks=40)
    stored(cache, 1, prompt(1, 4))
    stored(cache, 2, prompt(2, 4))
    assert retained_blocks(cache) == 8
    stored(cache, 3, prompt(3, 4))
    assert retained_blocks(cache) == 10, "two blocks of the first prompt are still retained"
    cache.run(4, prompt(4, 30))  # everything that is not retained goes
    assert [cache.probe(prompt(n, 4)) for n in (1, 2, 3)] == [{0: (8, 0)}, {0: (16, 0)}, {0: (16, 0)}]


def test_the_lowest_priority_of_a_tenant_falls_back_first() -> None:
    cache = link(num_blocks=40)
    stored(cache, 1, prompt(1, 6), retention=[(0, 0, 90, 0)])
    stored(cache, 2, prompt(2, 6), retention=[(0, 0, 60, 0)])
    stored(cache, 3, prompt(3, 4), retention=[(0, 0, 90, 0)])
    kept: Counter[int] = Counter()
    for residency in residencies(cache):
        kept[residency.retention] += len(residency.blocks)
    assert kept == {90: 10, DEFAULT_RETENTION: 6}


def residencies(cache: Driver) -> list[BlockResidency]:
    worker = cache.core.workers[0]
    return worker.device.queue.upcoming(worker.device.index)


def test_the_beginning_of_a_prompt_longer_than_the_share_is_retained() -> None:
    cache = link(num_blocks=40)
    stored(cache, 1, prompt(1, 30))
    assert retained_blocks(cache) == 10
    cache.run(2, prompt(2, 30))
    assert cache.probe(prompt(1, 30)) == {0: (10 * BLOCK, 0)}


def test_a_retained_block_counts_with_all_blocks_before_it() -> None:
    """To retain the last block of a long prompt means to retain the whole prompt."""
    cache = link(num_blocks=40)
    last = [(29 * BLOCK, 0, 100, 0)]
    stored(cache, 1, prompt(1, 30), retention=last)
    assert retained_blocks(cache) == 0, "30 blocks are more than its share"
    stored(cache, 2, prompt(2, 8), retention=[(7 * BLOCK, 0, 100, 0)])
    assert retained_blocks(cache) == 8


def test_a_common_prefix_counts_once() -> None:
    cache, begin = link(num_blocks=40), prompt(1, 6)
    for number in range(2, 6):
        stored(cache, number, [*begin, *prompt(number, 1)])
    assert retained_blocks(cache) == 10
    stored(cache, 9, [*begin, *prompt(9, 1)])
    assert retained_blocks(cache) == 10


def test_all_tenants_together_have_a_share_too() -> None:
    cache = link(num_blocks=40)
    for number, tenant in enumerate("abcd", start=1):
        stored(cache, number, prompt(number, 8), tenant=tenant)
    assert [retained_blocks(cache, tenant) for tenant in "abcd"] == [8, 8, 4, 0]


def test_another_tenants_retention_is_not_lowered() -> None:
    cache = link(num_blocks=40)
    stored(cache, 1, prompt(1, 4), retention=[(0, 0, 80, 0)], tenant="a")
    stored(cache, 2, prompt(1, 4), retention=[(0, 0, 0, 0)], tenant="b")
    assert {h.retention for h in residencies(cache)} == {80}
    stored(cache, 3, prompt(1, 4), retention=[(0, 0, 0, 0)], tenant="a")
    assert {h.retention for h in residencies(cache)} == {0}
    assert retained_blocks(cache, "a") == 0


def test_expired_retention_does_not_count() -> None:
    cache = link(num_blocks=40)
    stored(cache, 1, prompt(1, 8), retention=[(0, 0, 80, 50)])
    cache.now_ms = 100
    stored(cache, 2, prompt(2, 8))
    assert {h.retention for h in residencies(cache)} == {DEFAULT_RETENTION, 100}
    assert retained_blocks(cache) == 8


def test_host_memory_has_its_own_shares() -> None:
    cache = link(num_blocks=16, num_host=40)
    for number in range(1, 20):
        stored(cache, number, prompt(number, 4))
        stored(cache, 100 + number, prompt(100 + number, 15), retention=())  # does not fit beside the retained blocks
    assert retained_blocks(cache) <= 4
    assert 0 < retained_blocks(cache, on_host=True) <= 10


def test_an_operators_pins_do_not_count_for_a_tenant() -> None:
    cache = link(num_blocks=40)
    cache.run(1, prompt(1, 15))
    admin.pin(cache.core, "system", d.pack(prompt(1, 15)))
    stored(cache, 2, prompt(2, 10))
    assert retained_blocks(cache) == 10
    cache.run(3, prompt(3, 25))
    assert cache.probe(prompt(1, 15)) == {0: (15 * BLOCK, 15 * BLOCK)}


@pytest.mark.parametrize("seed", range(40))
def test_the_shares_hold_under_random_operations(seed: int) -> None:
    rng = random.Random(seed)
    cache = Driver(retained=rng.choice([0.1, 0.3]), total_retained=rng.choice([0.3, 0.5]))
    cache.add_worker(0, 24, num_host_blocks=12, partial_reuse=rng.random() < 0.5, host_tier=rng.random() < 0.7)
    running: list[int] = []
    for sequence in range(1, 120):
        tokens = [*prompt(rng.randrange(3), rng.randrange(1, 4)), *([rng.randrange(3)] * rng.randrange(1, 12))]
        start = rng.choice([0, 0, 4, 8])
        retention = [(start, rng.choice([0, start + 4]), rng.choice([0, 60, 90]), rng.choice([0, 0, 30]))]
        cache.one(d.match_op(sequence, tokens, retention=retention, tenant=rng.choice("abc")))
        try:
            cache.admit(sequence, 0)
        except d.Refused:
            cache.free(sequence)
        else:
            cache.commit(sequence, [], len(tokens))
            running.append(sequence)
        while running and (len(running) > 3 or rng.random() < 0.6):
            cache.free(running.pop(rng.randrange(len(running))))
        cache.now_ms += rng.randrange(12)


def test_the_scheduler_names_the_tenant() -> None:
    system = LocalSystem()
    system.attach(ToyWorker(block_size=4, num_blocks=40, max_num_seqs=4, max_batched_tokens=256))
    system.open("s")
    sampling = SamplingParams(top_p=1.0, max_tokens=2, ignore_eos=True)
    for handle in range(1, 6):
        retention = [RetentionRange(priority=100)]
        system.submit("s", handle, prompt(handle, 6), sampling, tenant="t", cache_retention=retention)
        system.run()
    (worker,) = system.cache.workers.values()
    assert {name: share.num_blocks for name, share in worker.device.shares.tenants.items()} == {"t": 10}


def test_the_first_tenant_keeps_the_retention_at_equal_priority() -> None:
    cache = link(num_blocks=40)
    stored(cache, 1, prompt(1, 4), retention=[(0, 0, 90, 0)], tenant="first")
    stored(cache, 2, prompt(1, 4), retention=[(0, 0, 90, 0)], tenant="second")
    assert (retained_blocks(cache, "first"), retained_blocks(cache, "second")) == (4, 0)
    stored(cache, 3, prompt(1, 4), retention=[(0, 0, 91, 0)], tenant="second")
    assert (retained_blocks(cache, "first"), retained_blocks(cache, "second")) == (0, 4)


def test_a_retention_that_fell_back_ends_once() -> None:
    """The block has already lost its position in the eviction order. The end of the duration changes nothing."""
    cache = link(num_blocks=40)
    for number in (1, 2):
        stored(cache, number, prompt(number, 8), retention=[(0, 0, 90, 1000)])
    assert retained_blocks(cache) == 10
    cache.run(3, prompt(3, 4))
    cache.now_ms = 1001
    cache.start(4, prompt(4, 24))
    assert [cache.probe(prompt(n, size))[0][0] for n, size in ((1, 8), (3, 4))] == [16, 16], "prompt 1 loses 4 blocks"


def test_below_a_prefix_that_the_host_lacks_each_tenant_is_charged_its_own_blocks() -> None:
    cache = link(num_blocks=24, retained=1.0, total=1.0, num_host=40)
    shared = prompt(1, 4)
    for number, (tenant, duration_ms) in enumerate([("a", 1000), ("b", 2000)], 2):
        stored(cache, number, [*shared, *prompt(number, 4)], retention=[(16, 0, 100, duration_ms)], tenant=tenant)
    cache.start(8, [*shared, 5])
    cache.start(9, prompt(9, 19))
    assert [retained_blocks(cache, tenant, on_host=True) for tenant in "ab"] == [4, 4]
    cache.now_ms = 1001
    cache.exchange()
    assert [retained_blocks(cache, tenant, on_host=True) for tenant in "ab"] == [0, 4]
    cache.now_ms = 2001
    cache.exchange()
    assert [retained_blocks(cache, tenant, on_host=True) for tenant in "ab"] == [0, 0]


def test_a_partial_block_falls_back_before_the_block_above_it() -> None:
    cache = Driver(retained=0.25, total_retained=0.5)
    cache.add_worker(0, 40, partial_reuse=True)
    ends_early = prompt(1, 3)[:-1]
    stored(cache, 1, ends_early)
    stored(cache, 2, prompt(2, 8))
    assert retained_blocks(cache) == 10
    cache.run(3, prompt(3, 30))
    assert cache.probe(ends_early) == {0: (8, 0)}


@pytest.mark.parametrize("num_host", [0, 32])
def test_a_retention_may_end_before_its_time(num_host: int) -> None:
    """It ends for the whole prefix and its partial block, in every memory. Another tenant's retention stays."""
    cache = Driver(retained=0.5, total_retained=1.0)
    cache.add_worker(0, 64, num_host_blocks=num_host, host_tier=num_host > 0, partial_reuse=True)
    ours, others = prompt(1, 5), prompt(2, 5)
    stored(cache, 1, [*ours, 7, 8], tenant="a")
    stored(cache, 2, others, tenant="b")
    for tokens, tenant, left in ((others, "a", (6, 5)), (ours[:10], "a", (6, 5)), ([*ours, 7, 8], "a", (0, 5))):
        cache.one(pb.CacheOp(end_retention=pb.EndRetentionOp(token_ids=d.pack(tokens), tenant=tenant)))
        assert (retained_blocks(cache, "a"), retained_blocks(cache, "b")) == left


def test_the_retention_of_a_prefix_without_a_whole_block_may_end_before_its_time() -> None:
    cache = Driver(retained=0.5, total_retained=1.0)
    cache.add_worker(0, 64, partial_reuse=True)
    stored(cache, 1, [7, 8, 9], tenant="a")
    assert retained_blocks(cache, "a") == 1
    cache.one(pb.CacheOp(end_retention=pb.EndRetentionOp(token_ids=d.pack([7, 8, 9]), tenant="a")))
    assert retained_blocks(cache, "a") == 0


def test_the_end_of_an_unknown_retention_changes_nothing() -> None:
    cache = link(num_blocks=16)
    for tokens in ([], [1, 2], prompt(3, 9)):
        cache.one(pb.CacheOp(end_retention=pb.EndRetentionOp(token_ids=d.pack(tokens), tenant="a")))
    stored(cache, 1, prompt(1, 2), tenant="a")
    cache.one(pb.CacheOp(end_retention=pb.EndRetentionOp(token_ids=d.pack(prompt(3, 9)), tenant="a")))
    assert retained_blocks(cache, "a") == 2


def test_a_retention_that_has_ended_does_not_end_again() -> None:
    """Otherwise its blocks would count as just used again."""
    cache = link(num_blocks=10, retained=0.7, total=0.7)
    first, second = prompt(1, 3), prompt(2, 3)
    for sequence, tokens in enumerate((first, second), 1):
        stored(cache, sequence, tokens, tenant="a")
    for tokens in (first, second, first):
        cache.one(pb.CacheOp(end_retention=pb.EndRetentionOp(token_ids=d.pack(tokens), tenant="a")))
    cache.run(3, prompt(3, 6))
    assert [cache.probe([*tokens, 0])[0][0] for tokens in (first, second)] == [4, 12]
