"""Blocks that the device evicts go to host memory, and come back when a sequence needs them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cache_svc.core.errors import Code
from cache_svc.core.tree.nodes import subtree
from tests.unit.cache import driver as d
from tests.unit.cache.driver import Driver, Refused

A = list(range(100, 116))  # 4 blocks of 4 tokens
B = list(range(200, 216))
C = list(range(300, 316))
D = list(range(400, 416))
FILL = [7] * 32


def link(num_host: int = 8, num_blocks: int = 8, partial_reuse: bool = False, eviction: str = "lru") -> Driver:
    made = Driver(eviction=eviction)
    made.add_worker(0, num_blocks, num_host_blocks=num_host, partial_reuse=partial_reuse, host_tier=True)
    return made


def tiers(cache: Driver, tokens: Sequence[int]) -> tuple[int, int]:
    """How many of these tokens are on the device, and how many of the next ones on the host."""
    result = cache.one(d.match_op(99, [*tokens, -1])).match
    cache.free(99)
    matches = d.tiers(result.matches)
    return (matches[0][0], matches[0][2]) if matches else (0, 0)


def admitted(cache: Driver, sequence: int, tokens: Sequence[int]) -> tuple[int, list[int], list[tuple[int, int]]]:
    """Cached tokens, table, (device block, host block)."""
    cache.match(sequence, tokens)
    result = cache.one(d.admit_op(sequence, 0)).admit
    return result.num_cached_tokens, d.unpack(result.block_table), d.pairs(result)


def test_an_evicted_block_is_copied_to_the_host_and_found() -> None:
    cache = link()
    cache.run(1, A)
    cache.start(2, FILL)
    assert cache.demotions == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert tiers(cache, A) == (0, 16)
    assert (cache.host_pools[0], cache.cached_host[0]) == ((4, 0), 4)
    assert cache.pools[0] == (0, 0, 8, 4)
    counters = cache.core.counters
    assert (counters.demoted_blocks, counters.evicted_blocks, counters.evicted_host_blocks) == (4, 4, 0)
    cache.free(2)
    cache.run(3, [8] * 32)
    cache.start(4, [9] * 32)
    assert (counters.demoted_blocks, counters.evicted_blocks, counters.evicted_host_blocks) == (12, 12, 4)


def test_a_host_hit_gets_new_device_blocks_and_stays_on_the_host() -> None:
    cache = link()
    cache.run(1, A)
    cache.run(2, FILL)
    cached, table, pairs = admitted(cache, 3, [*A, 5])
    assert cached == 16
    assert [host for _, host in pairs] == [1, 2, 3, 4]
    assert [device for device, _ in pairs] == table[:4]
    assert cache.core.counters.promoted_blocks == 4
    assert tiers(cache, A) == (0, 16)  # until a commit says that the blocks are copied
    cache.commit(3, [], 16)
    assert tiers(cache, A) == (16, 0)
    cache.free(3)
    cache.start(4, FILL[:31])
    assert 1 not in [host for _, host in cache.demotions]  # the host still has block 1, so it is not copied again
    assert tiers(cache, A) == (0, 16)


def test_nothing_is_reported_that_was_never_copied() -> None:
    cache = link()
    cache.run(1, A)
    cache.run(2, FILL)
    admitted(cache, 3, [*A, 5])
    cache.free(3)
    assert tiers(cache, A) == (0, 16)


def test_the_device_has_the_beginning_and_the_host_the_rest() -> None:
    cache = link()
    cache.run(1, A)
    cache.start(2, FILL[:24])  # six blocks: the last two of A go
    assert tiers(cache, A) == (8, 8)
    cache.free(2)
    cached, table, pairs = admitted(cache, 3, [*A, 5])
    assert (cached, table[:2]) == (16, [1, 2])
    assert [device for device, _ in pairs] == table[2:4]


def test_a_hit_may_end_within_the_host_blocks() -> None:
    cache = link()
    cache.run(1, A)
    cache.run(2, FILL)
    cached, table, pairs = admitted(cache, 3, [*A[:8], 1, 2])
    assert (cached, len(table), [host for _, host in pairs]) == (8, 3, [1, 2])


def test_the_last_token_is_always_computed() -> None:
    cache = link()
    cache.run(1, A)
    cache.run(2, FILL)
    assert admitted(cache, 3, A)[0] == 12


def test_no_part_of_a_block_is_copied_if_the_host_has_a_whole_one() -> None:
    cache = link(partial_reuse=True)
    cache.run(1, A)
    cache.start(2, FILL[:20])  # five blocks: the last of A goes
    cache.free(2)
    cache.run(3, [*A[:14], 1, 1])
    assert tiers(cache, A) == (12, 4)
    cache.match(4, [*A, 5])
    result = cache.one(d.admit_op(4, 0)).admit
    assert (result.num_cached_tokens, result.copy_from, len(d.pairs(result))) == (16, 0, 1)


def test_the_least_recently_used_block_makes_room() -> None:
    cache = link(num_host=8, num_blocks=4)
    for number, tokens in enumerate((A, B, C[:12]), 1):
        cache.run(number, tokens)
    cache.run(4, [*A[:5], 5])  # reuses A's first block, and evicts C's last block for its second one
    assert (tiers(cache, A), tiers(cache, B)) == ((4, 8), (0, 16))
    cache.run(5, FILL[:16])  # C replaces A's blocks on the host, except the first; B's blocks would be next
    assert (tiers(cache, A), tiers(cache, B), tiers(cache, C)) == ((0, 4), (0, 16), (0, 12))


def test_the_host_keeps_the_last_used_of_blocks_evicted_together() -> None:
    cache = link(num_host=6)
    cache.run(1, A)
    cache.run(2, B)
    cache.start(3, FILL)
    assert (tiers(cache, A), tiers(cache, B)) == ((0, 8), (0, 16))


def test_a_block_without_room_on_the_host_is_dropped_with_the_host_blocks_after_it() -> None:
    cache = link(num_host=4)
    cache.run(1, A)
    cache.start(2, FILL[:20])  # the last block of A goes to the host
    assert tiers(cache, A) == (12, 4)
    cache.free(2)
    cache.run(3, B)
    cache.start(4, C[:10])
    cache.commit(4, [], 10)
    cache.swap_out(4)  # takes host blocks
    cache.start(5, FILL)
    assert tiers(cache, A)[0] == 0
    assert cache.core.workers[0].host.used_blocks == 3


def test_host_blocks_dropped_with_their_parent_count_as_evicted() -> None:
    cache = link(num_host=4)
    cache.run(1, A)
    cache.start(2, FILL[:20])  # the last block of A goes to the host
    cache.free(2)
    cache.run(3, [*A, 5])  # it comes back, and stays on the host
    cache.start(4, C[:10])
    cache.commit(4, [], 10)
    cache.swap_out(4)  # takes the other host blocks
    assert cache.core.counters.evicted_host_blocks == 0
    # The only cached host block is A's last one. It may not make room for A's first blocks, so the host drops all of A.
    cache.start(5, FILL)
    assert tiers(cache, A) == (0, 0)
    assert cache.core.counters.evicted_host_blocks == 1


def test_a_host_without_room_keeps_nothing() -> None:
    cache = link(num_host=3)
    cache.start(1, B[:10])
    cache.commit(1, [], 10)
    cache.swap_out(1)
    cache.run(2, A)
    cache.start(3, FILL)
    assert cache.demotions == []
    assert tiers(cache, A) == (0, 0)


def test_the_host_keeps_as_many_first_blocks_as_it_has_room_for() -> None:
    cache = link(num_host=3)
    cache.run(1, A)
    cache.start(2, FILL)
    assert cache.demotions == [(1, 1), (2, 2), (3, 3)]
    assert tiers(cache, A) == (0, 12)


def test_a_swapped_sequence_takes_cached_host_blocks() -> None:
    cache = link(num_host=4)
    cache.run(1, A)
    cache.run(2, FILL)
    cache.start(3, B[:10])
    cache.commit(3, [], 10)
    assert len(cache.swap_out(3)) == 3
    assert cache.host_pools[0] == (0, 3)
    assert cache.cached_host[0] == 1
    cache.start(4, C[:10])
    cache.commit(4, [], 10)
    with pytest.raises(Refused) as refused:  # the blocks of a swapped-out sequence are not evicted
        cache.swap_out(4)
    assert refused.value.code is Code.RESOURCE_EXHAUSTED


def test_a_block_is_not_source_and_target_of_copies_in_one_exchange() -> None:
    cache = link(num_host=4)
    cache.run(1, A)
    cache.run(2, FILL)  # A is on the host, which is full
    ops = [d.match_op(3, [*A, 5]), d.admit_op(3, 0)]
    response = cache.exchange(*ops)
    read = {host for _, host in d.pairs(response.results[1].admit)}
    written = {host for moves in response.demotions for _, host in d.pairs(moves)}
    assert read == {1, 2, 3, 4}
    assert not written
    assert tiers(cache, A) == (0, 16)


def test_host_blocks_of_a_resumed_sequence_are_free_in_the_next_exchange() -> None:
    cache = link(num_host=3)
    cache.start(1, A[:10])
    cache.commit(1, [], 10)
    cache.swap_out(1)
    cache.run(2, FILL)
    response = cache.exchange(d.swap_in_op(1), d.match_op(3, C[:10]), d.admit_op(3, 0))
    assert not response.demotions
    assert cache.host_pools[0] == (3, 0)


def test_a_block_is_copied_to_once_in_an_exchange() -> None:
    """Only the last copy into a host block counts; earlier content is lost."""
    cache = link(num_host=2, num_blocks=4)
    cache.run(1, A[:8])
    cache.run(2, B[:8])
    response = cache.exchange(d.match_op(3, FILL[:8]), d.admit_op(3, 0), d.match_op(4, C[:8]), d.admit_op(4, 0))
    (moves,) = response.demotions
    assert sorted(host for _, host in d.pairs(moves)) == [1, 2]
    assert {device for device, _ in d.pairs(moves)} == {3, 4}
    assert (tiers(cache, A[:8]), tiers(cache, B[:8])) == ((0, 0), (0, 8))


def test_retention_continues_in_host_memory() -> None:
    cache = link(num_host=6, num_blocks=4)
    cache.one(d.match_op(1, A, retention=[(0, 0, 80, 50)]))
    cache.run(2, B)
    cache.admit(1, 0)
    cache.commit(1, [], 16)  # B goes to the host
    cache.free(1)
    cache.run(3, C)  # A goes to the host too, and takes two of B's host blocks
    assert (tiers(cache, A), tiers(cache, B)) == ((0, 16), (0, 8))
    cache.run(4, FILL[:16])  # C takes B's other two, and then two of A's
    assert (tiers(cache, A), tiers(cache, B), tiers(cache, C)) == ((0, 8), (0, 0), (0, 16))
    cache.run(5, D)  # FILL takes the blocks of C, which was used later than A
    assert (tiers(cache, A), tiers(cache, C)) == ((0, 8), (0, 0))
    cache.now_ms = 100
    cache.run(6, B)
    cache.run(7, C)  # the retention has ended, so A was evicted
    assert tiers(cache, A) == (0, 0)


def test_without_host_memory_an_evicted_block_is_lost() -> None:
    cache = Driver()
    cache.add_worker(0, 8, num_host_blocks=8)
    cache.run(1, A)
    cache.start(2, FILL)
    assert (cache.demotions, tiers(cache, A)) == ([], (0, 0))


def test_a_worker_takes_its_host_memory_with_it() -> None:
    cache = link()
    cache.run(1, A)
    cache.start(2, FILL[:24])
    cache.remove_worker(0)
    cache.add_worker(0, 8, num_host_blocks=8, host_tier=True)
    assert tiers(cache, A) == (0, 0)


def test_a_waiting_sequence_learns_that_the_host_dropped_its_match() -> None:
    cache = link(num_host=4)
    cache.run(1, A)
    cache.run(2, FILL)
    cache.match(3, [*A, 5])
    response = cache.exchange(d.match_op(4, C), d.admit_op(4, 0))
    updates = {update.sequence: d.tiers(update.matches) for update in response.match_updates}
    assert updates[3] == {}


def test_a_demoted_block_keeps_a_priority_below_0() -> None:
    link = d.Driver(eviction="priority")
    link.add_worker(0, 1, num_host_blocks=2, host_tier=True)
    for sequence, priority in ((1, 0.0), (2, -2.0), (3, 0.0)):
        link.one(d.match_op(sequence, [sequence] * 4, priority))
        link.admit(sequence, 0)
        link.commit(sequence, [], 4)
        link.free(sequence)
    link.start(4, [7] * 4)  # the third block is demoted too, so the host drops the one of lowest priority
    found = [d.tiers(link.one(d.match_op(10 + i, [i] * 5)).match.matches) for i in (1, 2, 3)]
    assert found == [{0: (0, 0, 4)}, {}, {0: (0, 0, 4)}]


def test_blocks_evicted_one_by_one_form_a_run_again() -> None:
    link = d.Driver()
    link.add_worker(0, 8, num_host_blocks=16, host_tier=True)
    prompt = list(range(32))
    link.run(1, prompt)
    link.start(2, [99])
    for _ in range(7):
        link.extend(2)
    assert link.core.tree is not None
    assert [node.end for node in subtree(*link.core.tree.roots.values())] == [8]
    assert d.tiers(link.one(d.match_op(3, [*prompt, 1])).match.matches) == {0: (0, 0, 32)}
    link.free(2, 3)
    link.match(4, prompt[:29])
    admit = link.one(d.admit_op(4, 0)).admit
    assert (admit.num_cached_tokens, d.unpack(admit.host_blocks)) == (28, [8, 7, 6, 5, 4, 3, 2])


def test_a_block_keeps_its_priority_between_device_and_host() -> None:
    """Also a priority below 0, when the block is evicted again and the host already has a copy."""
    cache = link(eviction="priority")
    for sequence in (1, 3):
        cache.exchange(d.match_op(sequence, [*A, 5], priority=-2.0), d.admit_op(sequence, 0))
        cache.commit(sequence, [], 17)
        cache.free(sequence)
        cache.run(sequence + 1, FILL)
    host = cache.core.workers[0].host
    assert cache.core.tree is not None
    held = [
        node.residencies[host.index]
        for node in subtree(*cache.core.tree.roots.values())
        if host.index in node.residencies
    ]
    assert {residency.priority for residency in held if residency.node.key == d.pack(A)} == {-2.0}


def test_without_host_blocks_there_is_no_host_tier() -> None:
    cache = link(num_host=0)
    cache.run(1, A)
    cache.start(2, FILL)
    assert not cache.core.workers[0].host_tier
    assert cache.demotions == []
