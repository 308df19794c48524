"""Pins keep the cached blocks of a prefix; a reset forgets all unused blocks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from cache_svc.core import admin
from cache_svc.core.cache import CacheCore
from cache_svc.core.errors import Code, OpError
from cache_svc.core.sequences import pins
from cache_svc.core.sequences.pins import Pin
from cache_svc.core.tree.nodes import Namespace
from paceline.v1 import cache_pb2 as pb
from tests.unit.cache import driver as d
from tests.unit.cache.follower import Follower, stored_in

A = list(range(100, 116))
B = list(range(200, 216))


@pytest.fixture
def link() -> d.Driver:
    made = d.Driver()
    made.add_worker(0, 16)
    return made


def pin(link: d.Driver, name: str, tokens: list[int], **options: Any) -> dict[int, int]:
    """The number of pinned tokens on each worker."""
    made = admin.pin(link.core, name, d.pack(tokens), **options)
    link.core.check_invariants()
    return {worker.worker_id: num_tokens for worker, num_tokens in admin.pinned_tokens(made)}


def refused(link: d.Driver, *arguments: Any, **options: Any) -> tuple[Code, str]:
    with pytest.raises(OpError) as error:
        admin.pin(link.core, *arguments, **options)
    link.core.check_invariants()
    return error.value.code, error.value.message


def test_a_pinned_block_is_not_evicted(link: d.Driver) -> None:
    link.run(1, A)
    assert pin(link, "system", A) == {0: 16}
    for i in range(5):
        link.run(10 + i, [i] * 44)
    assert link.probe(A) == {0: (16, 16)}
    admin.unpin(link.core, "system")
    link.run(20, [9] * 64)
    assert link.probe(A) == {}


def test_the_next_exchange_reports_pinned_blocks(link: d.Driver) -> None:
    link.run(1, A)
    assert link.pools[0][:3] == (12, 4, 0)
    pin(link, "system", A[:10])
    link.exchange()
    assert link.pools[0][:3] == (12, 2, 2)
    admin.unpin(link.core, "system")
    link.exchange()
    assert link.pools[0][:3] == (12, 4, 0)
    assert admin.forget_unused(link.core) == {0: 4}
    link.exchange()
    assert link.pools[0][:3] == (16, 0, 0)


def test_every_worker_pins_the_blocks_that_it_holds(link: d.Driver) -> None:
    link.add_worker(1, 16)
    link.add_worker(2, 16)
    link.add_worker(3, 16, prefix_caching=False)
    link.run(1, A)
    link.run(2, [*A[:8], *B], worker=1)
    link.run(3, A, worker=3)
    assert pin(link, "all", A) == {0: 16, 1: 8}
    assert pin(link, "one", A, worker_ids=[1]) == {1: 8}
    assert refused(link, "none", d.pack(A), worker_ids=[2])[0] is Code.NOT_FOUND
    link.remove_worker(1)
    assert list(link.core.pins.by_name) == ["all"]
    link.remove_worker(0)
    assert not link.core.pins.by_name


def test_a_pin_ends_with_its_time(link: d.Driver) -> None:
    link.run(1, A)
    pin(link, "short", A, ttl_ms=500, now_ms=1000)
    pin(link, "long", A[:4], now_ms=1000)
    admin.expire_pins(link.core, 1499)
    assert list(link.core.pins.by_name) == ["short", "long"]
    admin.expire_pins(link.core, 1500)
    assert list(link.core.pins.by_name) == ["long"]
    link.exchange()
    assert link.pools[0][:3] == (12, 3, 1)


def test_pins_are_limited_to_a_share_of_the_pool_and_common_blocks_count_once(link: d.Driver) -> None:
    link.run(1, A)
    link.run(2, [*A[:8], *B[:8]])
    link.run(3, B[:12])
    pin(link, "one", A)
    pin(link, "two", [*A[:8], *B[:8]])
    code, message = refused(link, "three", d.pack(B[:12]))
    assert code is Code.RESOURCE_EXHAUSTED
    assert message == (
        "token_ids: would pin 3 more blocks of worker 0, which has 6 pinned blocks; the limit is 8 (of 16)"
    )
    assert pin(link, "three", B[:8]) == {0: 8}
    assert link.core.pins.num_blocks(link.core.workers[0]) == 8


def test_a_pin_without_a_model_name_is_refused_if_several_models_match(link: d.Driver) -> None:
    for sequence, (model, salt) in enumerate((("m", ""), ("m", "s"), ("n", "s")), 1):
        op = d.match_op(sequence, A, salt=salt)
        op.match.namespace.model = model
        link.exchange(op, d.admit_op(sequence, 0), d.commit_op([(sequence, [], 16)]), d.free_op([sequence]))
    assert pin(link, "plain", A[:4]) == {0: 4}
    assert link.core.pins.by_name["plain"].namespace == Namespace("m")
    assert refused(link, "which", d.pack(A), Namespace(cache_salt="s")) == (
        Code.INVALID_ARGUMENT,
        "namespace.model: name one of 'm', 'n'",
    )
    assert pin(link, "n", A[:4], namespace=Namespace("n", "", "s")) == {0: 4}
    assert refused(link, "lora", d.pack(A), Namespace("m", "x"))[0] is Code.NOT_FOUND
    assert admin.forget_unused(link.core, cache_salt="s", model="m") == {0: 4}
    assert admin.forget_unused(link.core, lora="x") == {0: 0}
    assert admin.forget_unused(link.core) == {0: 6}
    link.core.check_invariants()


def test_bad_pins_are_refused_with_the_field_and_the_limit(link: d.Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    link.run(1, A)
    tokens = d.pack(A)
    assert refused(link, "", tokens) == (Code.INVALID_ARGUMENT, "name: has 0 characters, which is not within 1..128")
    assert refused(link, "x" * 129, tokens)[0] is Code.INVALID_ARGUMENT
    assert refused(link, "x", tokens[:-1])[1] == "token_ids: 63 bytes is not a whole number of int32"
    assert refused(link, "x", tokens[:12]) == (
        Code.INVALID_ARGUMENT,
        "token_ids: has 3 tokens, but only whole blocks of 4 tokens can be pinned",
    )
    assert refused(link, "x", d.pack(B)) == (
        Code.NOT_FOUND,
        "token_ids: no block of the 16 tokens is cached on these workers",
    )
    assert refused(link, "x", tokens, worker_ids=[0, 7]) == (Code.NOT_FOUND, "workers: 7 not known")
    pin(link, "x", A)
    assert refused(link, "x", tokens)[0] is Code.ALREADY_EXISTS
    monkeypatch.setattr(pins, "MAX_PINS", 1)
    assert refused(link, "y", tokens) == (Code.RESOURCE_EXHAUSTED, "there are 1 pins, which is the limit")
    with pytest.raises(OpError, match="nothing is pinned as 'z'"):
        admin.unpin(link.core, "z")
    assert refused(d.Driver(), "x", tokens) == (Code.NOT_FOUND, "there is no worker, so nothing is cached")


def test_a_reset_leaves_used_and_pinned_blocks(link: d.Driver) -> None:
    link.run(1, A)
    link.run(2, B)
    link.start(3, [*B, 1])
    pin(link, "a", A[:8])
    assert admin.forget_unused(link.core) == {0: 2}
    link.core.check_invariants()
    assert link.probe(A) == {0: (8, 8)}
    assert link.probe(B) == {0: (16, 16)}


def test_the_metrics_show_pins_and_resets_before_the_next_exchange(link: d.Driver) -> None:
    def shown() -> tuple[int, int, int]:
        (pool,) = link.core.pool_counters()
        return pool.free_blocks, pool.cached_blocks, pool.used_blocks

    link.run(1, A)
    assert shown() == (12, 4, 0)
    pin(link, "a", A[:8])
    assert shown() == (12, 2, 2)
    admin.forget_unused(link.core)
    assert shown() == (14, 0, 2)
    admin.unpin(link.core, "a")
    assert shown() == (14, 2, 0)
    link.exchange()
    assert link.pools[0][:3] == (14, 2, 0)  # the scheduler still learns of it


def test_waiting_sequences_learn_of_a_reset(link: d.Driver) -> None:
    link.run(1, A)
    assert link.match(2, [*A, 1]) == {0: (16, 0)}
    admin.forget_unused(link.core)
    (update,) = link.exchange().match_updates
    assert (update.sequence, list(update.matches)) == (2, [])


def test_the_pins_of_a_worker_are_given_up(link: d.Driver) -> None:
    """All pins of the worker are given up; pins of other workers stay."""
    link.add_worker(1, 16)
    for worker in (0, 1):
        link.run(1, A[:12], worker=worker)
    link.run(2, B)
    pin(link, "a", A[:12])
    pin(link, "b", B)
    link.exchange(pb.CacheOp(give_up_pins=pb.GiveUpPinsOp(worker=0)))
    assert link.pools[0][2] == 0
    assert link.core.pins.by_name.keys() == {"a"}
    assert link.pools[1][2] == 3
    link.exchange(pb.CacheOp(give_up_pins=pb.GiveUpPinsOp(worker=0)))
    assert link.core.counters.pins_given_up == 1
    with pytest.raises(d.Refused) as error:
        link.one(pb.CacheOp(give_up_pins=pb.GiveUpPinsOp(worker=7)))
    assert error.value.code is Code.NOT_FOUND


def test_a_reset_link_forgets_its_pins(link: d.Driver) -> None:
    link.run(1, A)
    pin(link, "a", A)
    link.core.reset()
    assert not link.core.pins.by_name


tokens = st.builds(lambda same, tail: [0] * same + tail, st.integers(0, 8), st.lists(st.integers(0, 1), max_size=6))


class PinMachine(RuleBasedStateMachine):
    """After any operations, the invariants hold, a follower of the cache's events knows the same stored blocks as the
    cache, and the blocks of each live pin are cached."""

    @initialize(
        block_size=st.integers(1, 3),
        num_blocks=st.lists(st.integers(6, 16), min_size=1, max_size=2),
        num_host=st.sampled_from([0, 4, 20]),
    )
    def begin(self, block_size: int, num_blocks: list[int], num_host: int) -> None:
        self.link = d.Driver()
        self.core: CacheCore = self.link.core
        for worker, blocks in enumerate(num_blocks):
            self.link.add_worker(worker, blocks, block_size, num_host_blocks=num_host, host_tier=True)
        self.follower = Follower()
        self.follower.join(self.core.events, self.core.tree)
        self.running: dict[int, list[int]] = {}
        self.now_ms = 0
        self.pinned: dict[str, tuple[list[int], dict[int, int]]] = {}

    def do(self, *ops: pb.CacheOp) -> None:
        given_up = self.core.counters.pins_given_up
        self.link.exchange(*ops)
        self.check(self.core.counters.pins_given_up > given_up)

    def check(self, given_up: bool = False) -> None:
        self.core.check_invariants()
        self.follower.read()
        assert self.follower.non_empty() == stored_in(self.core)
        if given_up:
            there = self.core.pins.by_name
            self.pinned = {
                name: (prompt, {w: n for w, n in held.items() if self.core.workers[w] in there[name].last_nodes})
                for name, (prompt, held) in self.pinned.items()
                if name in there
            }
        assert self.core.pins.by_name.keys() == self.pinned.keys()
        for prompt, held in self.pinned.values():
            assert self.core.tree is not None
            root = self.core.tree.roots[Namespace()]
            node, depth = self.core.tree.walk(d.pack([*prompt, 5]), root, 0)
            for worker, num_tokens in held.items():
                _, cached, referenced = self.core.workers[worker].device.held(node, depth)
                assert min(cached, referenced) * self.core.tree.block_size >= num_tokens

    @rule(prompt=tokens, data=st.data())
    def start(self, prompt: list[int], data: st.DataObject) -> None:
        sequence = next(s for s in range(1, 100) if s not in self.running)
        worker = data.draw(st.sampled_from(sorted(self.core.workers)))
        prompt = [*prompt, 1]
        self.do(d.match_op(sequence, prompt))
        self.do(d.admit_op(sequence, worker))
        if sequence in self.core.admitted:
            self.running[sequence] = prompt
            self.do(d.commit_op([(sequence, [], len(prompt))]))
        else:
            self.do(d.free_op([sequence]))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[sequence]
        self.do(d.free_op([sequence]))

    @rule(prompt=tokens, ttl_ms=st.sampled_from([0, 0, 3, 9]), data=st.data())
    def pin(self, prompt: list[int], ttl_ms: int, data: st.DataObject) -> None:
        name = str(data.draw(st.integers(0, 5)))
        try:
            made: Pin = admin.pin(self.core, name, d.pack(prompt), ttl_ms=ttl_ms, now_ms=self.now_ms)
        except OpError:
            pass
        else:
            self.pinned[name] = prompt, {worker.worker_id: n for worker, n in admin.pinned_tokens(made)}
        self.check()

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.pinned)))
        admin.unpin(self.core, name)
        del self.pinned[name]
        self.check()

    @rule(passed=st.integers(1, 5))
    def time_passes(self, passed: int) -> None:
        self.now_ms += passed
        expired = {n for n, p in self.core.pins.by_name.items() if p.expires_ms and p.expires_ms <= self.now_ms}
        admin.expire_pins(self.core, self.now_ms)
        for name in expired:
            del self.pinned[name]
        self.check()

    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.core.workers)))
        self.do(pb.CacheOp(give_up_pins=pb.GiveUpPinsOp(worker=worker)))
        assert not self.core.pins.num_blocks(self.core.workers[worker])

    @rule()
    def reset(self) -> None:
        admin.forget_unused(self.core)
        assert all(worker.device.cached_blocks == 0 for worker in self.core.workers.values())
        assert all(worker.host.cached_blocks == 0 for worker in self.core.workers.values())
        self.check()


TestPinMachine = PinMachine.TestCase
TestPinMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
