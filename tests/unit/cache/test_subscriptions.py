"""Reports to waiting sequences: enough to order the queue, and only when a match changes."""

from __future__ import annotations

import pytest

from cache_svc.core.tree.nodes import PrefixSubscription
from cache_svc.core.tree.tree import PrefixTree
from paceline.v1 import cache_pb2 as pb
from tests.unit.cache import driver as d
from tests.unit.cache.driver import Driver

LONG = list(range(100, 140))


def link(workers: int = 1, block_size: int = 16, num_blocks: int = 64, partial_reuse: bool = True) -> Driver:
    cache = Driver()
    for worker in range(workers):
        cache.add_worker(worker, num_blocks, block_size, partial_reuse=partial_reuse)
    return cache


def told(response: pb.CacheServiceLinkResponse) -> dict[int, dict[int, tuple[int, int, int]]]:
    return {update.sequence: d.tiers(update.matches) for update in response.match_updates}


@pytest.mark.parametrize(("num_tokens", "depth"), [(12, 0), (24, 16), (40, 32)])
def test_a_match_in_a_planned_block_is_reported_when_its_step_is_sent(num_tokens: int, depth: int) -> None:
    """The match grows when the step that computes the block is sent. No sequence copies a planned block."""
    cache = link()
    leader = [*LONG[:num_tokens], *[50] * 36]
    cache.exchange(*(d.match_op(s, [*LONG[:num_tokens], s, s]) for s in (1, 2)), d.match_op(3, [7, 7, 7]))
    planned = told(cache.exchange(d.match_op(9, leader), d.admit_op(9, 0, planned=len(leader))))
    assert planned == ({1: {0: (depth, depth, 0)}, 2: {0: (depth, depth, 0)}} if depth else {})
    assert told(cache.exchange(d.commit_op([(9, [], len(leader))]))) == {s: {0: (num_tokens, depth, 0)} for s in (1, 2)}


def test_a_match_may_end_in_the_middle_of_a_block_that_is_being_written() -> None:
    """The prompt of the waiting sequence differs from there on."""
    cache = link()
    cache.match(1, [*LONG[:24], 1, 1])
    cache.exchange(d.match_op(9, LONG), d.admit_op(9, 0, planned=40))
    assert told(cache.exchange(d.commit_op([(9, [], 40)]))) == {1: {0: (24, 16, 0)}}


def test_the_partial_block_of_a_finished_sequence_is_reported() -> None:
    cache = link()
    cache.match(1, [*LONG[:12], 5, 5])
    cache.start(2, LONG[:10])
    cache.commit(2, [], 10)
    assert told(cache.exchange(d.free_op([2]))) == {1: {0: (10, 0, 0)}}


def test_only_subscriptions_with_a_longer_match_are_refreshed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All prompts begin with the same token, and the stored block has nothing else in common with most of them."""
    cache = link()
    for s in range(1, 100):
        cache.match(s, [0, s, *LONG])
    cache.run(1000, [0, 1000, *LONG])
    refreshed: list[int] = []
    refresh = PrefixTree.refresh

    def noted(tree: PrefixTree, subscription: PrefixSubscription) -> None:
        refreshed.append(subscription.sequence_id)
        refresh(tree, subscription)

    monkeypatch.setattr(PrefixTree, "refresh", noted)
    cache.exchange(d.match_op(1001, [0, 2000, *LONG]), d.admit_op(1001, 0))
    assert told(cache.exchange(d.commit_op([(1001, [], 42)]))) == {}
    assert refreshed == [1001]
    cache.match(1002, [0, 50, 60, *LONG])
    cache.admit(1002, 0)
    assert told(cache.exchange(d.commit_op([(1002, [], 43)]))) == {50: {0: (2, 0, 0)}}
    assert refreshed == [1001, 1002, 50]


def test_equal_beginnings_of_two_planned_sequences_are_reported_once() -> None:
    cache = link()
    cache.match(1, [*LONG[:12], 5, 5])
    both = [([*LONG[:12], *[s] * 20], s) for s in (8, 9)]
    for tokens, s in both:
        cache.exchange(d.match_op(s, tokens), d.admit_op(s, 0, planned=32))
    assert told(cache.exchange(d.commit_op([(8, [], 32)]))) == {1: {0: (12, 0, 0)}}
    assert told(cache.exchange(d.commit_op([(9, [], 32)]))) == {}


def test_a_block_that_another_worker_writes_first_is_reported() -> None:
    cache = link(workers=2)
    cache.match(1, [*LONG[:12], 5, 5])
    cache.exchange(d.match_op(2, LONG), d.admit_op(2, 0, planned=40))
    cache.start(3, LONG, worker=1)
    assert told(cache.exchange(d.commit_op([(3, [], 40)]))) == {1: {1: (12, 0, 0)}}


def test_without_partial_reuse_a_partial_match_needs_no_refresh(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = link(partial_reuse=False)
    cache.match(1, [*LONG[:12], 5, 5])
    cache.start(2, LONG)
    monkeypatch.setattr(PrefixTree, "refresh", None)
    assert told(cache.exchange(d.commit_op([(2, [], 40)]))) == {}


def test_a_rematch_does_not_walk_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a RematchOp reports that another worker holds the same blocks, or that they have users. Without partial
    reuse it compares no tokens."""
    cache = link(workers=2, partial_reuse=False)
    cache.run(1, LONG)
    cache.match(2, [*LONG, 1])
    cache.run(3, LONG, worker=1)
    cache.start(4, LONG)
    cache.core.debug = False  # the checks do walk
    for name in ("walk", "follow"):
        monkeypatch.setattr(PrefixTree, name, None)
    response = cache.exchange(d.rematch_op([2]))
    assert told(response) == {2: {0: (32, 32, 0), 1: (32, 0, 0)}}


def test_the_blocks_of_a_restored_sequence_are_reported() -> None:
    cache = link()
    cache.match(1, [*LONG[:12], 5, 5])
    cache.add_worker(1, 64, 16, partial_reuse=True)
    assert told(cache.exchange(d.restore_op(1, [d.restored(2, LONG, 40, [1, 2, 3])]))) == {1: {1: (12, 0, 0)}}


def test_a_rematch_is_current_even_beyond_the_refresh_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cache_svc.core.cache.MAX_REFRESHED", 0)
    cache = link()
    cache.match(1, [*LONG[:12], 5, 5])
    cache.run(2, LONG)
    assert told(cache.exchange(d.rematch_op([1], always=True))) == {1: {0: (12, 0, 0)}}


@pytest.mark.parametrize("always", [(True, False), (False, True)])
def test_one_rematch_with_always_is_enough_in_an_exchange_of_two(always: tuple[bool, bool]) -> None:
    cache = link()
    cache.run(2, LONG)
    cache.match(1, [*LONG, 5])
    assert told(cache.exchange(d.rematch_op([1]))) == {}, "nothing has changed"
    assert told(cache.exchange(*(d.rematch_op([1], each) for each in always))) == {1: {0: (40, 0, 0)}}
