"""The core agrees with the naive model: results, tables, counters, free lists, eviction order, for all operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from cache_svc.core.errors import Code
from cache_svc.core.memory.eviction import STRATEGIES
from cache_svc.core.tree import tree
from cache_svc.core.tree.nodes import subtree
from paceline.v1 import cache_pb2 as pb
from tests.unit.cache import driver as d
from tests.unit.cache.model import Model, ModelRefusal, Result
from tests.unit.cache.model_memory import Prefix

# Few of everything, so that prefixes meet, pools run dry and ids are unknown as often as known.
workers = st.integers(0, 2)
sequences = st.integers(0, 7)
tokens = st.builds(lambda same, tail: [0] * same + tail, st.integers(0, 8), st.lists(st.integers(0, 1), max_size=6))
# True: the operation waits, and goes in one exchange with the operations that follow.
held = st.sampled_from([False, False, True])


# Ranges of tokens, each kept with a retention priority, for a while or for ever. Most requests have no metadata.
ranges = st.builds(
    lambda cuts, levels: [(a, b, p, ms) for a, b, (p, ms) in zip(cuts, [*cuts[1:], 0], levels, strict=False)],
    st.lists(st.integers(0, 8), min_size=1, max_size=3, unique=True).map(sorted),
    st.lists(st.tuples(st.sampled_from([0, 35, 80]), st.sampled_from([0, 0, 5, 20])), min_size=1, max_size=3),
)
salts = st.sampled_from(["", "", "", "pepper"])
metadata = st.one_of(
    st.just((0.0, (), "")), st.tuples(st.sampled_from([0.0, 1.0, -2.0]), st.one_of(st.just(()), ranges), salts)
)


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.integers(1, 3),
        num_blocks=st.lists(st.integers(4, 16), min_size=1, max_size=3),
        num_host=st.sampled_from([0, 2, 6, 20]),
        node_tokens=st.sampled_from([6, tree.MAX_NODE_TOKENS]),
        eviction=st.sampled_from(["lru", *STRATEGIES]),
        partial=st.booleans(),
        tier=st.sampled_from([False, True, True]),
    )
    def begin(
        self,
        block_size: int,
        num_blocks: list[int],
        num_host: int,
        node_tokens: int,
        eviction: str,
        partial: bool,
        tier: bool,
    ) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(tree, "MAX_NODE_TOKENS", node_tokens)
        self.link = d.Driver(eviction=eviction)
        self.model = Model(eviction)
        self.ops: list[pb.CacheOp] = []
        self.expected: list[Result] = []
        self.reported: dict[int, dict[int, tuple[int, int, int]]] = {}  # of each waiting sequence: the last report
        self.block_size = block_size
        for worker, blocks in enumerate(num_blocks):
            made = worker, blocks, block_size, True, num_host, partial, tier
            self.do(d.add_worker_op(*made), self.model.add_worker, *made)

    def do(self, op: pb.CacheOp, model: Callable[..., Result], *args: object, hold: bool = False) -> None:
        try:
            self.expected.append(model(*args))
        except ModelRefusal as refusal:
            self.expected.append(("error", refusal.code))
        self.ops.append(op)
        if not hold:
            self.send()

    def send(self) -> None:
        known = {worker_id: self.told(worker_id) for worker_id in self.link.pools}
        response = self.link.exchange(*self.ops)
        moves = {worker_id: worker.host.moves for worker_id, worker in self.model.workers.items() if worker.host.moves}
        told_moves = {moves.worker: {host: device for device, host in d.pairs(moves)} for moves in response.demotions}
        assert told_moves == moves
        self.model.end_exchange()
        self.check_matches(response)
        assert [self.result(result) for result in response.results] == self.expected
        self.ops, self.expected = [], []
        now = {
            worker_id: (worker.counters(), worker.host_counters()) for worker_id, worker in self.model.workers.items()
        }
        for pool in response.pools:
            # A worker that was removed in the last exchange and added in this one may have the same counters. It is
            # reported anyway.
            assert self.told(pool.worker) == now[pool.worker]
        told = {pool.worker for pool in response.pools}
        assert all(worker_id in told for worker_id in now if now[worker_id] != known.get(worker_id))
        assert {worker_id: self.told(worker_id) for worker_id in now} == now
        self.compare_states()

    def told(self, worker: int) -> tuple[tuple[int, int, int, int], tuple[int, int, int]]:
        free, used = self.link.host_pools[worker]
        return self.link.pools[worker], (free, self.link.cached_host[worker], used)

    def check_matches(self, response: pb.CacheServiceLinkResponse) -> None:
        """The longest known match of a waiting sequence is right, and every report is complete."""
        for op, result in zip(self.ops, response.results, strict=True):
            if result.HasField("match"):
                self.reported[op.match.sequence] = d.tiers(result.match.matches)
        updated = [update.sequence for update in response.match_updates]
        assert len(set(updated)) == len(updated)
        for update in response.match_updates:
            matches = d.tiers(update.matches)
            assert matches == self.model.matches(update.sequence)
            self.reported[update.sequence] = matches
        for op, result in zip(self.ops, response.results, strict=True):
            if op.HasField("rematch") and not result.HasField("error"):
                for sequence in op.rematch.sequences:
                    if sequence in self.model.waiting and (op.rematch.always or sequence not in updated):
                        assert sequence in updated or self.reported[sequence] == self.model.matches(sequence)
                        assert sequence in updated or not op.rematch.always
        for sequence in list(self.model.waiting) if self.model.workers else ():
            matches = self.model.matches(sequence)
            # A subscription does not notice a change within a block, or on one of several workers (tree/nodes.py).
            known, longest = (
                max((device + host for device, _, host in those.values()), default=0)
                for those in (self.reported[sequence], matches)
            )
            assert known // self.block_size == longest // self.block_size
            assert known >= longest or len({worker.partial_reuse for worker in self.model.workers.values()}) > 1

    @staticmethod
    def result(result: pb.CacheOpResult) -> Result:
        match result.WhichOneof("result"):
            case "error":
                assert result.error.message
                return "error", Code(result.error.code)
            case "match":
                return "match", d.tiers(result.match.matches)
            case "admit":
                admit = result.admit
                return "admit", admit.num_cached_tokens, d.unpack(admit.block_table), admit.copy_from, d.pairs(admit)
            case "extend":
                return "extend", d.unpack(result.extend.block_ids)
            case "swap_out":
                out = result.swap_out
                return "swap_out", d.unpack(out.device_blocks), d.unpack(out.host_blocks)
            case "swap_in":
                back, admit = result.swap_in, result.swap_in.admit
                blocks = d.unpack(back.device_blocks), d.unpack(back.host_blocks)
                return "swap_in", admit.num_cached_tokens, d.unpack(admit.block_table), *blocks
            case _:
                return ("ok",)

    def compare_states(self) -> None:
        core = self.link.core
        assert {s: d.unpack(subscription.token_ids) for s, subscription in core.waiting.items()} == self.model.waiting
        assert core.admitted.keys() == self.model.running.keys()
        for sequence_id, sequence in core.admitted.items():
            expected = self.model.running[sequence_id]
            assert list(sequence.table) == expected.table
            assert d.unpack(bytes(sequence.tokens)) == expected.tokens
            assert sequence.num_computed_tokens == expected.computed
        assert core.swapped.keys() == self.model.swapped.keys()
        for sequence_id, swapped in core.swapped.items():
            off_device = self.model.swapped[sequence_id]
            assert (d.unpack(swapped.token_ids), list(swapped.host_blocks)) == (off_device.tokens, off_device.host)
            assert swapped.num_computed_tokens == off_device.computed
        prefixes: set[Prefix] = set()
        for worker_id, model_worker in self.model.workers.items():
            worker = core.workers[worker_id]
            for memory, model in ((worker.device, model_worker), (worker.host, model_worker.host)):
                order, pool = memory.queue.upcoming(memory.index), memory.pool
                cached = [block for residency in order for block in reversed(residency.blocks)]
                assert cached == [model.stored[prefix] for prefix in model.eviction_order()]
                untouched = list(range(pool.num_blocks, pool.first_untouched - 1, -1))
                assert untouched + pool.given_back() == model.free
                prefixes |= model.stored.keys()
        nodes = list(subtree(*core.tree.roots.values())) if core.tree else []
        assert sum(node.end - node.start for node in nodes) == len(prefixes)

    @precondition(lambda self: self.model.workers)
    @rule(tokens=tokens, hold=held)
    def wait(self, tokens: list[int], hold: bool) -> None:
        sequence = next(s for s in range(1, 100) if s not in self.everything())
        self.do(d.match_op(sequence, tokens), self.model.match, sequence, tokens, hold=hold)

    @rule(passed_ms=st.integers(1, 30))
    def time_passes(self, passed_ms: int) -> None:
        if self.ops:
            self.send()  # an exchange has one time
        self.link.now_ms += passed_ms
        self.model.pass_time(self.link.now_ms)

    @precondition(lambda self: self.model.waiting)
    @rule(data=st.data(), hold=held)
    def rematch(self, data: st.DataObject, hold: bool) -> None:
        sequences = data.draw(st.lists(st.sampled_from(sorted(self.model.waiting)), max_size=3))
        always = data.draw(st.booleans())
        self.do(d.rematch_op(sequences, always), self.model.rematch, sequences, always, hold=hold)

    @precondition(lambda self: self.model.workers)
    @rule(
        tokens=tokens,
        new_tokens=st.integers(0, 8),
        planned=st.sampled_from([0, 0, 1, 3, 9]),
        metadata=metadata,
        data=st.data(),
        hold=held,
    )
    def start(
        self,
        tokens: list[int],
        new_tokens: int,
        planned: int,
        metadata: tuple[float, d.Retention, str],
        data: st.DataObject,
        hold: bool,
    ) -> None:
        sequence = next(s for s in range(1, 100) if s not in self.everything())
        worker = data.draw(st.sampled_from(sorted(self.model.workers)))
        self.do(d.match_op(sequence, tokens, *metadata), self.model.match, sequence, tokens, *metadata, hold=True)
        op = d.admit_op(sequence, worker, new_tokens, planned)
        self.do(op, self.model.admit, sequence, worker, new_tokens, planned, hold=hold)

    @precondition(lambda self: self.model.running)
    @rule(data=st.data(), hold=held)
    def plan(self, data: st.DataObject, hold: bool) -> None:
        entries: list[tuple[int, list[int], int]] = []
        for s in data.draw(st.lists(st.sampled_from(sorted(self.model.running)), max_size=3, unique=True)):
            sequence = self.model.running[s]
            most = min(len(sequence.tokens), len(sequence.table) * self.block_size)
            entries.append((s, [], data.draw(st.integers(sequence.computed, max(sequence.computed, most)))))
        self.do(d.commit_op(entries, planned=True), self.model.commit, entries, True, hold=hold)

    @precondition(lambda self: self.model.workers)
    @rule(tokens=tokens, made=tokens, metadata=metadata, data=st.data())
    def run(
        self, tokens: list[int], made: list[int], metadata: tuple[float, d.Retention, str], data: st.DataObject
    ) -> None:
        """Runs a sequence from beginning to end. Its generated tokens fit into its blocks."""
        sequence = next(s for s in range(1, 100) if s not in self.everything())
        worker = data.draw(st.sampled_from(sorted(self.model.workers)))
        self.do(d.match_op(sequence, tokens, *metadata), self.model.match, sequence, tokens, *metadata, hold=True)
        self.do(d.admit_op(sequence, worker), self.model.admit, sequence, worker)
        if sequence in self.model.running:
            room = len(self.model.running[sequence].table) * self.block_size - len(tokens)
            entries = [(sequence, made[:room], len(tokens) + len(made[:room]))]
            self.do(d.commit_op(entries), self.model.commit, entries, hold=True)
            self.do(d.free_op([sequence]), self.model.free, [sequence])

    @precondition(lambda self: self.model.running)
    @rule(hold=held)
    def compute_all(self, hold: bool) -> None:
        room = {s: len(sequence.table) * self.block_size for s, sequence in self.model.running.items()}
        entries: list[tuple[int, list[int], int]] = [
            (s, [], min(room[s], len(sequence.tokens))) for s, sequence in self.model.running.items()
        ]
        self.do(d.commit_op(entries), self.model.commit, entries, hold=hold)

    @precondition(lambda self: self.model.running)
    @rule(data=st.data(), hold=held)
    def commit_progress(self, data: st.DataObject, hold: bool) -> None:
        """Entries that are valid if they name different sequences, and often also if they name one twice."""
        entries = []
        for s in data.draw(st.lists(st.sampled_from(sorted(self.model.running)), max_size=4)):
            sequence = self.model.running[s]
            new = data.draw(tokens)
            most = min(len(sequence.tokens) + len(new), len(sequence.table) * self.block_size)
            entries.append((s, new, data.draw(st.integers(sequence.computed, max(sequence.computed, most)))))
        self.do(d.commit_op(entries), self.model.commit, entries, hold=hold)

    @precondition(lambda self: any(self.model.running))  # fork_of=0 means no fork
    @rule(data=st.data(), last=st.integers(1, 2), hold=held)
    def fork(self, data: st.DataObject, last: int, hold: bool) -> None:
        """Forks a sequence. In most cases it has computed the shared tokens."""
        sequence = next(s for s in range(1, 100) if s not in self.everything())
        parent = data.draw(st.sampled_from(sorted(filter(None, self.model.running))))
        known = self.model.running[parent]
        shared = data.draw(st.integers(0, known.computed + (data.draw(st.integers(0, 9)) == 9)))
        tokens, metadata = [*known.tokens[:shared], last], (0.0, (), known.metadata.salt)
        self.do(d.match_op(sequence, tokens, *metadata), self.model.match, sequence, tokens, *metadata, hold=True)
        op = d.fork_op(sequence, known.worker, parent)
        self.do(op, self.model.fork, sequence, known.worker, parent, hold=hold)

    @precondition(lambda self: self.model.running)
    @rule(data=st.data(), hold=held)
    def extend(self, data: st.DataObject, hold: bool) -> None:
        sequences = data.draw(st.lists(st.sampled_from(sorted(self.model.running)), max_size=3))
        self.do(d.extend_op(sequences), self.model.extend, sequences, hold=hold)

    @precondition(lambda self: self.model.running)
    @rule(data=st.data(), hold=held)
    def swap_out(self, data: st.DataObject, hold: bool) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.model.running)))
        self.do(d.swap_out_op(sequence), self.model.swap_out, sequence, hold=hold)

    @precondition(lambda self: self.model.swapped)
    @rule(data=st.data(), hold=held)
    def swap_in(self, data: st.DataObject, hold: bool) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.model.swapped)))
        self.do(d.swap_in_op(sequence), self.model.swap_in, sequence, hold=hold)

    @precondition(lambda self: self.everything())
    @rule(data=st.data(), hold=held)
    def free(self, data: st.DataObject, hold: bool) -> None:
        sequences = data.draw(st.lists(st.sampled_from(self.everything()), min_size=1, max_size=5, unique=True))
        discard = data.draw(st.sampled_from([False, False, False, True]))
        self.do(d.free_op(sequences, discard), self.model.free, sequences, discard, hold=hold)

    @rule(
        worker=workers,
        num_blocks=st.integers(0, 16),
        other_size=st.booleans(),
        caching=st.booleans(),
        num_host=st.integers(0, 9),
        partial=st.booleans(),
        tier=st.booleans(),
        hold=held,
    )
    def add_worker(
        self,
        worker: int,
        num_blocks: int,
        other_size: bool,
        caching: bool,
        num_host: int,
        partial: bool,
        tier: bool,
        hold: bool,
    ) -> None:
        size = self.block_size + other_size
        if not self.model.workers and num_blocks:
            self.block_size = size  # with no worker there, any size will do
        made = worker, num_blocks, size, caching, num_host, partial, tier
        self.do(d.add_worker_op(*made), self.model.add_worker, *made, hold=hold)

    @rule(worker=workers, chance=st.integers(0, 5), hold=held)
    def remove_worker(self, worker: int, chance: int, hold: bool) -> None:
        if chance == 5 or worker not in self.model.workers:
            self.do(d.remove_worker_op(worker), self.model.remove_worker, worker, hold=hold)

    @rule(data=st.data(), sequence=sequences, several=st.lists(sequences, max_size=4), hold=held)
    def anything(self, data: st.DataObject, sequence: int, several: list[int], hold: bool) -> None:
        """Any operation, valid or not."""
        ops = ["match", "admit", "fork", "extend", "commit", "free", "rematch", "swap_out", "swap_in"]
        match data.draw(st.sampled_from(ops)):
            case "swap_out":
                self.do(d.swap_out_op(sequence), self.model.swap_out, sequence, hold=hold)
            case "swap_in":
                self.do(d.swap_in_op(sequence), self.model.swap_in, sequence, hold=hold)
            case "match":
                prompt = data.draw(tokens)
                self.do(d.match_op(sequence, prompt), self.model.match, sequence, prompt, hold=hold)
            case "admit":
                worker = data.draw(workers)
                self.do(d.admit_op(sequence, worker), self.model.admit, sequence, worker, hold=hold)
            case "fork":
                worker, parent = data.draw(workers), data.draw(st.integers(1, 9))
                self.do(d.fork_op(sequence, worker, parent), self.model.fork, sequence, worker, parent, hold=hold)
            case "extend":
                self.do(d.extend_op(several), self.model.extend, several, hold=hold)
            case "commit":
                entries = [(s, data.draw(tokens), data.draw(st.integers(0, 20))) for s in several]
                self.do(d.commit_op(entries), self.model.commit, entries, hold=hold)
            case "rematch":
                self.do(d.rematch_op(several), self.model.rematch, several, False, hold=hold)
            case "free":
                self.do(d.free_op(several), self.model.free, several, hold=hold)

    def teardown(self) -> None:
        if not hasattr(self, "link"):
            return
        self.patch.undo()
        sequences = self.everything()
        self.do(d.free_op(sequences), self.model.free, sequences)
        for worker in self.link.core.workers.values():
            assert worker.device.used_blocks == 0
            assert worker.host.used_blocks == 0

    def everything(self) -> list[int]:
        return sorted([*self.model.waiting, *self.model.running, *self.model.swapped])


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
