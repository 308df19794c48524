"""Sequences that leave the device for host blocks, and come back."""

from __future__ import annotations

import pytest

from cache_svc.core.errors import Code
from tests.unit.cache.driver import Driver, Refused

A = list(range(100, 116))


@pytest.fixture
def link() -> Driver:
    link = Driver()
    link.add_worker(0, num_blocks=8, num_host_blocks=4)
    return link


def test_computed_blocks_are_swapped_out_and_in(link: Driver) -> None:
    link.start(1, A[:10])  # three blocks; 9 of the 10 tokens are computed
    link.commit(1, [], 9)
    assert link.swap_out(1) == [(1, 1), (2, 2), (3, 3)]
    assert (link.pools[0], link.host_pools[0]) == ((6, 2, 0, 0), (1, 3))  # two are stored in the tree, unused
    cached, table, pairs = link.swap_in(1)
    # The stored ones are shared again; the third comes from host memory.
    assert (cached, table) == (9, [1, 2, 3])
    assert pairs == [(3, 3)]
    assert link.host_pools[0] == (4, 0)


def test_blocks_evicted_during_the_swap_come_from_host_memory(link: Driver) -> None:
    link.start(1, A[:10])
    link.commit(1, [], 9)
    link.swap_out(1)
    link.start(2, [7] * 32)  # takes every block
    with pytest.raises(Refused) as refused:
        link.swap_in(1)
    assert refused.value.code is Code.RESOURCE_EXHAUSTED
    assert link.host_pools[0] == (1, 3)
    link.free(2)
    cached, table, pairs = link.swap_in(1)
    assert cached == 9
    assert [host for host, _ in pairs] == [1, 2, 3]
    assert [device for _, device in pairs] == table


def test_a_block_for_the_last_token_is_taken_too(link: Driver) -> None:
    link.start(1, A[:4])
    link.commit(1, [5], 4)
    assert len(link.swap_out(1)) == 1
    cached, table, pairs = link.swap_in(1)
    assert (cached, len(table), len(pairs)) == (4, 2, 0)


def test_a_swap_out_leaves_shared_blocks_to_their_other_users(link: Driver) -> None:
    link.start(1, A[:10])
    link.commit(1, [], 10)
    link.start(2, [*A[:8], 1, 2])
    assert link.swap_out(1) == [(1, 1), (2, 2), (3, 3)]
    assert link.pools[0][2] == 3  # the other sequence uses them
    assert link.swap_in(1)[2] == [(3, 3)]


def test_swapped_in_tokens_count_as_computed_after_a_commit(link: Driver) -> None:
    """A sequence may end before its copies are made. Then no other sequence may find their target blocks."""
    link.start(1, A[:10])
    link.commit(1, [], 9)
    link.swap_out(1)
    link.run(2, [7] * 32)  # evicts what was stored
    link.swap_in(1)
    link.free(1)
    assert link.probe(A[:10]) == {}
    link.start(3, A[:10])
    link.commit(3, [], 9)
    assert link.probe(A[:10]) == {0: (8, 8)}


def test_a_swapped_sequence_can_be_freed_and_nothing_else(link: Driver) -> None:
    link.start(1, A[:10])
    link.commit(1, [], 9)
    link.swap_out(1)
    for refused in (lambda: link.extend(1), lambda: link.commit(1, [], 9), lambda: link.swap_out(1)):
        with pytest.raises(Refused) as error:
            refused()
        assert error.value.code is Code.FAILED_PRECONDITION
    link.free(1)
    assert link.host_pools[0] == (4, 0)


def test_a_worker_takes_its_swapped_sequences_with_it(link: Driver) -> None:
    link.start(1, A[:10])
    link.swap_out(1)
    link.remove_worker(0)
    with pytest.raises(Refused) as error:
        link.swap_in(1)
    assert error.value.code is Code.NOT_FOUND
