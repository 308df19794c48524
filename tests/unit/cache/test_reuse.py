"""Reused blocks and the eviction order: partial blocks, namespaces, strategies, retention."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cache_svc.core.errors import Code
from cache_svc.core.retention import DEFAULT_RETENTION
from tests.unit.cache import driver as d
from tests.unit.cache.driver import Driver, Refused

A = list(range(100, 116))  # 4 blocks of 4 tokens
B = list(range(200, 216))


def link(num_blocks: int = 16, eviction: str = "lru", partial_reuse: bool = True, workers: int = 1) -> Driver:
    made = Driver(eviction=eviction)
    for worker in range(workers):
        made.add_worker(worker, num_blocks, partial_reuse=partial_reuse)
    return made


def admitted(link: Driver, sequence: int, tokens: Sequence[int], worker: int = 0) -> tuple[int, list[int], int]:
    """Cached tokens, table, block to copy from."""
    link.match(sequence, tokens)
    result = link.one(d.admit_op(sequence, worker)).admit
    return result.num_cached_tokens, d.unpack(result.block_table), result.copy_from


# ── within a block ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_match_ends_where_the_tokens_differ_and_the_beginning_of_the_block_is_copied() -> None:
    cache = link()
    cache.run(1, A)
    assert cache.match(2, [*A[:6], 7, 7, 7]) == {0: (6, 0)}
    assert admitted(cache, 3, [*A[:6], 7, 7, 7]) == (6, [1, 5, 6], 2)
    cache.commit(3, [], 9)
    assert cache.probe([*A[:6], 7, 7]) == {0: (8, 8)}
    assert cache.probe(A) == {0: (16, 4)}


def test_without_partial_reuse_only_whole_blocks_are_reused() -> None:
    cache = link(partial_reuse=False)
    cache.run(1, A)
    assert cache.match(2, [*A[:6], 7, 7, 7]) == {0: (4, 0)}
    assert admitted(cache, 3, [*A[:6], 7, 7, 7]) == (4, [1, 5, 6], 0)


def test_the_last_token_of_a_prompt_is_never_a_cache_hit() -> None:
    cache = link()
    cache.run(1, A)
    assert admitted(cache, 2, A) == (15, [1, 2, 3, 5], 4)
    assert admitted(cache, 3, A[:1]) == (0, [6], 0)


def test_no_reuse_gets_new_blocks_and_others_reuse_the_cached_ones() -> None:
    cache = link()
    cache.run(1, A)
    cache.match(2, A)
    alone = cache.one(d.admit_op(2, 0, no_reuse=True)).admit
    assert (alone.num_cached_tokens, alone.copy_from) == (0, 0)
    assert not set(d.unpack(alone.block_table)) & {1, 2, 3, 4}
    cache.commit(2, [], 16)
    assert admitted(cache, 3, [*A, 7])[0] == 16
    cache.match(4, [*A, 8])
    part = cache.one(d.admit_op(4, 0, new_tokens=5, no_reuse=True)).admit
    assert len(d.unpack(part.block_table)) == 2
    assert cache.pools[0][2] == 4 + 5 + 2, "sequences with no_reuse use no cached block"
    cache.free(2, 3, 4)


def test_no_reuse_fits_a_pool_that_is_full_of_equal_blocks() -> None:
    cache = link(num_blocks=5)
    cache.run(1, A)
    cache.match(2, [*A, 7])
    alone = cache.one(d.admit_op(2, 0, no_reuse=True)).admit
    assert len(d.unpack(alone.block_table)) == 5
    cache.commit(2, [], 17)
    cache.free(2)
    assert cache.probe(A) == {0: (16, 0)}


def test_a_sequence_with_duplicates_cannot_be_forked() -> None:
    """A new sequence can still be admitted without a fork, and reuses the cached blocks."""
    cache = link()
    cache.run(1, A)
    cache.match(2, [*A, 7])
    cache.one(d.admit_op(2, 0, no_reuse=True))
    cache.commit(2, [], 17)
    cache.match(3, [*A, 7])
    with pytest.raises(Refused, match="cannot be forked") as refused:
        cache.one(d.fork_op(3, 0, 2))
    assert refused.value.code is Code.FAILED_PRECONDITION
    assert cache.admit(3, 0)[0] == 16
    cache.free(2, 3)


def test_the_block_with_the_longest_common_beginning_is_copied() -> None:
    cache = link(num_blocks=64)
    for i in range(30):
        cache.run(i, [*A[:4], i // 10, i % 10, 0, 0])
    for i in range(30):
        cached, _, source = admitted(cache, 100 + i, [*A[:4], i // 10, i % 10, 1, 1, 9])
        assert (cached, source) == (6, 2 + i)
        cache.free(100 + i)
    assert cache.match(200, [*A[:4], 2, 99, 0, 0, 9]) == {0: (5, 0)}
    assert cache.match(201, [*A[:4], 5, 0, 0, 0, 9]) == {0: (4, 0)}


def test_each_worker_matches_only_its_own_blocks() -> None:
    cache = link(workers=2)
    cache.run(1, [*A[:4], 1, 1, 1, 1])
    cache.run(2, [*A[:4], 1, 1, 2, 2], worker=1)
    tokens = [*A[:4], 1, 1, 2, 3, 9]
    assert cache.match(3, tokens) == {0: (6, 0), 1: (7, 0)}
    assert admitted(cache, 4, tokens, worker=0) == (6, [1, 3, 4], 2)
    assert admitted(cache, 5, tokens, worker=1) == (7, [1, 3, 4], 2)


def test_a_block_to_be_copied_is_not_granted_in_the_same_exchange() -> None:
    cache = link(num_blocks=6)
    cache.run(1, A[:8])
    ops = [d.match_op(2, [*A[:6], 7]), d.admit_op(2, 0), d.match_op(3, B), d.admit_op(3, 0)]
    results = cache.exchange(*ops).results
    assert (results[1].admit.copy_from, d.unpack(results[1].admit.block_table)) == (2, [1, 3])
    assert results[3].error.code == Code.RESOURCE_EXHAUSTED  # three are free, and block 2 is not granted
    assert admitted(cache, 5, B) == (0, [4, 5, 6, 2], 0)


def test_a_copy_that_would_need_its_own_source_is_left_out() -> None:
    cache = link(num_blocks=3)
    cache.run(1, A[:8])
    assert admitted(cache, 2, [*A[:6], 7, 7, 7]) == (4, [1, 3, 2], 0)


# ── namespaces ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_two_salts_share_no_cached_blocks() -> None:
    cache = link()

    def matched(sequence: int, salt: str) -> list[int]:
        result = cache.one(d.match_op(sequence, A, salt=salt))
        return [match.num_tokens for match in result.match.matches]

    assert matched(1, "pepper") == []
    cache.admit(1, 0)
    cache.commit(1, [], 16)
    assert (matched(2, "pepper"), matched(3, ""), matched(4, "salt")) == ([15], [], [])
    with pytest.raises(Refused) as refused:  # a fork shares none, either
        cache.one(d.fork_op(3, 0, 1))
    assert refused.value.code is Code.FAILED_PRECONDITION


@pytest.mark.parametrize("name", ["model", "lora", "cache_salt"])
def test_two_namespace_names_share_no_cached_blocks(name: str) -> None:
    cache = link()

    def matched(sequence: int, value: str) -> list[int]:
        op = d.match_op(sequence, A)
        setattr(op.match.namespace, name, value)
        return [match.num_tokens for match in cache.one(op).match.matches]

    assert matched(1, "x") == []
    cache.admit(1, 0)
    cache.commit(1, [], 16)
    assert [matched(sequence, value) for sequence, value in enumerate(["x", "", "xy", "x"], 2)] == [[15], [], [], [15]]


def test_an_empty_namespace_is_forgotten() -> None:
    cache = link(num_blocks=4)
    assert cache.core.tree is not None
    for i, salt in enumerate(["a", "b", "c"]):
        cache.one(d.match_op(i, A, salt=salt))
        cache.admit(i, 0)
        cache.commit(i, [], 16)
        cache.free(i)
        assert [namespace.cache_salt for namespace in cache.core.tree.roots] == [salt]


# ── what is evicted first ────────────────────────────────────────────────────────────────────────────────────────────


def keeps(cache: Driver, *prompts: Sequence[int]) -> list[bool]:
    return [0 in cache.probe(prompt) for prompt in prompts]


def stored(cache: Driver, sequence: int, prompt: Sequence[int], **metadata: object) -> None:
    cache.one(d.match_op(sequence, prompt, **metadata))  # type: ignore[arg-type]
    cache.admit(sequence, 0)
    cache.commit(sequence, [], len(prompt))
    cache.free(sequence)


# Prompts of one block each.
ONE, TWO, THREE = [1] * 4, [2] * 4, [3] * 4


@pytest.mark.parametrize(
    ("eviction", "kept"),
    [
        ("lru", [True, False, True]),
        ("lfu", [True, True, False]),
        ("slru", [True, False, True]),
        ("fifo", [False, True, True]),
        ("priority", [True, True, False]),
    ],
)
def test_each_strategy_evicts_by_its_rule(eviction: str, kept: list[bool]) -> None:
    cache = link(num_blocks=4, eviction=eviction, partial_reuse=False)
    for sequence, (prompt, priority) in enumerate(((ONE, 2.0), (TWO, 1.0), (THREE, 0.0))):
        stored(cache, sequence, prompt, priority=priority)
    for prompt in (TWO, ONE, ONE) if eviction == "lfu" else (ONE, ONE):
        cache.run(9, [*prompt, 7])
    cache.start(10, A[:8])  # takes the free block, and evicts a cached one
    assert keeps(cache, ONE, TWO, THREE) == kept


def test_retention_comes_before_the_strategy() -> None:
    cache = link(num_blocks=4, partial_reuse=False)
    stored(cache, 1, ONE, retention=[(0, 0, 80, 0)])
    stored(cache, 2, TWO)
    stored(cache, 3, THREE, retention=[(0, 0, 10, 0)])
    cache.start(4, A[:8])
    assert keeps(cache, ONE, TWO, THREE) == [True, True, False]
    cache.extend(4)
    assert keeps(cache, ONE, TWO, THREE) == [True, False, False]


def test_retention_lasts_for_its_duration_after_the_last_use() -> None:
    cache = link(num_blocks=2, partial_reuse=False)
    stored(cache, 1, ONE, retention=[(0, 0, 80, 100)])
    cache.now_ms = 50
    stored(cache, 2, TWO)
    cache.now_ms = 99
    cache.start(3, THREE)
    assert keeps(cache, ONE, TWO) == [True, False]
    cache.now_ms = 100
    cache.free(3)
    stored(cache, 4, TWO)
    cache.start(5, THREE)
    assert keeps(cache, ONE, TWO) == [False, True]


def test_each_reuse_renews_a_retention() -> None:
    """A request without its own retention is a use too: the duration begins again when the request ends."""
    cache = link(num_blocks=3, partial_reuse=False)
    stored(cache, 1, ONE, retention=[(0, 0, 80, 100)])
    cache.now_ms = 90
    cache.run(2, [*ONE, 7])
    cache.now_ms = 189
    stored(cache, 3, TWO)
    cache.start(4, A[:8])  # takes the free block and the block of TWO, which is not retained
    assert keeps(cache, ONE, TWO) == [True, False]
    cache.free(4)
    cache.now_ms = 190
    stored(cache, 5, TWO)
    cache.start(6, A[:8])
    assert keeps(cache, ONE, TWO) == [False, True]


def test_a_later_request_sets_the_retention_of_its_hits() -> None:
    """Also if the request computes no whole block."""
    cache = link(num_blocks=3, partial_reuse=False)
    stored(cache, 1, ONE)
    stored(cache, 2, [*ONE, 7], retention=[(0, 0, 80, 0)])
    stored(cache, 3, TWO)
    cache.start(4, A[:8])
    assert keeps(cache, ONE, TWO) == [True, False]
    cache.free(4)
    stored(cache, 5, [*ONE, 7], retention=[(0, 0, 10, 0)])
    stored(cache, 6, TWO)
    cache.start(7, A[:8])
    assert keeps(cache, ONE, TWO) == [False, True], "the newest priority counts, also if it is lower"


def test_a_retained_range_keeps_the_tokens_before_it() -> None:
    """A block could not be reused without the blocks before it, so these are kept, too."""
    cache = link(num_blocks=5, partial_reuse=False)
    stored(cache, 1, A, retention=[(8, 12, 90, 0)])
    cache.start(2, ONE)
    cache.extend(2)
    assert cache.probe(A) == {0: (12, 0)}  # the last block had no priority of its own
    cache.extend(2)
    assert cache.probe(A) == {0: (8, 0)}


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([(0, 4, 101, 0)], "priority: 101 is not within 0..100"),
        ([(4, 4, 50, 0)], "end: 4 is not after start, 4"),
        ([(0, 8, 50, 0), (4, 12, 50, 0)], "start: 4 lies within another range, which begins before it"),
        ([(0, 0, 50, 0), (4, 12, 50, 0)], "start: 4 lies within another range, which begins before it"),
    ],
)
def test_invalid_ranges_are_refused(ranges: d.Retention, message: str) -> None:
    cache = link()
    with pytest.raises(Refused, match=message) as refused:
        cache.one(d.match_op(1, A, retention=ranges))
    assert refused.value.code is Code.INVALID_ARGUMENT
    assert not cache.core.waiting


def test_a_retention_may_end_while_its_block_is_not_in_the_eviction_queue() -> None:
    """A prompt on another worker splits the node. Its front part enters the queue only when its back part is evicted.
    `upcoming` still gives the order in which the blocks are evicted."""
    cache = link(num_blocks=4, partial_reuse=False, workers=2)
    cache.one(d.match_op(1, A[:8], retention=[(0, 0, 80, 10)]))
    cache.admit(1, 0)
    cache.commit(1, [], 8)
    cache.free(1)
    cache.run(2, [*A[:4], 1, 1, 1, 1], worker=1)
    cache.now_ms = 20
    cache.run(3, B[:4])
    device = cache.core.workers[0].device
    foretold = [block for residency in device.queue.upcoming(device.index) for block in residency.blocks]
    cache.start(4, [7] * 4)  # takes the free one
    assert foretold == [cache.extend(4)[0] for _ in range(3)] == [2, 1, 3]


def test_a_retention_ends_once() -> None:
    """A block is set aside if its turn comes while its child is cached. When the child is evicted, the block is next,
    and its retention ends only once."""
    cache = link(num_blocks=4, partial_reuse=False)
    stored(cache, 1, A[:8], retention=[(0, 4, 35, 10), (4, 8, 80, 0)])
    stored(cache, 2, ONE, retention=[(0, 0, 80, 10)])
    assert cache.start(3, [7] * 8)[1] == [4, 2]  # the free one, and the child's
    cache.now_ms = 20
    assert cache.extend(3) == [1]
    assert cache.extend(3) == [3]


def test_retentions_that_end_together_end_in_the_order_of_use() -> None:
    """This also holds if the last block of the sequence that was used earlier is already evicted."""
    cache = link(num_blocks=4, partial_reuse=False)
    stored(cache, 1, A[:8], retention=[(0, 0, 80, 10)])
    stored(cache, 2, ONE, retention=[(0, 0, 80, 10)])
    assert cache.start(3, [7] * 8)[1] == [4, 2]
    cache.now_ms = 20
    assert cache.extend(3) == [1]
    assert cache.extend(3) == [3]


def test_repeated_uses_of_retained_blocks_leave_few_old_entries() -> None:
    """The queue keeps few old entries, both of a block that is used repeatedly and of evicted blocks."""
    cache = link(num_blocks=6)
    hour = 3_600_000
    for i in range(300):
        stored(cache, i + 1, [*A[:8], i, i, i, i], retention=[(0, 8, 90, hour), (8, 0, 0, hour)])
    assert len(cache.core.workers[0].device.queue._expiries) < 100
    cache.now_ms = hour
    cache.exchange()
    retentions = {residency.retention for residency in cache.core.workers[0].device.queue.upcoming(0)}
    assert retentions == {DEFAULT_RETENTION}
