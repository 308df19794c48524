"""Sequences that are restored after the cache has lost its state."""

from __future__ import annotations

import itertools

import pytest

from cache_svc.core.errors import Code
from cache_svc.core.retention import DEFAULT_RETENTION
from paceline.v1 import cache_pb2 as pb
from paceline.v1.common_pb2 import RetentionRange
from tests.unit.cache import driver as d
from tests.unit.cache.driver import Driver, Refused
from tests.unit.cache.follower import Follower, stored_in

A = list(range(100, 116))
B = [*A[:8], *range(200, 208)]


def make(*entries: pb.RestoredSequence, prefix_caching: bool = True, num_blocks: int = 16, num_host: int = 0) -> Driver:
    """A core in which all these entries are restored."""
    link = Driver()
    assert not refusals(link, *entries, prefix_caching=prefix_caching, num_blocks=num_blocks, num_host=num_host)
    return link


def refusals(
    link: Driver, *entries: pb.RestoredSequence, prefix_caching: bool = True, num_blocks: int = 16, num_host: int = 0
) -> dict[int, tuple[Code, str]]:
    link.add_worker(0, num_blocks, prefix_caching=prefix_caching, num_host_blocks=num_host)
    refused = link.one(d.restore_op(0, entries)).restore.refused
    return {one.sequence: (Code(one.code), one.message) for one in refused}


def table(link: Driver, sequence: int) -> list[int]:
    return link.core.admitted[sequence].table.tolist()


def all_free_blocks(link: Driver) -> list[int]:
    """All free blocks, in the order in which the pool grants them to one large sequence."""
    free, cached, _, _ = link.pools[0]
    return link.start(99, [7] * 4 * (free + cached))[1]


def test_whole_computed_blocks_are_stored_and_the_rest_is_private() -> None:
    link = make(d.restored(1, A[:10], 9, [5, 3, 9]))
    assert link.pools[0] == (13, 0, 3, 0)
    assert link.probe(A[:10]) == {0: (8, 8)}
    assert link.start(2, B[:9])[1][:2] == [5, 3]
    link.free(1)
    assert link.pools[0] == (13, 0, 3, 0)
    link.free(2)
    assert link.pools[0] == (14, 2, 0, 0)


def test_the_pool_hands_out_exactly_the_other_blocks() -> None:
    link = make(d.restored(1, A[:10], 9, [5, 3, 9]), num_blocks=12)
    assert sorted(all_free_blocks(link)) == [1, 2, 4, 6, 7, 8, 10, 11, 12]


def test_a_restored_sequence_grows_and_is_stored_like_any_other() -> None:
    link = make(d.restored(1, A[:8], 7, [5, 3]))
    (block,) = link.extend(1)
    assert block not in (5, 3)
    link.commit(1, A[8:12], 12)
    assert link.probe(A[:12]) == {0: (12, 12)}
    link.free(1)
    assert link.start(2, [*A[:12], 1])[1][:3] == [5, 3, block]


def test_blocks_may_be_shared_as_far_as_tokens_agree() -> None:
    link = make(
        d.restored(1, A, 16, [1, 2, 3, 4]), d.restored(2, B, 13, [1, 2, 5, 6]), d.restored(3, A[:9], 9, [1, 2, 7])
    )
    assert link.pools[0] == (9, 0, 7, 0)
    link.free(1)
    assert link.pools[0] == (9, 2, 5, 0)
    assert link.probe(A) == {0: (16, 8)}


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_the_shared_block_among_equal_blocks_is_stored(order: tuple[int, ...]) -> None:
    entries = [
        d.restored(1, A, 16, [1, 2, 3, 4]),  # blocks 3 and 4 are not shared
        d.restored(2, [*A, 5], 16, [1, 2, 13, 14, 15]),  # shares all but the last
        d.restored(3, [*A, 6], 16, [1, 2, 13, 14, 16]),
        d.restored(4, A, 16, [9, 10, 11, 12]),  # shares nothing
    ]
    link = make(*(entries[i] for i in order))
    assert link.pools[0] == (4, 0, 12, 0)
    assert link.start(5, [*A, 7])[1][:4] == [1, 2, 13, 14]
    assert {i: list(link.core.admitted[i].duplicates) for i in (1, 2, 3, 4)} == {
        1: [3, 4],
        2: [],
        3: [],
        4: [9, 10, 11, 12],
    }
    link.free(5, 2, 3)
    assert link.pools[0][2] == 10  # 1 and 4 use their duplicates
    link.free(1, 4)
    assert link.pools[0] == (12, 4, 0, 0)


def test_forks_share_without_prefix_caching() -> None:
    """Forks fork again, and no other sequence finds their blocks."""
    entries = [
        d.restored(1, A[:11], 11, [4, 2, 6]),
        d.restored(2, B[:11], 10, [4, 2, 7]),
        d.restored(3, A[:9], 9, [1, 3, 5]),
    ]
    link = make(*entries, prefix_caching=False)
    assert link.pools[0] == (9, 0, 7, 0)
    assert link.probe(A[:11]) == {}
    link.match(4, [*A[:11], 1])
    forked = link.one(d.fork_op(4, 0, 1)).admit
    assert (d.unpack(forked.block_table)[:2], forked.copy_from) == ([4, 2], 6)
    link.free(1, 2)
    assert link.pools[0] == (10, 0, 6, 0)
    link.free(3, 4)
    assert link.pools[0] == (16, 0, 0, 0)


def test_a_fork_of_two_families_joins_them() -> None:
    """1 and 2 share a block, 3 and 4 another one; 5 was forked from a sequence that had both."""
    entries = [
        d.restored(1, A[:5], 5, [1, 11]),
        d.restored(2, A[:5], 5, [1, 12]),
        d.restored(3, A[:9], 9, [3, 2, 13]),
        d.restored(4, A[:9], 9, [4, 2, 14]),
        d.restored(5, A[:9], 9, [1, 2, 15]),
    ]
    for order in (entries, entries[::-1]):
        link = make(*order, prefix_caching=False)
        assert len({id(link.core.admitted[i].node.parent) for i in (3, 4, 5)}) == 1
        link.free(1, 2, 5)
        link.free(3, 4)
        assert link.pools[0] == (16, 0, 0, 0)


def test_a_restored_swapped_sequence_has_its_host_blocks() -> None:
    entries = [d.restored(1, A[:10], 9, host=[5, 2, 3]), d.restored(2, A[:6], 5, [1, 2])]
    link = make(*entries, num_host=6)
    assert (link.pools[0], link.host_pools[0]) == ((14, 0, 2, 0), (3, 3))
    cached, blocks, pairs = link.swap_in(1)
    assert (cached, blocks[0]) == (9, 1)  # the device has its first block
    assert [host for host, _ in pairs] == [2, 3]
    assert [device for _, device in pairs] == blocks[1:]
    link.start(3, [9] * 24)
    link.commit(3, [], 24)
    assert sorted(host for _, host in link.swap_out(3)) == [1, 2, 3, 4, 5, 6]


def test_request_metadata_and_namespaces() -> None:
    entry = d.restored(1, A[:8], 8, [1, 2], salt="pepper")
    entry.retention.append(RetentionRange(start=0, end=4, priority=80))
    entry.priority = 3.0
    link = make(entry, d.restored(2, A[:8], 8, [3, 4]), num_blocks=4)
    assert link.probe(A[:8]) == {0: (8, 8)}
    link.free(1, 2)
    residencies = link.core.workers[0].device.queue.upcoming(0)
    assert [(list(one.blocks), one.retention, one.priority) for one in residencies] == [
        ([2], 35, 3.0),
        ([3, 4], 35, 0.0),
        ([1], 80, 3.0),
    ]


def test_restored_parts_have_the_same_effect_as_a_whole_restore() -> None:
    link = Driver()
    link.add_worker(0, 16)
    first, second = d.restored(1, A, 16, [1, 2, 3, 4]), d.restored(2, A, 16, [1, 2, 5, 6])
    third = d.restored(3, [*A, 1], 16, [1, 2, 5, 6, 7])
    assert not link.one(d.restore_op(0, [first], incomplete=True)).restore.refused
    assert link.pools[0] == (16, 0, 0, 0)
    assert not link.one(d.restore_op(0, [second, third])).restore.refused
    assert link.start(4, [*A, 2])[1][:4] == [1, 2, 5, 6]
    assert link.core.counters.restored_sequences == 3


def test_watchers_get_events_of_restored_blocks() -> None:
    link = Driver()
    follower = Follower()
    follower.join(link.core.events, link.core.tree)
    link.add_worker(0, 16)
    link.one(d.restore_op(0, [d.restored(1, A, 16, [4, 3, 2, 1]), d.restored(2, B, 16, [4, 3, 5, 6])]))
    follower.read()
    assert follower.stored == stored_in(link.core)
    assert sum(map(len, follower.stored.values())) == 6


def test_waiting_sequences_keep_their_prefix_subscriptions() -> None:
    """Sequences may wait before the restore. All invariants of their subscriptions are checked."""
    link = Driver()
    link.add_worker(1, 16)
    link.run(7, A, worker=1)
    link.match(8, [*A, 1])
    link.match(9, [*B, 1])
    assert refusals(link, d.restored(1, A, 16, [1, 2, 3, 4]), d.restored(2, B, 16, [1, 2, 5, 6])) == {}
    assert link.admit(8, 0) == (16, [1, 2, 3, 4, 7])
    assert link.admit(9, 0) == (16, [1, 2, 5, 6, 8])


OTHERS = (d.restored(1, A[:10], 9, [5, 3, 9]), d.restored(2, A[:5], 5, host=[2, 4]))
HALF = pb.RestoredSequence(sequence=3, token_ids=b"12345", block_table=d.pack([1]))
RAGGED = pb.RestoredSequence(sequence=3, token_ids=d.pack(A[:4]), block_table=b"12345")
RAGGED_HOST = pb.RestoredSequence(sequence=3, token_ids=d.pack(A[:4]), host_blocks=b"12345")
CROSSED = d.restored(3, A[:4], 4, [1])
CROSSED.retention.extend([RetentionRange(start=0, end=4), RetentionRange(start=2, end=6)])
OTHER_SALT = d.restored(3, A[:9], 9, [5, 3, 1], salt="pepper")

BAD_ENTRIES = {
    "half a token": (HALF, Code.INVALID_ARGUMENT, "token_ids: 5 bytes"),
    "no tokens": (d.restored(3, [], 0, [1]), Code.INVALID_ARGUMENT, "at least one token"),
    "half a block": (RAGGED, Code.INVALID_ARGUMENT, "block_table: 5 bytes"),
    "half a host block": (RAGGED_HOST, Code.INVALID_ARGUMENT, "host_blocks: 5 bytes"),
    "the dummy block": (d.restored(3, A[:4], 4, [0]), Code.INVALID_ARGUMENT, "block 0 is not within 1..16"),
    "beyond the pool": (d.restored(3, A[:8], 8, [1, 17]), Code.INVALID_ARGUMENT, "block 17 is not within 1..16"),
    "a negative block": (d.restored(3, A[:8], 8, [1, -1]), Code.INVALID_ARGUMENT, "block -1 is not"),
    "a block twice": (d.restored(3, A[:8], 8, [1, 1]), Code.INVALID_ARGUMENT, "block 1 occurs twice"),
    "a short table": (d.restored(3, A[:8], 5, [1]), Code.INVALID_ARGUMENT, "1 blocks of 4 tokens cannot hold 5"),
    "computed too much": (d.restored(3, A[:4], 5, [1, 2]), Code.INVALID_ARGUMENT, "5 is more than the 4 tokens"),
    "crossed ranges": (CROSSED, Code.INVALID_ARGUMENT, "retention.start"),
    "a known one": (d.restored(1, A[:4], 4, [1]), Code.ALREADY_EXISTS, "sequence 1 is known already"),
    "a swapped one": (d.restored(2, A[:4], 4, [1]), Code.ALREADY_EXISTS, "sequence 2 is known already"),
    "one that waits": (d.restored(8, A[:4], 4, [1]), Code.ALREADY_EXISTS, "sequence 8 is known already"),
    "one of another worker": (d.restored(7, A[:4], 4, [1]), Code.ALREADY_EXISTS, "sequence 7 is known already"),
    "other tokens": (d.restored(3, [*A[:7], 0, 0], 9, [5, 3, 1]), Code.FAILED_PRECONDITION, "for other tokens"),
    "another namespace": (OTHER_SALT, Code.FAILED_PRECONDITION, "another namespace"),
    "another position": (d.restored(3, A[4:9], 5, [3, 1]), Code.FAILED_PRECONDITION, "at another place"),
    "behind its end": (d.restored(3, [*A, 1], 17, [1, 2, 4, 9, 5]), Code.FAILED_PRECONDITION, "at another place"),
    "a partial block": (d.restored(3, A[:12], 12, [5, 3, 9]), Code.FAILED_PRECONDITION, "so the block is private"),
    "not all computed": (
        d.restored(3, A[:9], 7, [5, 3, 1]),
        Code.FAILED_PRECONDITION,
        "refused sequence has not computed",
    ),
    "both kinds": (d.restored(3, A[:4], 4, [1], host=[1]), Code.INVALID_ARGUMENT, "block_table: not empty"),
    "too few host blocks": (d.restored(3, A[:8], 5, host=[1]), Code.INVALID_ARGUMENT, "5 computed tokens need 2"),
    "no such host block": (d.restored(3, A[:4], 4, host=[5]), Code.INVALID_ARGUMENT, "block 5 is not within 1..4"),
    "host block twice": (d.restored(3, A[:8], 8, host=[1, 1]), Code.INVALID_ARGUMENT, "block 1 occurs twice"),
    "another's host block": (d.restored(3, A[:8], 8, host=[1, 4]), Code.FAILED_PRECONDITION, "block 4 is claimed by"),
}


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("name", BAD_ENTRIES)
def test_a_bad_entry_is_refused_by_itself(name: str, prefix_caching: bool) -> None:
    bad, code, why = BAD_ENTRIES[name]
    link = Driver()
    link.add_worker(1, 4)
    link.start(7, [1], worker=1)
    link.match(8, [1, 2])
    good = d.restored(4, A[:10], 9, [5, 3, 10])
    refused = refusals(link, *OTHERS, bad, good, num_host=4, prefix_caching=prefix_caching)
    assert refused.keys() == {bad.sequence}
    assert refused[bad.sequence][0] is code
    assert why in refused[bad.sequence][1]
    assert link.core.admitted.keys() == {1, 4, 7}
    assert (table(link, 1), table(link, 4)) == ([5, 3, 9], [5, 3, 10])
    assert (link.pools[0], link.host_pools[0]) == ((12, 0, 4, 0), (2, 2))
    counters = link.core.counters
    assert (counters.restored_sequences, counters.refused_claims, counters.refused_ops) == (3, 1, 0)
    link.free(1, 2, 4, 7, 8)
    assert (link.pools[0][2], link.host_pools[0][1]) == (0, 0)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_position_in_the_tree_cannot_have_two_shared_blocks(prefix_caching: bool) -> None:
    """One of the two blocks is stored. One sequence keeps the other block as a duplicate."""
    first = [d.restored(i, A[:5], 5, [1, 10 + i]) for i in (1, 2)]
    second = [d.restored(i, A[:5], 5, [2, 10 + i]) for i in (3, 4, 5)]
    link = Driver()
    # Without prefix caching these would be two families. An entry with a block of each family joins the two.
    both = [d.restored(6, A[:9], 9, [1, 7, 9]), d.restored(5, A[:9], 9, [2, 7, 8])]
    entries = [*first, *second[:2], *both]
    refused = refusals(link, *entries, prefix_caching=prefix_caching)
    assert set(refused) == {4, 5}
    assert "both are shared" in refused[4][1]
    assert list(link.core.admitted[3].duplicates) == ([2] if prefix_caching else [])
    link.free(1, 2, 3, 6)
    assert link.pools[0][2] == 0
    assert link.pools[0][0] + link.pools[0][1] == 16


def test_a_refused_restore_entry_stores_no_block_in_the_tree() -> None:
    first = [d.restored(1, A[:4], 4, [1]), d.restored(2, A[:4], 4, [1])]
    second = [d.restored(3, A[:4], 4, [2]), d.restored(4, A, 16, [2, 3, 4, 5])]
    link = Driver()
    assert set(refusals(link, *first, *second)) == {4}
    assert link.probe(A) == {0: (4, 4)}


def test_a_restore_is_possible_only_right_after_the_worker_was_added() -> None:
    for used in (
        [d.match_op(7, [1]), d.admit_op(7, 0)],
        [d.restore_op(0, [d.restored(7, A[:4], 4, [1])])],
        [d.restore_op(0, [d.restored(7, A[:4], 4, host=[1])])],
        [d.restore_op(0, [d.restored(7, A[:4], 0)])],
    ):
        link = Driver()
        link.add_worker(0, 16, num_host_blocks=4)
        link.one(d.restore_op(0, [d.restored(1, A[:4], 4, [1])], incomplete=True))
        link.exchange(*used)
        sequences = len(link.core.admitted) + len(link.core.swapped)
        for _ in range(2):
            with pytest.raises(Refused) as refused:
                link.one(d.restore_op(0, [d.restored(2, A[:4], 4, [2])]))
            assert refused.value.code is Code.FAILED_PRECONDITION
        assert len(link.core.admitted) + len(link.core.swapped) == sequences
    with pytest.raises(Refused) as refused:
        link.one(d.restore_op(9, []))
    assert refused.value.code is Code.NOT_FOUND


@pytest.mark.parametrize("host", [None, []])
def test_a_worker_is_restored_only_once_even_if_the_restore_took_no_blocks(host: list[int] | None) -> None:
    """A sequence without computed tokens may have no blocks, on the device or swapped out."""
    link = make(d.restored(1, A, 0, host=host))
    with pytest.raises(Refused) as refused:
        link.one(d.restore_op(0, [d.restored(2, A, 4, [1])]))
    assert refused.value.code is Code.FAILED_PRECONDITION


def test_an_incomplete_restore_is_dropped_with_its_worker() -> None:
    link = Driver()
    link.add_worker(0, 16)
    link.one(d.restore_op(0, [d.restored(1, A[:4], 4, [1])], incomplete=True))
    link.remove_worker(0)
    link.add_worker(0, 16)
    link.one(d.restore_op(0, [d.restored(2, A[:4], 4, [1])]))
    assert link.core.admitted.keys() == {2}


def test_a_restored_sequence_that_no_longer_runs_is_cached() -> None:
    """Also blocks that two sequences share, and (with partial reuse) the beginning of a block."""
    link = Driver()
    link.add_worker(0, 16, num_host_blocks=4, partial_reuse=True)
    entries = [
        d.restored(1, A, 15, [1, 2, 3, 4]),
        d.restored(2, B, 16, [1, 2, 5, 6, 7]),
        d.restored(3, A[:8], 8, [1, 8]),  # its first block is shared, its second block equals a shared block
        d.restored(4, A[:5], 5, host=[2, 3]),
        d.restored(5, A[:8], 9, [1, 2]),  # contradicts itself
    ]
    refused = link.one(d.restore_op(0, entries, cached=True)).restore.refused
    assert [one.sequence for one in refused] == [5]
    assert not [*link.core.admitted, *link.core.swapped, *link.core.waiting]
    free, cached, used, _ = link.pools[0]
    assert (free, cached, used) == (10, 6, 0)
    assert link.probe(A) == {0: (15, 0)}
    assert link.probe(B) == {0: (16, 0)}
    assert link.start(1, [*A, 7])[1][:3] == [1, 2, 3]  # the id is free, and the cached blocks are reused
    link.core.check_invariants()


def test_restored_cached_blocks_stay_in_their_namespace() -> None:
    link = Driver()
    link.add_worker(0, 16)
    link.one(d.restore_op(0, [d.restored(1, A, 16, [1, 2, 3, 4], salt="pepper")], cached=True))
    assert link.probe(A) == {}


def test_without_prefix_caching_nothing_is_kept() -> None:
    link = Driver()
    link.add_worker(0, 16, prefix_caching=False)
    link.one(d.restore_op(0, [d.restored(1, A, 16, [1, 2, 3, 4]), d.restored(2, A, 16, [1, 2, 5, 6])], cached=True))
    assert link.pools[0] == (16, 0, 0, 0)


def test_retention_of_a_block_restored_as_cached_begins_with_the_restore() -> None:
    """Also if the worker was added in the same exchange."""
    link = Driver()
    link.now_ms = 5000
    entry = d.restored(1, A, 16, [1, 2, 3, 4])
    entry.retention.append(RetentionRange(start=0, end=0, priority=90, duration_ms=1000))
    link.exchange(d.add_worker_op(0, 8, 4), d.restore_op(0, [entry], cached=True))
    for now_ms, priority in ((5999, 90), (6000, DEFAULT_RETENTION)):
        link.now_ms = now_ms
        link.exchange()
        device = link.core.workers[0].device
        assert {residency.retention for residency in device.queue.upcoming(device.index)} == {priority}


def test_blocks_of_another_worker_survive_a_repeated_restore() -> None:
    link = Driver()
    link.add_worker(1, 16)
    link.run(9, A[:5], worker=1)
    first = [d.restored(i, A[:5], 5, [1, 10 + i]) for i in (1, 2)]
    second = [d.restored(i, A[:5], 5, [2, 10 + i]) for i in (3, 4)]
    assert set(refusals(link, *first, *second)) == {4}
    assert link.probe(A[:4]) == {0: (4, 4), 1: (4, 0)}
