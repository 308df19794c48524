"""What the cache reports of the tokens that a new sequence could not reuse: on another worker, in flight, evicted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_svc.core import admin
from cache_svc.core.memory.memory import Memory
from cache_svc.core.tree import evicted
from cache_svc.core.tree.evicted import path_hash
from cache_svc.core.tree.nodes import Namespace, subtree
from cache_svc.core.tree.tree import PrefixTree
from tests.unit.cache import driver as d
from tests.unit.cache.driver import Driver

A = list(range(100, 124))  # 6 blocks of 4 tokens
B = list(range(200, 224))

# Cached tokens; on another worker, and which; in flight; evicted.
Told = tuple[int, int, int, int, int]


def link(num_blocks: int = 16, workers: int = 1, partial_reuse: bool = False) -> Driver:
    made = Driver()
    for worker in range(1, workers + 1):
        made.add_worker(worker, num_blocks, partial_reuse=partial_reuse)
    return made


def admitted(cache: Driver, sequence: int, tokens: Sequence[int], worker: int = 1) -> Told:
    cache.match(sequence, tokens)
    granted = cache.one(d.admit_op(sequence, worker)).admit
    return (
        granted.num_cached_tokens,
        granted.num_other_worker_tokens,
        granted.other_worker,
        granted.num_in_flight_tokens,
        granted.num_evicted_tokens,
    )


def test_nothing_is_said_of_new_tokens_and_of_the_last_block() -> None:
    cache = link()
    assert admitted(cache, 1, A) == (0, 0, 0, 0, 0)
    cache.commit(1, [], len(A))
    assert admitted(cache, 2, A) == (20, 0, 0, 0, 0)


def test_tokens_cached_on_another_worker_are_counted() -> None:
    cache = link(workers=2)
    cache.run(1, A[:8], worker=1)
    cache.run(2, A, worker=2)
    assert admitted(cache, 3, A, worker=1) == (8, 12, 2, 0, 0)


def test_tokens_that_another_sequence_computes_are_counted() -> None:
    cache = link(workers=2)
    cache.start(1, A, worker=2)
    assert admitted(cache, 2, A) == (0, 0, 0, 20, 0)
    cache.commit(1, [], 8)
    assert admitted(cache, 3, [*A[:16], *B]) == (0, 8, 2, 8, 0)
    cache.free(1, 2, 3)
    assert admitted(cache, 4, A) == (0, 8, 2, 0, 0)  # no sequence computes the rest any more


def test_evicted_tokens_are_counted() -> None:
    cache = link(num_blocks=8)
    cache.run(1, A, worker=1)
    cache.run(2, [7] * 32, worker=1)  # evicts all of A
    assert admitted(cache, 3, A) == (0, 0, 0, 0, 20)
    cache.commit(3, [], len(A))
    cache.free(3)
    assert admitted(cache, 4, [*A[:8], *B[:8]]) == (8, 0, 0, 0, 0)
    cache.free(4)
    cache.run(5, [7] * 32, worker=1)
    assert admitted(cache, 6, [*A[:8], *B[:8]]) == (0, 0, 0, 0, 8)


def test_evicted_tokens_after_a_copied_beginning_are_counted() -> None:
    cache = link(num_blocks=8, partial_reuse=True)
    cache.run(1, A, worker=1)
    cache.run(2, [*A[:2], *[7] * 30], worker=1)
    assert admitted(cache, 3, A) == (2, 0, 0, 0, 18)


def test_an_evicted_block_is_no_miss_while_the_host_has_it() -> None:
    cache = Driver()
    cache.add_worker(1, 8, num_host_blocks=8, host_tier=True)
    cache.run(1, A, worker=1)
    cache.run(2, [7] * 32, worker=1)
    assert admitted(cache, 3, A) == (20, 0, 0, 0, 0)


def test_a_namespace_says_nothing_of_another_one() -> None:
    cache = link(num_blocks=8)
    cache.run(1, A, worker=1)
    cache.run(2, [7] * 32, worker=1)
    cache.exchange(d.match_op(3, A, salt="pepper"))
    assert cache.one(d.admit_op(3, 1)).admit.num_evicted_tokens == 0


def test_a_reset_forgets_the_evicted_tokens() -> None:
    cache = link(num_blocks=8)
    cache.run(1, A, worker=1)
    cache.run(2, [7] * 32, worker=1)
    admin.forget_unused(cache.core)
    assert admitted(cache, 3, A) == (0, 0, 0, 0, 0)


def test_a_bounded_number_of_evicted_tokens_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evicted, "GENERATION_BYTES", 256)  # four runs
    cache = link(num_blocks=8)
    for sequence in range(50):
        cache.run(sequence, [sequence] * 16, worker=1)
    assert cache.core.tree is not None
    assert 4 <= len(cache.core.tree.evicted) < 8
    assert admitted(cache, 90, [0] * 16) == (0, 0, 0, 0, 0)
    assert admitted(cache, 91, [47] * 16)[4] == 12


prompts = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=20)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(prompts, st.integers(1, 2), st.booleans()), max_size=12), st.booleans())
def test_the_counted_tokens_are_those_before_the_last_block(
    runs: list[tuple[list[int], int, bool]], partial: bool
) -> None:
    cache = link(num_blocks=10, workers=2, partial_reuse=partial)
    for sequence, (prompt, worker, computes) in enumerate(runs):
        cached, other, _, in_flight, evicted_tokens = admitted(cache, sequence, prompt, worker)
        boundary = (len(prompt) - 1) // 4 * 4
        assert cached + other + in_flight + evicted_tokens <= max(boundary, cached)
        if computes or sequence % 2:
            cache.commit(sequence, [], len(prompt))
        cache.free(sequence)


@given(st.lists(prompts, min_size=1, max_size=6))
def test_the_hash_of_a_path_does_not_depend_on_its_nodes(paths: list[list[int]]) -> None:
    hashes: dict[bytes, int] = {}
    for order in (paths, paths[::-1]):
        cache = link(num_blocks=60)
        for sequence, prompt in enumerate(order):
            cache.run(sequence, prompt, worker=1)
        tree = cache.core.tree
        assert tree is not None
        for node in subtree(*tree.roots.values()):
            above, path = node, b""
            while above.parent is not None:
                path, above = above.key + path, above.parent
            assert hashes.setdefault(path, path_hash(node)) == path_hash(node)
    assert len(set(hashes.values())) == len(hashes)


def test_a_split_and_an_undone_split_keep_the_hash() -> None:
    tree = PrefixTree(4)
    root = tree.acquire_root(Namespace())
    node = tree.grow(root, d.pack(A))
    known = path_hash(node)
    front = tree.split(node, 2)
    assert front.path_hash is None
    assert path_hash(node) == known != path_hash(front)
    tree.absorb(front, node)
    assert path_hash(front) == known


def hashed_bytes(monkeypatch: pytest.MonkeyPatch, tree: PrefixTree, num_blocks: int) -> int:
    """How many bytes of tokens are hashed to evict a run of `num_blocks` blocks, one block after the other."""
    sizes: list[int] = []
    extended = evicted._extended

    def counted(hashed: int, tokens: bytes) -> int:
        sizes.append(len(tokens))
        return extended(hashed, tokens)

    memory = Memory(0, tree, num_blocks, keeps=True)
    run = tree.grow(tree.acquire_root(Namespace()), d.pack(range(num_blocks * tree.block_size)))
    memory.hold(run, memory.take(num_blocks))
    memory.leave_path(run)
    monkeypatch.setattr(evicted, "_extended", counted)
    for _ in range(num_blocks):
        memory.take(1)
    assert len(tree.evicted) == num_blocks
    return sum(sizes)


def test_evicting_a_run_block_by_block_hashes_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = PrefixTree(4)
    assert hashed_bytes(monkeypatch, tree, 64) <= 64 * tree.block_bytes


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_the_hash_of_a_front_part_is_that_of_its_tokens(cuts: list[int]) -> None:
    tokens = d.pack(range(1000, 1160))  # 40 blocks
    tree = PrefixTree(4)
    node = tree.grow(tree.acquire_root(Namespace()), tokens)
    path_hash(node)
    for depth in sorted({cut for cut in cuts if cut < 40}, reverse=True):
        node = tree.split(node, depth)
        other = PrefixTree(4)
        alone = other.grow(other.acquire_root(Namespace()), tokens[: depth * tree.block_bytes])
        assert path_hash(node) == path_hash(alone)


def test_a_prompt_with_a_new_next_block_needs_no_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = link(num_blocks=16)
    for sequence in range(1, 9):
        cache.run(sequence, [*A[:8], *[sequence] * 16], worker=1)
    tree = cache.core.tree
    assert tree is not None
    assert len(tree.evicted)
    (root,) = tree.roots.values()
    (shared,) = root.children.values()
    shared.path_hash = None
    assert tree.evicted.count(shared, d.pack([*A[:8], *B]), 0, 7) == 0
    assert shared.path_hash is None


def test_sequences_that_have_computed_their_prompts_are_forgotten() -> None:
    cache = link(num_blocks=64)
    for sequence in range(1, 6):
        cache.run(sequence, [sequence] * 16, worker=1)
    cache.start(6, [6] * 16, worker=1)
    cache.start(7, [7] * 16, worker=1)
    assert [*cache.core._misses._prefilling] == [6, 7]
    assert admitted(cache, 8, [6] * 16) == (0, 0, 0, 12, 0)
