"""The pool and the memory alone: states, order, and what evicting costs."""

from __future__ import annotations

import time
from array import array

from cache_svc.core.memory.memory import Memory
from cache_svc.core.memory.pool import BlockPool
from cache_svc.core.tree.nodes import Namespace, PrefixNode
from cache_svc.core.tree.tree import PrefixTree


def test_the_last_block_given_back_goes_out_first() -> None:
    pool = BlockPool(6)
    assert list(pool.take(4)) == [1, 2, 3, 4]
    pool.give_back(array("i", [4, 2]))
    assert (pool.num_free, pool.given_back()) == (4, [4, 2])
    assert list(pool.take(3)) == [2, 4, 5]
    assert list(pool.take(3)) == [6]
    assert not pool.take(1)
    assert not pool.num_free


def cached(memory: Memory, tokens: bytes) -> PrefixNode:
    node = memory.tree.grow(memory.tree.acquire_root(Namespace()), tokens)
    memory.hold(node, memory.take(node.end))
    memory.leave_path(node)
    return node


def test_free_blocks_are_granted_first_and_then_the_oldest_node_is_evicted_from_its_end() -> None:
    memory = Memory(0, PrefixTree(1), 6, keeps=True)
    cached(memory, b"aaaabbbbcccc")
    cached(memory, b"dddd")
    assert (memory.free_blocks, memory.cached_blocks, memory.used_blocks, memory.available_blocks) == (2, 4, 0, 6)
    assert list(memory.take(3)) == [5, 6, 3]
    assert [list(residency.blocks) for residency in memory.queue.upcoming(0)] == [[1, 2], [4]]
    assert list(memory.take(3)) == [2, 1, 4]
    assert memory.evicted_blocks_total == 4
    assert not memory.available_blocks
    assert not memory.take(0)


def test_a_node_is_cached_when_its_last_user_leaves_and_used_when_one_comes() -> None:
    memory = Memory(0, PrefixTree(1), 3, keeps=True)
    node = cached(memory, b"aaaabbbb")
    for _ in range(2):
        assert list(memory.use_path(node)) == [1, 2]
    memory.leave_path(node)
    assert (memory.cached_blocks, memory.used_blocks) == (0, 2)
    memory.leave_path(node)
    assert (memory.cached_blocks, memory.used_blocks) == (2, 0)


def test_unused_blocks_are_free_at_once_in_a_memory_that_keeps_nothing() -> None:
    memory = Memory(0, PrefixTree(1), 3, keeps=False)
    cached(memory, b"aaaabbbb")
    assert (memory.free_blocks, memory.cached_blocks) == (3, 0)
    assert not memory.tree.roots[Namespace()].children


def test_evicting_one_block_costs_the_same_in_a_large_memory() -> None:
    """A scan over evicted or present nodes would make the large pool about 100 times slower than the small one."""

    def seconds_per_block(num_blocks: int) -> float:
        memory = Memory(0, PrefixTree(1), num_blocks, keeps=True)
        for i in range(num_blocks):
            cached(memory, i.to_bytes(4, "little"))
        best_s = float("inf")
        for _ in range(5):
            began_s = time.perf_counter()
            for _ in range(200):
                memory.take(1)
            best_s = min(best_s, (time.perf_counter() - began_s) / 200)
        return best_s

    assert seconds_per_block(100_000) < 10 * seconds_per_block(1_000)
