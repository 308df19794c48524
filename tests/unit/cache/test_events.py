"""Watchers rebuild the stored blocks from events alone, whenever they join, leave and come back."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from cache_svc.core.tree.events import Behind, EventLog
from paceline.v1 import cache_pb2 as pb
from tests.unit.cache import driver as d
from tests.unit.cache.follower import Follower, State, chained, namespace_id, stored_in
from tests.unit.cache.model_memory import Prefix
from tests.unit.cache.test_against_model import CacheMachine

A = list(range(100, 116))
KEPT = 6


class EventsMachine(CacheMachine):
    def send(self) -> None:
        if not hasattr(self, "active"):
            self.active: list[Follower] = []
            self.away: list[Follower] = []
            self.slow: list[Follower] = []
        log = self.log()
        log.kept = KEPT
        super().send()
        for follower in self.active:
            try:
                follower.read()
            except Behind:
                assert follower.watcher is not None
                assert follower.watcher.number < log.last - KEPT + 1
                follower.leave()
                follower.join(log, self.link.core.tree)
                follower.read()
            assert follower.non_empty() == self.expected_state()
        for follower in list(self.slow):
            try:
                follower.read(1)
            except Behind:
                self.slow.remove(follower)
                follower.leave()
                self.away.append(follower)

    def log(self) -> EventLog:
        return self.link.core.events

    def expected_state(self) -> State:
        """The state by the naive model, which must equal the state of the tree."""
        state: State = {}
        for worker_id, worker in self.model.workers.items():
            if not worker.prefix_caching:
                continue
            for tier, memory in ((pb.CACHE_TIER_DEVICE, worker), (pb.CACHE_TIER_HOST, worker.host)):
                if known := self.by_id(memory.stored):
                    state[worker_id, tier] = known
        assert state == stored_in(self.link.core)
        return state

    def by_id(self, stored: dict[Prefix, int]) -> dict[int, int]:
        ids = {}
        for prefix, block in stored.items():
            salt, *prompt = cast(Any, prefix)
            if len(prompt) % self.block_size:
                continue  # events are about whole blocks
            parent = namespace_id(salt=str(salt))
            for begin in range(0, len(prompt), self.block_size):
                parent = chained(parent, d.pack(prompt[begin : begin + self.block_size]))
            ids[parent] = block
        return ids

    @rule(slow=st.booleans())
    def join(self, slow: bool) -> None:
        follower = Follower()
        follower.join(self.log(), self.link.core.tree)
        if not slow:
            follower.read()
            assert follower.num_snapshots == 1
        (self.slow if slow else self.active).append(follower)

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        follower = data.draw(st.sampled_from(self.active))
        self.active.remove(follower)
        follower.leave()
        self.away.append(follower)

    @precondition(lambda self: self.away)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        follower = data.draw(st.sampled_from(self.away))
        self.away.remove(follower)
        snapshots, last, log = follower.num_snapshots, follower.last, self.log()
        missed = log.last - last
        kept_on = log.is_on
        follower.join(log, self.link.core.tree)
        follower.read()
        if last and kept_on:
            assert (follower.num_snapshots > snapshots) == (missed > KEPT)
        self.active.append(follower)

    @precondition(lambda self: self.slow)
    @rule()
    def slow_ones_catch_up(self) -> None:
        self.active += self.slow
        self.slow = []
        self.send()


TestEventsMachine = EventsMachine.TestCase
TestEventsMachine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


@pytest.fixture
def link() -> d.Driver:
    return d.Driver()


def follow(link: d.Driver) -> Follower:
    follower = Follower()
    follower.join(link.core.events, link.core.tree)
    follower.read()
    return follower


def taken(follower: Follower) -> list[str]:
    """Kinds of the events since the last time."""
    assert follower.watcher is not None
    kinds: list[str] = []
    while (event := follower.watcher.take()) is not None:
        kinds.append(event.WhichOneof("event") or "")
    return kinds


def test_a_run_of_blocks_is_one_event(link: d.Driver) -> None:
    link.add_worker(3, 8)
    follower = follow(link)
    link.run(1, A, worker=3)
    assert follower.watcher is not None
    event = follower.watcher.take()
    assert event is not None
    stored = event.stored
    assert (stored.worker, stored.start_block, stored.tier) == (3, 0, pb.CACHE_TIER_DEVICE)
    assert d.unpack(stored.token_ids) == A
    assert list(stored.block_ids) == [1, 2, 3, 4]
    assert stored.parent_prefix_id == namespace_id()
    assert stored.prefix_ids[0] == chained(namespace_id(), d.pack(A[:4]))
    assert follower.watcher.take() is None


def test_ids_do_not_change_between_versions() -> None:
    """Ids are the same in every process and version, because other programs compute them too."""
    assert namespace_id() == 0x457F9A5EEB1FDBA0
    assert chained(namespace_id("m", "l", "s"), d.pack([1, 2, 3, 4])) == 0x66BC7288D5F2808D


def test_eviction_removes_from_the_end_and_tells_the_ids(link: d.Driver) -> None:
    link.add_worker(0, 4)
    follower = follow(link)
    link.run(1, A)
    link.start(2, [7] * 8)
    follower.read()
    ids = list(follower.stored[0, pb.CACHE_TIER_DEVICE].values())
    assert ids == [1, 2]


def test_a_demoted_block_is_stored_on_the_host_and_removed_from_the_device(link: d.Driver) -> None:
    link.add_worker(0, 4, num_host_blocks=8, host_tier=True)
    follower = follow(link)
    link.run(1, A)
    link.run(2, [7] * 8)
    follower.read()
    state = follower.non_empty()
    assert len(state[0, pb.CACHE_TIER_DEVICE]) == 4
    assert len(state[0, pb.CACHE_TIER_HOST]) == 2
    link.remove_worker(0)
    follower.read()
    assert follower.non_empty() == {}


def test_a_removed_worker_and_a_closed_link_clear_their_blocks(link: d.Driver) -> None:
    link.add_worker(0, 8)
    link.add_worker(1, 8)
    link.add_worker(2, 8, prefix_caching=False)
    follower = follow(link)
    for worker in (0, 1, 2):
        link.run(worker + 1, A, worker=worker)
    assert taken(follower) == ["stored", "stored"]
    link.remove_worker(2)  # which stores nothing
    assert taken(follower) == []
    link.remove_worker(0)
    assert taken(follower) == ["cleared"]
    link.core.reset()
    assert taken(follower) == ["cleared"]


def test_nothing_is_recorded_or_hashed_without_watchers(link: d.Driver) -> None:
    link.add_worker(0, 8)
    link.run(1, A)
    assert link.core.tree is not None
    (root,) = link.core.tree.roots.values()
    (node,) = root.children.values()
    assert (link.core.events.last, node.prefix_ids, root.prefix_ids) == (0, None, None)


def test_recording_ends_when_no_watcher_could_continue(link: d.Driver) -> None:
    log = link.core.events
    log.kept = 3
    link.add_worker(0, 2)
    follower = follow(link)
    link.run(1, [1] * 4)
    follower.read()
    follower.leave()
    for i in range(2, 6):
        assert log.is_on == (i < 5)
        link.run(i, [i] * 4)
    last = log.last
    link.run(9, [9] * 4)
    assert (log.last, log.is_on) == (last, False)
    follower.join(log, link.core.tree)
    follower.read()
    assert follower.num_snapshots == 2
    assert len(follower.stored[0, pb.CACHE_TIER_DEVICE]) == 2


def test_a_watcher_with_a_number_from_another_start_gets_a_snapshot(link: d.Driver) -> None:
    log = link.core.events = EventLog(first_number=1000)
    link.add_worker(0, 8)
    assert follow(link).last == 999
    for number in (1, 998, 1000, 2**63):
        follower = Follower()
        follower.last = number
        follower.join(log, link.core.tree)
        follower.read()
        assert (follower.num_snapshots, follower.last) == (1, 999)


def test_a_snapshot_shows_the_state_at_the_time_of_the_call(link: d.Driver) -> None:
    """However slowly the snapshot is read."""
    link.add_worker(0, 8)
    link.run(1, A)
    follower = Follower()
    follower.join(link.core.events, link.core.tree)
    link.run(2, [*A[:8], *[5] * 16])  # splits, and evicts
    follower.read(3)
    assert sorted(follower.stored[0, pb.CACHE_TIER_DEVICE].values()) == [1, 2, 3, 4]
    follower.read()
    assert follower.non_empty() == stored_in(link.core)


def test_watchers_get_no_events_about_partial_blocks(link: d.Driver) -> None:
    link.add_worker(0, 4, partial_reuse=True)
    follower = follow(link)
    link.run(1, A[:3])
    link.run(2, [7] * 16)
    assert taken(follower) == ["stored"], "the three tokens were evicted for the four blocks of sequence 2"


def test_a_snapshot_has_no_blocks_that_are_not_full(link: d.Driver) -> None:
    link.add_worker(0, 4, partial_reuse=True)
    follow(link).leave()
    link.run(1, A[:7])
    follower = follow(link)
    assert list(follower.stored[0, pb.CACHE_TIER_DEVICE].values()) == [1]
