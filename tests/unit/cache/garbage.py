"""Operations that a broken or hostile scheduler might send, and how to see whether a refused one changed anything."""

from __future__ import annotations

import math
from random import Random
from typing import Any

from cache_svc.core.cache import CacheCore
from cache_svc.core.errors import OpError
from cache_svc.core.memory.memory import Memory
from cache_svc.core.tree.nodes import subtree
from paceline.v1 import cache_pb2 as pb
from tests.unit.cache import driver as d

UINT32, UINT64 = 2**32 - 1, 2**64 - 1
LARGE = [2**31 - 1, 2**31, UINT32]
BLOCK_SIZES = [1, 2, 3, 3, 4]
PRIORITIES = [0.0, 1.0, -3.4e38, 1e-45, math.inf, -math.inf, math.nan]


class Garbage:
    """Draws operations. About half of them are valid now, which leads to deep states; the others have anything in any
    field."""

    def __init__(self, rng: Random, core: CacheCore) -> None:
        self.rng = rng
        self.core = core

    def ops(self) -> list[pb.CacheOp]:
        ops = [op for _ in range(self.rng.choice([0, 1, 1, 2, 3, 5])) for op in self._some()]
        if ops and not self.rng.randrange(6):
            ops.append(self.rng.choice(ops))  # one operation twice
        return ops

    def _some(self) -> list[pb.CacheOp]:
        rare = self.rng.choice(
            ["add_worker", "rematch", "empty", "remove_worker", "restore", "give_up_pins", "end_retention"]
        )
        usual = ["start", "start", "branch", *["commit"] * 3, "match", "admit", "fork", "extend", "free"]
        name = self.rng.choice([*usual, "swap_out", "swap_in", rare])
        if name == "start":
            match = self._match(self._new())
            return [match, self._admit(match.match.sequence)]
        if name == "branch":
            return self._branch()
        if name == "restore" and self.rng.randrange(4):
            joins = self._add_worker()
            return [joins, self._restore(joins.add_worker.worker)]
        return [getattr(self, "_" + name)()]

    def _new(self) -> int:
        known = self.core.waiting.keys() | self.core.admitted.keys() | self.core.swapped.keys()
        return next((s for s in self.rng.sample(range(1, 16), 15) if s not in known), 1)

    def sequence(self, *likely: dict[int, Any]) -> int:
        """An id that is likely to be one of these."""
        known = [sequence for those in likely for sequence in those]
        if known and self.rng.randrange(6):
            return self.rng.choice(known)
        return self.rng.choice([0, *range(1, 9), UINT64])

    def worker(self) -> int:
        known = list(self.core.workers)
        return self.rng.choice(known) if known and self.rng.randrange(8) else self.rng.choice([0, 1, 2, UINT32])

    def tokens(self) -> bytes:
        rng = self.rng
        tokens = [0] * rng.randrange(9) + [rng.choice([0, 0, 1, -1, -(2**31)]) for _ in range(rng.randrange(6))]
        ragged = b"\0" * rng.choice([0] * 12 + [1, 2, 3])
        return d.pack(tokens) + ragged

    def _empty(self) -> pb.CacheOp:
        return pb.CacheOp()

    def _add_worker(self) -> pb.CacheOp:
        rng, tree = self.rng, self.core.tree
        usual = tree.block_size if tree is not None else rng.choice(BLOCK_SIZES)
        return d.add_worker_op(
            rng.choice([0, 1, 2, UINT32]),
            rng.choice([4, 7, 12, 12, 20] * 2 + [0, *LARGE]),
            rng.choice([usual] * 9 + [0, UINT32]),
            prefix_caching=bool(rng.randrange(5)),
            num_host_blocks=rng.choice([0, 2, 6, 12, *LARGE]),
            partial_reuse=bool(rng.randrange(2)),
            host_tier=bool(rng.randrange(3)),
        )

    def _remove_worker(self) -> pb.CacheOp:
        return d.remove_worker_op(self.worker())

    def _give_up_pins(self) -> pb.CacheOp:
        return pb.CacheOp(give_up_pins=pb.GiveUpPinsOp(worker=self.worker()))

    def _end_retention(self) -> pb.CacheOp:
        op = pb.EndRetentionOp(token_ids=self.tokens(), tenant=self.rng.choice(["", "a", "b"]))
        if not self.rng.randrange(4):
            op.namespace.cache_salt = "pepper"
        return pb.CacheOp(end_retention=op)

    def _match(self, sequence: int | None = None) -> pb.CacheOp:
        rng = self.rng
        match = pb.MatchOp(sequence=self.sequence() if sequence is None else sequence, token_ids=self.tokens())
        if not rng.randrange(3):
            match.priority = rng.choice(PRIORITIES)
        if not rng.randrange(4):
            match.namespace.cache_salt = rng.choice(["pepper", "\0", "a" * 1000])
        for _ in range(rng.choice([0, 0, 0, 0, 0, 1, 2, 3])):
            match.retention.add(
                start=rng.choice([0, 0, 2, 5, UINT32]),
                end=rng.choice([0, 2, 5, 9, UINT32]),
                priority=rng.choice([0, 0, 35, 80, 100, 101, UINT32]),
                duration_ms=rng.choice([0, 1, 20, UINT32]),
            )
            match.tenant = rng.choice(["", "a", "b"])
        return pb.CacheOp(match=match)

    def _admit(self, sequence: int | None = None) -> pb.CacheOp:
        new_tokens, planned = self.rng.choice([0, 0, 1, 3, 100, UINT32]), self.rng.choice([0, 0, 1, 3, 100, UINT32])
        sequence = self.sequence(self.core.waiting) if sequence is None else sequence
        op = d.admit_op(sequence, self.worker(), new_tokens, planned)
        op.admit.no_reuse = not self.rng.randrange(8)
        return op

    def _restore(self, worker: int | None = None) -> pb.CacheOp:
        """Entries that often agree, because there are few tokens and few blocks."""
        rng, tree = self.rng, self.core.tree
        restore = pb.RestoreOp(worker=self.worker() if worker is None else worker, incomplete=not rng.randrange(6))
        restore.cached = not rng.randrange(3)
        size = min(tree.block_size, 4) if tree is not None else 2
        for _ in range(rng.choice([0, 1, 2, 4])):
            tokens = self.tokens()
            num_blocks = max(0, -(-len(tokens) // 4 // size) + rng.choice([0, 0, 0, 1, -1]))
            first = rng.choice([1, 1, 5, 0])
            table = [first + i for i in range(num_blocks)] + [rng.randrange(12)] * rng.choice([0, 0, 0, 1])
            entry = restore.sequences.add(sequence=self._new() if rng.randrange(4) else self.sequence())
            entry.token_ids, entry.block_table = tokens, d.pack(table)
            entry.num_computed_tokens = rng.choice([len(tokens) // 4] * 4 + [0, 1, UINT32])
            entry.priority = rng.choice(PRIORITIES) if not rng.randrange(6) else 0.0
            if not rng.randrange(5):
                entry.host_blocks = d.pack(table)
        return pb.CacheOp(restore=restore)

    def _fork(self) -> pb.CacheOp:
        return d.fork_op(self.sequence(self.core.waiting), self.worker(), self.sequence(self.core.admitted))

    def _branch(self) -> list[pb.CacheOp]:
        """A fork of a sequence that may have computed enough tokens."""
        if not self.core.admitted:
            return [self._fork()]
        rng, sequence = self.rng, self._new()
        parent = self.core.admitted[rng.choice(list(self.core.admitted))]
        shared = max(0, rng.randrange(parent.num_computed_tokens + 1) - rng.choice([0, 0, 0, -1]))
        tokens = bytes(parent.tokens[: shared * 4]) + d.pack([rng.randrange(2)])
        worker = rng.choice([parent.worker_id] * 5 + [self.worker()])
        match = pb.MatchOp(sequence=sequence, token_ids=tokens)
        assert parent.root.namespace is not None
        match.namespace.cache_salt = parent.root.namespace.cache_salt
        return [pb.CacheOp(match=match), d.fork_op(sequence, worker, parent.sequence_id)]

    def _several(self, *likely: dict[int, Any]) -> list[int]:
        return [self.sequence(*likely) for _ in range(self.rng.choice([0, 1, 1, 1, 2, 3, 40]))]

    def _extend(self) -> pb.CacheOp:
        return d.extend_op(self._several(self.core.admitted))

    def _commit(self) -> pb.CacheOp:
        rng, admitted = self.rng, self.core.admitted
        commit = pb.CommitOp(sequences=self._several(admitted), planned=not rng.randrange(4))
        for sequence_id in commit.sequences:
            new = [rng.randrange(2)] * (0 if commit.planned else rng.randrange(4))
            commit.num_new_tokens.append(rng.choice([len(new)] * 12 + [UINT32, len(new) + 1]))
            commit.token_ids += d.pack(new)
            computed = rng.choice([0, 1, 8, UINT32])
            if (known := admitted.get(sequence_id)) is not None and rng.randrange(5):
                room = len(known.table) * self.core.workers[known.worker_id].tree.block_size
                most = min(known.num_tokens + len(new), room)
                computed = max(known.num_computed_tokens + rng.choice([0, 0, 0, -1]), most + rng.choice([0, 0, -1, 1]))
            commit.num_computed_tokens.append(min(max(computed, 0), UINT32))
        if not rng.randrange(12):
            del commit.num_new_tokens[:1]
        if not rng.randrange(12):
            commit.token_ids += b"\1"
        return pb.CacheOp(commit=commit)

    def _free(self) -> pb.CacheOp:
        known = self._several(self.core.waiting, self.core.admitted, self.core.swapped)
        return d.free_op(known, discard=not self.rng.randrange(4))

    def _rematch(self) -> pb.CacheOp:
        return d.rematch_op(self._several(self.core.waiting), always=bool(self.rng.randrange(2)))

    def _swap_out(self) -> pb.CacheOp:
        return d.swap_out_op(self.sequence(self.core.admitted))

    def _swap_in(self) -> pb.CacheOp:
        return d.swap_in_op(self.sequence(self.core.swapped))


def watch_refusals(core: CacheCore) -> None:
    """From now on a refused operation that has changed the state fails with AssertionError."""

    def watched(handler: Any) -> Any:
        def handle(op: Any, result: pb.CacheOpResult) -> None:
            before = digest(core)
            try:
                handler(op, result)
            except OpError:
                assert digest(core) == before
                raise

        return handle

    for kind, handler in core._handlers.items():
        core._handlers[kind] = watched(handler)


def digest(core: CacheCore) -> object:
    """The whole state without the node boundaries and the nodes of the subscriptions: no result depends on these."""
    stored = {}
    for root in core.tree.roots.values() if core.tree is not None else ():
        for node in subtree(root):
            for index, residency in node.residencies.items():
                kept = (
                    residency.users,
                    residency.retention,
                    residency.duration_ms,
                    residency.num_reuses,
                    residency.priority,
                )
                for at, block in enumerate(residency.blocks):
                    stored[index, block] = root.namespace, node.start + at, kept
    return (
        {
            s: (subscription.token_ids, subscription.namespace, subscription.metadata)
            for s, subscription in core.waiting.items()
        },
        {
            s: (bytes(one.tokens), list(one.table), one.num_computed_tokens, list(one.duplicates), one.node.end)
            for s, one in core.admitted.items()
        },
        {s: (one.token_ids, one.num_computed_tokens, list(one.host_blocks)) for s, one in core.swapped.items()},
        {w: (one.counters(), _of_memory(one.device), _of_memory(one.host)) for w, one in core.workers.items()},
        stored,
        {root.namespace: root.users for root in (core.tree.roots.values() if core.tree is not None else ())},
    )


def _of_memory(memory: Memory) -> object:
    order = [block for residency in memory.queue.upcoming(memory.index) for block in reversed(residency.blocks)]
    return memory.pool.given_back(), memory.pool.first_untouched, order, set(memory.sources), list(memory.withheld)
