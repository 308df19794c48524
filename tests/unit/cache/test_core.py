"""What the operations promise, one by one (cache.proto)."""

from __future__ import annotations

import tracemalloc

import pytest

from cache_svc.core.cache import CacheCore
from cache_svc.core.errors import Code, InvariantError, LinkError
from cache_svc.core.tree.nodes import subtree
from paceline.v1 import cache_pb2 as pb
from tests.unit.cache import driver as d
from tests.unit.cache.driver import Driver, Refused

A = list(range(100, 116))  # 4 blocks of 4 tokens
B = list(range(200, 216))


@pytest.fixture
def link() -> Driver:
    link = Driver()
    link.add_worker(0, num_blocks=16)
    return link


def refused(code: Code) -> pytest.RaisesExc[Refused]:
    return pytest.raises(Refused, check=lambda refusal: refusal.code == code)


# ---------------------------------------------------------------------------------------------------- match, admit


@pytest.mark.parametrize(("num_tokens", "hit"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (16, 12), (17, 16), (30, 16)])
def test_a_hit_leaves_at_least_one_token_to_compute(link: Driver, num_tokens: int, hit: int) -> None:
    link.run(1, A)
    prompt = (A + B)[:num_tokens]
    assert link.match(2, prompt) == ({0: (hit, 0)} if hit else {})
    cached, table = link.admit(2, 0)
    assert cached == hit
    assert len(table) == -(-num_tokens // 4)


def test_match_tells_referenced_from_cached_for_each_worker(link: Driver) -> None:
    link.add_worker(5, num_blocks=16)
    link.add_worker(6, num_blocks=16)
    link.run(1, A)
    link.start(2, A[:9])  # uses 2 of the 4 blocks cached on worker 0
    link.start(3, A[:13], worker=5)
    link.commit(3, [], 12)
    assert link.probe(A) == {0: (16, 8), 5: (12, 12)}
    assert link.probe(A[:8] + B) == {0: (8, 8), 5: (8, 8)}
    assert link.probe(B) == {}
    link.free(2, 3)
    assert link.probe(A) == {0: (16, 0), 5: (12, 0)}


def test_a_hit_needs_equal_tokens_from_the_first_on(link: Driver) -> None:
    link.run(1, A)
    assert link.probe(A[4:]) == {}
    assert link.probe([0, *A[1:]]) == {}
    assert link.probe([*A[:4], *A[8:]]) == {0: (4, 0)}


def test_admit_reuses_the_prefix_that_is_cached_at_that_moment(link: Driver) -> None:
    assert link.match(2, A) == {}
    link.run(1, A)
    assert link.admit(2, 0)[0] == 12


def test_admit_is_all_or_nothing(link: Driver) -> None:
    link.run(1, A)
    link.start(9, range(40))  # 10 blocks: 2 free, 4 cached
    link.match(2, [*A, *B])  # hits 4 blocks, needs 4 more, and may not evict what it hits
    before = link.pools[0]
    with refused(Code.RESOURCE_EXHAUSTED):
        link.admit(2, 0)
    assert link.pools[0] == before == (2, 4, 10, 0)
    assert link.probe(A) == {0: (16, 0)}
    link.free(9)
    assert link.admit(2, 0)[0] == 16


def test_admit_evicts_the_least_recently_used_blocks_but_not_its_own_hits(link: Driver) -> None:
    link.run(1, A)
    link.run(2, B)
    assert link.start(3, A + list(range(40)))[0] == 16  # 14 blocks: 4 hit, 8 free, 2 evicted from the end of B
    assert link.pools[0] == (0, 2, 14, 2)
    assert link.probe(B) == {0: (8, 0)}


def test_one_prompt_may_wait_for_a_worker_that_comes_later() -> None:
    link = Driver()
    assert link.match(1, A) == {}
    link.add_worker(3, num_blocks=16)
    assert link.admit(1, 3) == (0, [1, 2, 3, 4])


# ---------------------------------------------------------------------------------------------------- extend, commit


def test_extend_gives_one_block_per_entry_over_workers(link: Driver) -> None:
    link.add_worker(1, num_blocks=16)
    link.start(1, A[:4])
    link.start(2, A[:4], worker=1)
    assert link.extend(1, 2, 1) == [2, 2, 3]
    assert list(link.core.admitted[1].table) == [1, 2, 3]
    assert link.extend() == []


def test_extend_is_all_or_none(link: Driver) -> None:
    link.add_worker(1, num_blocks=2)
    link.start(1, A[:4])
    link.start(2, A[:4], worker=1)
    with refused(Code.RESOURCE_EXHAUSTED):
        link.extend(1, 2, 2)
    with refused(Code.NOT_FOUND):
        link.extend(1, 77)
    assert link.pools == {0: (15, 0, 1, 0), 1: (1, 0, 1, 0)}


def test_commit_stores_whole_computed_blocks_only(link: Driver) -> None:
    link.start(1, A[:6])
    link.commit(1, [], 3)
    assert link.probe(A) == {}
    link.commit(1, A[6:9], 7)
    assert link.probe(A) == {0: (4, 4)}
    link.extend(1)
    link.commit(1, [], 9)
    assert link.probe(A) == {0: (8, 8)}
    link.commit(1, A[9:12], 12)  # the third block is full
    assert link.probe(A) == {0: (12, 12)}


def test_a_sequence_may_stand_more_than_once_in_a_commit(link: Driver) -> None:
    link.start(1, A[:2])
    link.one(d.commit_op([(1, A[2:3], 2), (1, A[3:5], 4)]))
    assert link.probe(A) == {0: (4, 4)}
    with refused(Code.INVALID_ARGUMENT):  # the second entry has fewer computed tokens
        link.one(d.commit_op([(1, [], 5), (1, [], 4)]))


def test_a_duplicate_stays_private_and_the_equal_block_of_the_tree_is_kept(link: Driver) -> None:
    """Two sequences compute the same prompt at once. The first one's blocks are in the tree, and stay while they are
    needed."""
    link.start(1, A)
    link.start(2, [*A, *B])
    link.commit(1, [], 16)
    link.commit(2, [], 32)
    assert link.core.admitted[2].duplicates == link.core.admitted[2].table[:4]
    assert link.core.admitted[2].node.parent is link.core.admitted[1].node
    link.free(1)
    assert link.pools[0] == (4, 0, 12, 0)  # 8 of its own, and the 4 that it shares
    assert link.probe([*A, *B]) == {0: (32, 32)}
    link.free(2)
    assert link.pools[0] == (8, 8, 0, 0)


def test_a_shared_block_is_freed_by_its_last_user(link: Driver) -> None:
    link.run(1, A)
    link.start(2, [*A, 1])
    link.start(3, [*A, 2])
    assert link.pools[0] == (10, 0, 6, 0)
    link.free(2)
    assert link.pools[0] == (11, 0, 5, 0)
    link.free(3)
    assert link.pools[0] == (12, 4, 0, 0)


# ---------------------------------------------------------------------------------------------------- free, eviction


def test_free_releases_admitted_and_waiting_sequences(link: Driver) -> None:
    link.start(1, A)
    link.match(2, A)
    link.free(1, 2)
    assert link.pools[0] == (16, 0, 0, 0)
    link.start(1, A)
    link.match(2, A)


@pytest.mark.parametrize(
    ("sequences", "code"),
    [([1, 9, 2], Code.NOT_FOUND), ([1, 1], Code.INVALID_ARGUMENT), ([2, 1, 2], Code.INVALID_ARGUMENT)],
)
def test_a_free_that_fails_frees_nothing(link: Driver, sequences: list[int], code: Code) -> None:
    link.start(1, A)
    link.match(2, A)
    with refused(code):
        link.free(*sequences)
    assert link.pools[0] == (12, 0, 4, 0)
    link.free(1, 2)


def test_an_error_names_unknown_sequences_but_not_thousands(link: Driver) -> None:
    link.start(1, A)
    with pytest.raises(Refused, match=r"sequences 8, 9; nothing was freed"):
        link.free(1, 8, 9)
    with pytest.raises(Refused) as refusal:
        link.free(*range(1000, 9000))
    assert len(str(refusal.value)) < 120


def test_eviction_takes_leaves_before_their_parents_and_old_before_young() -> None:
    link = Driver()
    link.add_worker(0, num_blocks=6)
    link.run(1, A[:12])
    link.run(2, [*A[:4], *B[:8]])
    left = []
    for _ in range(5):
        left.append((link.probe(A).get(0, (0, 0))[0], link.probe([*A[:4], *B]).get(0, (0, 0))[0]))
        link.start(3, range(4 * (len(left) + 1)))
        link.free(3)
    # One block is free. After that, each step evicts one more: the end of A, A's second block, the end of B, ...
    assert left == [(12, 12), (8, 12), (4, 12), (4, 8), (4, 4)]


def test_evicted_blocks_leave_no_nodes_behind(link: Driver) -> None:
    for i in range(50):
        link.run(i, [i * 100 + token for token in range(33)])
    assert link.core.tree is not None
    assert sum(node.end - node.start for node in subtree(*link.core.tree.roots.values())) == 16 - link.pools[0][0]
    assert link.core.counters.evicted_blocks == link.pools[0][3] > 0


def test_a_very_long_sequence_comes_and_goes_without_recursion() -> None:
    link = Driver(debug=False)
    link.add_worker(0, num_blocks=200_000, block_size=1)
    prompt = range(100_000)
    link.run(1, prompt)
    assert link.start(2, prompt)[0] == 99_999
    link.free(2)
    link.start(3, range(-150_000, 0))  # evicts half of it
    assert link.pools[0] == (0, 50_000, 150_000, 50_000)
    link.core.check_invariants()
    link.remove_worker(0)


def test_without_prefix_caching_nothing_is_matched_or_kept(link: Driver) -> None:
    link.add_worker(1, num_blocks=16, prefix_caching=False)
    link.run(1, A, worker=1)
    assert link.pools[1] == (16, 0, 0, 0)
    link.run(2, A)
    assert link.probe(A) == {0: (16, 0)}
    assert link.start(3, A, worker=1)[0] == 0
    with refused(Code.INVALID_ARGUMENT):
        link.commit(3, [], 17)
    assert link.core.counters.prefix_query_tokens == 16


def test_without_prefix_caching_only_forks_share_blocks() -> None:
    """A fork stores its parent's blocks in a private tree, so that both use them. No other walk reaches this tree."""
    link = Driver()
    link.add_worker(0, num_blocks=16, prefix_caching=False)
    link.start(1, A[:12])
    link.commit(1, [], 12)
    link.match(2, A[:9])
    link.one(d.fork_op(2, 0, 1))
    assert link.match(3, A[:12]) == {}
    assert link.admit(3, 0)[0] == 0
    assert link.pools[0] == (16 - 3 - 1 - 3, 0, 3 + 1 + 3, 0)


# ---------------------------------------------------------------------------------------------------- workers


def test_removing_a_worker_forgets_only_its_blocks(link: Driver) -> None:
    link.add_worker(1, num_blocks=16)
    link.run(1, A)
    link.start(2, A)
    link.start(3, A, worker=1)
    link.commit(3, [], 16)
    link.match(4, A)
    link.remove_worker(0)
    assert link.probe(A) == {1: (16, 16)}
    with refused(Code.NOT_FOUND):
        link.extend(2)
    with refused(Code.NOT_FOUND):
        link.admit(4, 0)
    assert link.admit(4, 1)[0] == 12
    link.start(2, A, worker=1)
    link.remove_worker(1)
    assert link.core.tree is None
    assert not link.core.admitted


def test_mask_bits_of_workers_that_left_are_used_again(link: Driver) -> None:
    for worker in range(1, 200):
        link.add_worker(worker, num_blocks=4)
        link.run(worker, A, worker=worker)
        assert link.probe(A) == {worker: (16, 0)}
        link.remove_worker(worker)
    assert [worker.index for worker in link.core.workers.values()] == [0]


def test_the_block_size_is_free_again_when_the_last_worker_left(link: Driver) -> None:
    with refused(Code.FAILED_PRECONDITION):
        link.add_worker(1, num_blocks=4, block_size=8)
    link.remove_worker(0)
    link.add_worker(1, num_blocks=4, block_size=8)
    link.run(1, A, worker=1)
    assert link.probe(A) == {1: (16, 0)}


def test_a_pool_costs_memory_for_the_blocks_it_used_only() -> None:
    link = Driver()
    tracemalloc.start()
    try:
        link.add_worker(0, num_blocks=2**31 - 1)
        link.start(1, A)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert link.pools[0] == (2**31 - 5, 0, 4, 0)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 70])
def test_one_walk_answers_for_many_workers_at_different_depths(num_workers: int) -> None:
    link = Driver()
    for worker in range(num_workers):
        link.add_worker(worker, num_blocks=16)
        link.start(worker, [*A, -1], worker=worker)
        link.commit(worker, [], 4 * (worker % 5))
    expected = {worker: (4 * (worker % 5),) * 2 for worker in range(num_workers) if worker % 5}
    assert link.probe(A) == expected
    link.free(*range(num_workers))
    assert link.probe(A) == {worker: (depth, 0) for worker, (depth, _) in expected.items()}


# ---------------------------------------------------------------------------------------------------- the link


def test_operations_of_one_exchange_see_those_before_them() -> None:
    link = Driver()
    response = link.exchange(
        d.add_worker_op(0, 8, 4),
        d.match_op(1, A),
        d.admit_op(1, 0),
        d.commit_op([(1, [], 16)]),
        d.free_op([1]),
        d.match_op(2, [*A, *B]),
        d.admit_op(2, 0),
    )
    kinds = [result.WhichOneof("result") for result in response.results]
    assert kinds == [None, "match", "admit", None, None, "match", "admit"]
    assert response.results[-1].admit.num_cached_tokens == 16
    assert link.pools[0] == (0, 0, 8, 0)


def test_pools_are_reported_when_their_counters_changed_only(link: Driver) -> None:
    link.add_worker(1, num_blocks=16)
    link.match(1, A)
    assert [pool.worker for pool in link.exchange(d.admit_op(1, 0)).pools] == [0]
    assert not link.exchange(d.match_op(2, A)).pools
    assert not link.exchange(d.commit_op([(1, [], 16)])).pools
    assert not link.exchange(d.admit_op(2, 1), d.free_op([2])).pools
    assert not link.exchange().pools
    assert {pool.worker: pool.used_blocks for pool in link.core.pool_counters()} == {0: 4, 1: 0}


@pytest.mark.parametrize("exchange", [0, 1, 3])
def test_exchanges_must_follow_one_another(exchange: int) -> None:
    core = CacheCore()
    core.exchange(pb.CacheServiceLinkRequest(exchange=1))
    with pytest.raises(LinkError, match=f"exchange {exchange} came where 2 was expected"):
        core.exchange(pb.CacheServiceLinkRequest(exchange=exchange))


def test_a_reset_forgets_everything_but_the_totals(link: Driver) -> None:
    link.run(1, A)
    link.match(2, A)
    link.core.reset()
    link._exchange = 0
    with refused(Code.NOT_FOUND):
        link.admit(2, 0)
    link.add_worker(0, num_blocks=4, block_size=2)
    assert link.probe(A) == {}
    assert link.core.counters.prefix_query_tokens == 16


def test_only_the_first_admission_of_a_request_counts_as_a_hit_or_a_miss(link: Driver) -> None:
    link.start(1, A[:9])
    link.commit(1, [], 9)
    link.exchange(d.match_op(2, [*A[:9], 5]), d.fork_op(2, 0, 1))
    assert 2 in link.core.admitted
    op = d.admit_op(3, 0)
    op.admit.again = True
    link.exchange(d.match_op(3, A), op)
    assert 3 in link.core.admitted
    assert (link.core.counters.prefix_query_tokens, link.core.counters.prefix_hit_tokens) == (9, 0)


def test_counters_tell_hits_and_evictions_even_of_workers_that_left(link: Driver) -> None:
    link.run(1, A)
    link.run(2, A)
    counters = link.core.counters
    assert (counters.prefix_query_tokens, counters.prefix_hit_tokens) == (32, 12)
    link.match(3, range(64))
    link.exchange(d.admit_op(3, 0), d.remove_worker_op(0))
    assert counters.evicted_blocks == 4


def test_the_same_exchanges_give_the_same_answers() -> None:
    def play() -> list[bytes]:
        link = Driver()
        return [
            link.exchange(*ops).SerializeToString(deterministic=True)
            for ops in (
                [d.add_worker_op(1, 8, 4), d.add_worker_op(0, 8, 4)],
                [d.match_op(1, A), d.admit_op(1, 1), d.match_op(2, A), d.admit_op(2, 0)],
                [d.commit_op([(2, [1], 16), (1, [1], 16)]), d.extend_op([2, 1, 2])],
                [d.free_op([2, 1]), d.match_op(3, [*A, *B])],
            )
        ]

    assert play() == play()


def test_debug_mode_checks_after_each_operation(link: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[bool] = []
    monkeypatch.setattr(CacheCore, "check_invariants", lambda core, amid_exchange=False: checks.append(amid_exchange))
    link.exchange(d.match_op(1, A), d.match_op(2, A))
    assert checks == [True, True, False]


@pytest.mark.parametrize("damage", ["users", "lost block", "lost node", "never evicted"])
def test_debug_mode_notices_damage(link: Driver, damage: str) -> None:
    link.run(1, A[:8])
    link.run(2, A)
    link.start(3, A[:5])
    device, node = link.core.workers[0].device, link.core.admitted[3].node
    match damage:
        case "users":
            node.residencies[0].users += 1
        case "lost block":
            device.pool.take(1)
        case "lost node":
            node.children.clear()
        case "never evicted":
            device.queue.remove(next(iter(device.queue.upcoming(device.index))))
    with pytest.raises(InvariantError):
        link.exchange()
