"""A match may end within a block that only the host has: neither tier loses tokens to the block size."""

from __future__ import annotations

import pytest

from tests.unit.cache import driver as d
from tests.unit.cache.driver import Driver
from tests.unit.cache.test_host_tier import admitted, link, tiers

A = list(range(100, 116))  # 4 blocks of 4 tokens
FILL, OTHER = [7] * 32, [8] * 32  # each takes all of the device


def host(num_host: int = 16, num_blocks: int = 8) -> Driver:
    return link(num_host, num_blocks, partial_reuse=True)


def demoted(*prompts: list[int]) -> Driver:
    """A cache in which the blocks of these prompts are only on the host."""
    cache = host()
    for sequence, prompt in enumerate(prompts, 10):
        cache.run(sequence, prompt)
    cache.run(50, FILL)
    return cache


def test_a_partial_block_is_demoted_and_comes_back() -> None:
    cache = demoted(A[:6])
    assert tiers(cache, A[:6]) == (0, 6)
    cached, table, pairs = admitted(cache, 1, A[:9])
    assert (cached, pairs) == (6, [(table[0], 1), (table[1], 2)])
    counters = cache.core.counters
    assert (counters.demoted_tails, counters.copied_blocks, counters.copied_host_blocks) == (1, 1, 1)
    cache.free(1)
    assert admitted(cache, 2, A[:5])[0] == 4  # on the device now


def test_a_partial_block_that_makes_room_in_the_same_exchange_was_not_demoted() -> None:
    cache = host(num_host=2)
    cache.run(10, A[:6])  # a whole and a partial block, which stay cached
    cache.start(1, [5] * 8)
    cache.commit(1, [], 8)
    ops = d.match_op(2, [6] * 24), d.admit_op(2, 0, 24), d.swap_out_op(1)  # sequence 2 evicts both, 1 takes their room
    assert not [result.error for result in cache.exchange(*ops).results if result.HasField("error")]
    assert cache.core.counters.demoted_blocks == 0
    cache.free(1, 2)
    cache.run(3, [8] * 8)
    cache.run(4, FILL)
    assert cache.core.counters.demoted_blocks > cache.core.counters.demoted_tails == 0


def test_a_prompt_that_comes_again_is_reused_to_its_last_token_but_one() -> None:
    cache = Driver()
    cache.add_worker(0, 2, 16, num_host_blocks=4, partial_reuse=True, host_tier=True)
    cache.run(1, A + A[:2])
    cache.run(2, FILL)
    cached, _, pairs = admitted(cache, 3, A + A[:2])
    assert (cached, len(pairs)) == (17, 2)


def test_a_match_may_end_within_a_whole_host_block() -> None:
    cache = demoted(A[:8])
    assert admitted(cache, 1, [*A[:6], 5, 5])[0] == 6
    cache.free(1)
    assert admitted(cache, 2, [*A[:3], 5])[0] == 3
    counters = cache.core.counters
    assert (counters.demoted_tails, counters.copied_blocks, counters.copied_host_blocks) == (0, 2, 2)


def test_a_beginning_outlives_the_block_that_it_was_copied_from() -> None:
    """The source is evicted as if it had not been copied. The copy has the same beginning and is newer."""
    cache = host(num_host=4, num_blocks=4)
    cache.run(1, A[:4])
    cache.run(2, FILL[:16])  # A is on the host, and is the oldest there
    cache.run(3, [*A[:3], 5])
    cache.run(4, OTHER[:16])  # demotes the copy and three blocks of FILL, so the host drops A
    assert [tiers(cache, tokens) for tokens in (A[:4], A[:3], [*A[:3], 5])] == [(0, 3), (0, 3), (0, 4)]


def test_a_partial_host_block_after_device_blocks() -> None:
    cache = host()
    cache.run(1, A[:6])
    cache.start(2, [7] * 28)  # the partial block is evicted, the block before it stays
    assert tiers(cache, A[:6]) == (4, 2)
    cache.free(2)
    cached, table, pairs = admitted(cache, 3, A[:6])
    assert (cached, pairs) == (5, [(table[1], 1)])


@pytest.mark.parametrize("on_device", [1, 2, 3])
def test_the_longer_partial_block_is_copied(on_device: int) -> None:
    cache = host()
    cache.run(1, A[:6])
    cache.start(2, [7] * 28)
    cache.free(2)
    cache.run(3, [*A[: 4 + on_device], 5])
    cached, _, pairs = admitted(cache, 4, A[:8])
    assert (cached, len(pairs)) == (max(6, 4 + on_device), on_device < 2)


def test_a_partial_block_that_the_host_covers_is_not_demoted() -> None:
    cache = demoted(A[:8])
    cache.run(1, A[:3])  # leaves a partial block of three tokens, two of them from the host; evicts a block of FILL
    cache.start(2, OTHER)
    assert tiers(cache, A[:3]) == (0, 3)
    assert cache.core.counters.demoted_blocks == 2 + 8  # of A and FILL


def test_a_partial_block_is_dropped_when_a_block_that_covers_it_comes() -> None:
    cache = demoted(A[:6])
    cache.run(1, A[:8])
    cache.start(2, OTHER)
    assert tiers(cache, A[:8]) == (0, 8)
    assert cache.cached_host[0] == 2 + 8  # of A and FILL


def test_the_source_of_a_partial_copy_is_no_target_in_the_same_exchange() -> None:
    """The host is full, so an evicted block would be copied into a host block that the admission reads."""
    cache = host(num_host=2, num_blocks=3)
    cache.run(1, A[:6])
    cache.run(2, [7] * 12)  # evicts both
    cached, table, pairs = admitted(cache, 3, [*A[:6], 9, 9])
    assert cached == 6
    sources = {source for _, source in pairs}
    assert not sources & {target for _, target in cache.demotions[-len(table) :]}


def test_without_room_for_the_copy_an_admission_uses_the_device_blocks_alone() -> None:
    cache = host(num_blocks=4)
    cache.run(1, A[:6])
    cache.run(2, [7] * 12)
    cache.run(5, A[:4])  # A's first block is now the last used one
    cache.start(3, [8] * 8)  # one block of A and one of the other are left
    assert tiers(cache, A[:6]) == (4, 2)
    cache.match(4, A[:12])
    result = cache.one(d.admit_op(4, 0, new_tokens=3)).admit  # 6 + 3 tokens need two more blocks, 4 + 3 need one
    assert (result.num_cached_tokens, d.pairs(result)) == (4, [])
    assert len(d.unpack(result.block_table)) == 2


def test_a_longer_partial_block_replaces_a_shorter_one() -> None:
    cache = demoted(A[:5])
    cache.run(1, A[:7])
    cache.start(2, OTHER)
    assert tiers(cache, A[:8]) == (0, 7)
    assert cache.cached_host[0] == 2 + 8  # of A and FILL


def test_without_room_for_the_copy_an_admission_uses_the_whole_host_blocks() -> None:
    cache = host(num_blocks=3)
    cache.run(1, A[:10])
    cache.run(2, [7] * 12)
    cache.match(3, A[:14])
    result = cache.one(d.admit_op(3, 0, new_tokens=3)).admit  # 10 + 3 tokens need four blocks, 8 + 3 three
    table = d.unpack(result.block_table)
    assert (result.num_cached_tokens, len(table)) == (8, 3)
    assert d.pairs(result) == [(table[0], 1), (table[1], 2)]
