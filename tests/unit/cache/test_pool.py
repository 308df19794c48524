"""The pool alone: states, order, and what evicting costs."""

from __future__ import annotations

import time

from cache_svc.core.pool import BlockPool


def cached(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.take(count)
    assert pool.drop(blocks) == blocks
    return blocks


def test_blocks_are_handed_out_free_first_then_evicted_oldest_first() -> None:
    evicted: list[int] = []
    pool = BlockPool(6, evicted.extend)
    assert pool.take(2) == [1, 2]
    assert cached(pool, 2) == [3, 4]
    pool.recycle([2, 1])
    assert (pool.free_blocks, pool.cached_blocks, pool.used_blocks, pool.available_blocks) == (4, 2, 0, 6)
    assert pool.take(5) == [1, 2, 5, 6, 3]
    assert evicted == [3]
    assert pool.take(1) == [4]
    assert evicted == [3, 4]
    assert pool.evicted_blocks_total == 2
    assert pool.available_blocks == 0
    assert pool.take(0) == []


def test_a_block_is_cached_when_its_last_user_leaves_and_used_when_one_comes() -> None:
    pool = BlockPool(3, lambda _: None)
    blocks = pool.take(2)
    pool.share([1])
    assert pool.drop(blocks) == [2]
    assert (pool.free_blocks, pool.cached_blocks, pool.used_blocks) == (1, 1, 1)
    pool.revive([2])
    assert (pool.free_blocks, pool.cached_blocks, pool.used_blocks) == (1, 0, 2)
    assert pool.drop([2, 1]) == [2, 1]
    assert pool.cached_block_ids() == [2, 1]


def test_evicting_one_block_costs_the_same_in_a_large_pool() -> None:
    """A scan over what was evicted before would make the large pool hundreds of times slower."""

    def seconds_per_block(num_blocks: int) -> float:
        pool = BlockPool(num_blocks, lambda _: None)
        cached(pool, num_blocks)
        best_s = float("inf")
        for _ in range(5):
            began_s = time.perf_counter()
            for _ in range(200):
                pool.take(1)
            best_s = min(best_s, (time.perf_counter() - began_s) / 200)
        return best_s

    assert seconds_per_block(200_000) < 10 * seconds_per_block(1_000)
