"""The last block of an ended sequence is found again if it is not full: reuse loses no tokens to the block size."""

from __future__ import annotations

import pytest

from cache_svc.core import admin
from cache_svc.core.memory.eviction import STRATEGIES
from cache_svc.core.tree.nodes import Namespace
from cache_svc.core.tree.tree import COVERING_TRIED
from tests.unit.cache import driver as d
from tests.unit.cache.driver import Driver
from tests.unit.cache.test_reuse import admitted, link

A = list(range(100, 116))  # 4 blocks of 4 tokens


def counts(cache: Driver, worker: int = 0) -> tuple[int, int, int]:
    """Free, cached, used."""
    return cache.pools[worker][:3]


@pytest.mark.parametrize("block_size", [2, 16, 64, 128])
def test_a_prompt_that_comes_again_is_reused_to_its_last_token_but_one(block_size: int) -> None:
    cache = Driver()
    cache.add_worker(0, 16, block_size, partial_reuse=True)
    prompt = list(range(block_size + 2))
    cache.run(1, prompt)
    assert admitted(cache, 2, prompt) == (block_size + 1, [1, 3], 2)


def test_blocks_of_one_token_have_no_partial_blocks() -> None:
    cache = Driver()
    cache.add_worker(0, 16, 1, partial_reuse=True)
    cache.run(1, A[:3])
    assert admitted(cache, 2, A[:3]) == (2, [1, 2, 4], 0)


def test_a_sequence_that_is_shorter_than_a_block_is_found_again() -> None:
    cache = link()
    cache.run(1, [1, 2, 3])
    assert counts(cache) == (15, 1, 0)
    assert admitted(cache, 2, [1, 2, 9]) == (2, [2], 1)
    assert admitted(cache, 3, [1, 2, 3, 4, 5]) == (3, [3, 4], 1)


def test_a_whole_block_replaces_a_partial_block_that_it_covers() -> None:
    cache = link()
    cache.run(1, A[:6])
    cache.run(2, A[:8])
    assert cache.match(3, [*A, 1]) == {0: (8, 0)}
    assert counts(cache) == (14, 2, 0)  # the whole block has all tokens of the partial block, which is dropped


def test_without_partial_reuse_nothing_is_kept() -> None:
    cache = link(partial_reuse=False)
    cache.run(1, A[:6])
    assert counts(cache) == (15, 1, 0)


def test_a_planned_copy_of_a_partial_block_is_not_kept() -> None:
    """A step would make the copy, and the step may never be sent."""
    cache = link()
    cache.run(1, A)
    assert admitted(cache, 2, A[:7]) == (6, [1, 5], 2)
    cache.free(2)
    assert counts(cache) == (12, 4, 0)
    cache.start(3, [*A[:6], 7, 7])
    cache.commit(3, [], 7)
    cache.free(3)
    assert counts(cache) == (11, 5, 0)
    assert cache.match(4, [*A[:6], 7, 7]) == {0: (7, 0)}


def test_one_of_several_equal_partial_blocks_is_kept() -> None:
    cache = link()
    for i in range(3):
        cache.run(i, A[:6])
    assert counts(cache) == (14, 2, 0)
    cache.run(3, A[:5])  # the other partial block covers this one
    assert counts(cache) == (14, 2, 0)
    cache.run(4, A[:7])  # this one covers the other partial block
    assert counts(cache) == (14, 2, 0)
    assert cache.match(5, A[:8]) == {0: (7, 0)}
    cache.run(6, [*A[:5], 9])
    assert counts(cache) == (13, 3, 0)


def test_a_partial_block_that_is_stored_again_counts_as_recently_used() -> None:
    cache = link(num_blocks=4)
    cache.run(1, [1, 1])
    cache.run(2, [2, 2])
    cache.run(3, [3, 3])
    cache.run(1, [1, 1])
    cache.start(4, A[:7])
    assert [cache.match(10 + i, [i, i, 9]) for i in (1, 2, 3)] == [{0: (2, 0)}, {}, {0: (2, 0)}]


def test_a_partial_block_is_evicted_before_its_parent() -> None:
    for eviction in STRATEGIES:
        cache = link(num_blocks=4, eviction=eviction)
        cache.run(1, [*A[:4], 1])
        cache.run(2, [*A[:4], 2])
        cache.start(3, [7] * 12)
        assert cache.match(4, A[:6]) == {0: (4, 0)}, eviction


def test_a_partial_block_to_be_copied_and_dropped_is_not_granted_in_this_exchange() -> None:
    cache = link(num_blocks=5)
    cache.run(1, A[:6])
    cache.start(2, A[:8])  # copies from the partial block
    begin = [d.match_op(3, A[:7]), d.admit_op(3, 0)]  # also copies from the partial block
    end = [d.commit_op([(2, [], 8)]), d.match_op(4, [7] * 8), d.admit_op(4, 0)]
    response = cache.exchange(*begin, *end)
    copied = response.results[1].admit.copy_from
    assert copied == 2
    assert response.results[4].HasField("error")  # only two blocks could be granted: a free one and the dropped one
    assert counts(cache) == (2, 0, 3)
    assert 2 in cache.start(5, [8] * 8)[1]


@pytest.mark.parametrize("salt", ["", "pepper"])
def test_a_partial_block_belongs_to_its_namespace(salt: str) -> None:
    cache = link()
    cache.one(d.match_op(1, A[:6], salt="pepper"))
    cache.admit(1, 0)
    cache.commit(1, [], 6)
    cache.free(1)
    (found,) = cache.one(d.match_op(2, A[:7], salt=salt)).match.matches or [None]
    assert (found.num_tokens if found else 0) == (6 if salt else 0)


def test_each_worker_has_its_own_partial_blocks() -> None:
    cache = link(workers=2)
    cache.run(1, A[:6])
    assert cache.match(2, A[:7]) == {0: (6, 0)}
    cache.run(3, A[:6], worker=1)
    assert cache.match(4, A[:7]) == {0: (6, 0), 1: (6, 0)}
    cache.remove_worker(0)
    assert cache.match(5, A[:7]) == {1: (6, 0)}


def test_a_reset_drops_a_partial_block_after_a_pinned_prefix() -> None:
    cache = link()
    cache.run(1, A[:6])
    admin.pin(cache.core, "x", d.pack(A[:6]))
    assert admin.forget_unused(cache.core) == {0: 1}
    assert cache.match(2, A[:7]) == {0: (4, 4)}
    admin.unpin(cache.core, "x")
    cache.free(2)
    assert admin.forget_unused(cache.core) == {0: 1}
    assert cache.core.tree is not None
    assert Namespace() not in cache.core.tree.roots


def test_a_partial_block_has_the_retention_of_its_first_token() -> None:
    cache = link(num_blocks=3)
    cache.one(d.match_op(1, [1, 1], retention=[(0, 0, 90, 0)]))
    cache.admit(1, 0)
    cache.commit(1, [], 2)
    cache.free(1)
    cache.run(2, [2, 2])
    cache.start(3, [7] * 8)
    assert [cache.match(10 + i, [i, i, 9]) for i in (1, 2)] == [{0: (2, 0)}, {}]


@pytest.mark.parametrize("others", [COVERING_TRIED, COVERING_TRIED + 1])
def test_the_search_for_a_covering_block_is_bounded(others: int) -> None:
    """Thousands of blocks may begin with the first token of every prompt."""
    cache = Driver()
    cache.add_worker(0, 100, partial_reuse=True)
    cache.add_worker(1, 4, partial_reuse=True)
    for i in range(others):
        cache.run(i + 1, [1, i, i, i])
    cache.run(201, [1], worker=1)
    assert counts(cache, 1) == ((3, 1, 0) if others == COVERING_TRIED else (4, 0, 0))
