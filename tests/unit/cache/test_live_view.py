"""Snapshots for the live view: what each block is used for, and which prefixes are worth most."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_svc.core import admin, live_view
from cache_svc.core.errors import OpError
from cache_svc.core.live_view import NodeIds, snapshot
from cache_svc.core.tree.nodes import PrefixNode
from paceline.v1 import cache_pb2 as pb
from tests.unit.cache import driver as d
from tests.unit.cache.driver import Driver, Refused

Slices = Generator[None, None, pb.WatchBlocksResponse | None]

A = list(range(100, 116))  # 4 blocks of 4 tokens
B = list(range(200, 216))


def finished(slices: Slices) -> pb.WatchBlocksResponse | None:
    while True:
        try:
            next(slices)
        except StopIteration as made:
            result: pb.WatchBlocksResponse | None = made.value
            return result


def taken(link: Driver, ids: NodeIds | None = None, since_s: float = 0.0) -> pb.WatchBlocksResponse:
    shown = finished(snapshot(link.core, ids or NodeIds(), since_s))
    assert shown is not None
    return shown


def cells(link: Driver) -> list[str]:
    return [worker.cells for worker in taken(link).workers]


@pytest.fixture
def link() -> Driver:
    link = Driver()
    link.add_worker(0, num_blocks=8)
    return link


# ── cells ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_block_has_a_character(link: Driver) -> None:
    assert cells(link) == ["........"]
    link.run(1, A)
    assert cells(link) == ["cccc...."]
    link.start(2, A[:9])  # two blocks of the prefix and one of its own
    assert cells(link) == ["uuccu..."]
    link.start(3, A[:9])
    assert cells(link) == ["ssccuu.."]
    admin.pin(link.core, "p", d.pack(A[:4]))
    assert cells(link) == ["psccuu.."]
    link.free(2, 3)
    assert cells(link) == ["pccc...."]


def test_a_cell_of_several_blocks_shows_the_most_used_one(link: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_view, "MAX_CELLS", 4)
    link.run(1, A)
    link.start(2, A[:5])
    [shown] = taken(link).workers
    assert (shown.num_blocks, shown.blocks_per_cell, shown.cells) == (8, 2, "ucu.")  # of the cells "ucccu..."


def test_forks_share_blocks_also_without_prefix_caching() -> None:
    link = Driver()
    link.add_worker(0, 8, prefix_caching=False)
    link.start(1, A[:9])
    link.commit(1, [], 9)
    link.match(2, A[:9])
    link.one(d.fork_op(2, 0, 1))
    assert cells(link) == ["ssuu...."]


def test_host_blocks_have_cells_of_their_own() -> None:
    link = Driver()
    link.add_worker(0, 4, num_host_blocks=4, host_tier=True)
    link.run(1, A[:8])
    link.run(2, B)  # evicts the blocks of A to the host
    [shown] = taken(link).workers
    assert (shown.cells, shown.host_cells) == ("cccc", "cc..")
    assert (shown.num_host_blocks, shown.host_blocks_per_cell) == (4, 1)
    assert {(node.num_tokens, node.workers[0]) for node in taken(link).nodes} == {(8, 0), (16, 0)}


prompts = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=14)
steps = st.lists(
    st.tuples(st.sampled_from(["start", "commit", "free", "pin", "swap_out", "swap_in"]), st.integers(0, 5), prompts)
)


@settings(max_examples=150, deadline=None)
@given(steps, st.integers(1, 3), st.booleans())
def test_the_cells_add_up_to_the_counters(
    operations: Iterable[tuple[str, int, list[int]]], size: int, tier: bool
) -> None:
    link = Driver()
    for worker in range(2):
        link.add_worker(worker, 12, block_size=size, partial_reuse=tier, num_host_blocks=8, host_tier=tier)
    tokens: dict[int, int] = {}
    for number, (what, sequence, prompt) in enumerate(operations):
        with contextlib.suppress(Refused, OpError):
            if what == "start":
                link.match(sequence, prompt)
                tokens[sequence] = len(prompt)
                link.admit(sequence, number % 2)
            elif what == "commit":
                link.commit(sequence, [], tokens.get(sequence, 1))
            elif what == "free":
                link.free(sequence)
            elif what == "pin":
                admin.pin(link.core, f"{number}", d.pack(prompt))
            elif what == "swap_out":
                link.swap_out(sequence)
            else:
                link.swap_in(sequence)
        shown = taken(link)
        for one, pool in zip(shown.workers, link.core.present_counters(), strict=True):
            used = sum(one.cells.count(state) for state in "usp")
            assert (one.cells.count("."), one.cells.count("c"), used) == (
                pool.free_blocks,
                pool.cached_blocks,
                pool.used_blocks,
            )
            host = one.host_cells
            assert (host.count("."), host.count("c")) == (pool.free_host_blocks, pool.cached_host_blocks)
            assert (len(one.cells), len(host)) == (12, 8)
        known = {node.id: node for node in shown.nodes}
        assert len(known) == len(shown.nodes) == shown.num_nodes
        assert sum(node.num_tokens for node in shown.nodes) == shown.num_tokens
        assert all(node.parent in known for node in shown.nodes if node.parent)


# ── the prefix tree ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_nodes_tell_what_they_save(link: Driver) -> None:
    link.now_ms = 1_000
    link.run(1, A[:8])
    link.now_ms = 5_000
    link.run(2, [*A[:8], *B[:8]])
    link.start(3, [*A[:8], 7])
    ids = NodeIds()
    top, leaf = taken(link, ids, since_s=0.5).nodes
    assert (top.parent, leaf.parent, leaf.id) == (0, top.id, top.id + 1)
    assert (top.num_tokens, top.num_hits, top.saved_tokens, top.num_users) == (8, 2, 16, 1)
    assert (leaf.num_tokens, leaf.num_blocks, leaf.num_hits, leaf.num_users) == (8, 2, 0, 0)
    assert (top.age_s, leaf.age_s) == (4.5, 0.5)
    assert [node.id for node in taken(link, ids).nodes] == [top.id, leaf.id]
    admin.pin(link.core, "p", d.pack(A[:8]))
    assert [node.pinned for node in taken(link, ids).nodes] == [True, False]


def test_a_node_is_shown_with_all_nodes_before_it(link: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_view, "MAX_NODES", 1)
    link.run(1, A[:4])
    link.run(2, A)  # the second node saves more tokens than the first one
    link.run(3, A)
    link.run(4, B[:4])
    shown = taken(link)
    assert [(node.num_tokens, node.parent != 0) for node in shown.nodes] == [(4, False), (8, True)]
    assert (shown.num_nodes, shown.num_tokens) == (4, 20)
    monkeypatch.setattr(live_view, "MAX_NODES_WITH_ANCESTORS", 1)
    assert not taken(link).nodes


def test_a_namespace_is_recognised_and_not_disclosed(link: Driver) -> None:
    salt = "0123456789abcdef" * 2
    link.exchange(d.match_op(1, A, salt=salt), d.admit_op(1, 0), d.commit_op([(1, [], 16)]))
    assert [node.namespace for node in taken(link).nodes] == [salt[:16]]


def test_a_snapshot_survives_what_happens_between_its_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_view, "SLICE_NODES", 1)
    link = Driver()
    link.add_worker(0, num_blocks=8)
    for first in range(4):
        link.run(first, [first] * 8)
    slices, number, result = snapshot(link.core, NodeIds(), 0.0), 10, None
    while result is None:
        try:
            next(slices)
        except StopIteration as made:
            result = made.value
        else:
            link.run(number, [number] * 12)  # evicts nodes that were read, and nodes that were not
            number += 1
    assert len(result.workers[0].cells) == 8
    assert all(node.workers[:] == [0] for node in result.nodes)


def test_there_is_no_snapshot_while_a_worker_comes_or_goes(link: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_view, "SLICE_NODES", 1)
    link.run(1, A)
    slices = snapshot(link.core, NodeIds(), 0.0)
    next(slices)
    link.add_worker(1, 8)
    assert finished(slices) is None


def test_without_a_worker_there_are_only_counts() -> None:
    shown = taken(Driver())
    assert (shown.linked, len(shown.workers), shown.num_nodes) == (False, 0, 0)


def test_the_id_of_a_node_that_is_not_shown_is_forgotten() -> None:
    ids, (a, b) = NodeIds(), (PrefixNode.__new__(PrefixNode) for _ in range(2))
    assert ids.renew([a, b]) == {a: 1, b: 2}
    assert ids.renew([b]) == {b: 2}
    assert ids.renew([a]) == {a: 3}
