"""For any state of a core: the scheduler's records are enough to continue with an empty core."""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from cache_svc.core.sequences.worker_blocks import WorkerBlocks
from paceline.v1 import cache_pb2 as pb
from paceline.v1.common_pb2 import RetentionRange
from tests.unit.cache import driver as d
from tests.unit.cache.test_against_model import CacheMachine

Tables = dict[int, tuple[bytes, int, list[int]]]  # by sequence: tokens, how many are computed, blocks


def entries_of(worker: WorkerBlocks) -> list[pb.RestoredSequence]:
    entries = []
    held: list[Any] = [*worker.sequences.values(), *worker.swapped.values()]
    for sequence in held:
        namespace = sequence.root.namespace
        assert namespace is not None
        entry = pb.RestoredSequence(
            sequence=sequence.sequence_id,
            num_computed_tokens=sequence.num_computed_tokens,
            namespace=pb.CacheNamespace(**namespace._asdict()),
            priority=sequence.metadata.priority,
        )
        for one in sequence.metadata.retention:
            fields = {"start": one.start, "end": one.end, "priority": one.priority, "duration_ms": one.duration_ms}
            entry.retention.append(RetentionRange(**fields))
        entries.append(entry)
    for entry, sequence in zip(entries, worker.sequences.values(), strict=False):
        entry.token_ids, entry.block_table = bytes(sequence.tokens), d.pack(sequence.table)
    for entry, swapped in zip(entries[len(worker.sequences) :], worker.swapped.values(), strict=True):
        entry.token_ids, entry.host_blocks = swapped.token_ids, d.pack(swapped.host_blocks)
    return entries


def tables(worker: WorkerBlocks) -> tuple[Tables, Tables]:
    """The tables of running and of swapped-out sequences."""
    return (
        {i: (bytes(s.tokens), s.num_computed_tokens, list(s.table)) for i, s in worker.sequences.items()},
        {i: (s.token_ids, s.num_computed_tokens, list(s.host_blocks)) for i, s in worker.swapped.items()},
    )


class RestoreMachine(CacheMachine):
    """Runs any operations of CacheMachine. Sometimes restores all running and swapped-out sequences in a fresh core, in
    any order. The core checks all its invariants after each exchange."""

    @precondition(lambda self: self.model.running or self.model.swapped)
    @rule(rng=st.randoms(use_true_random=False), in_parts=st.booleans())
    def restore(self, rng: Random, in_parts: bool) -> None:
        if self.ops:
            self.send()
        fresh = d.Driver(eviction=self.link.core.eviction)
        for worker_id, worker in self.link.core.workers.items():
            size = worker.device.num_blocks, self.block_size, worker.prefix_caching, worker.host.num_blocks
            entries = entries_of(worker)
            rng.shuffle(entries)
            half = len(entries) // 2 if in_parts else 0
            first = [d.restore_op(worker_id, entries[:half], incomplete=True)] if in_parts else []
            answer = fresh.exchange(d.add_worker_op(worker_id, *size), *first, d.restore_op(worker_id, entries[half:]))
            assert not [result.error for result in answer.results if result.HasField("error")]
            assert not [result.restore.refused for result in answer.results if result.restore.refused]
        for worker_id, worker in self.link.core.workers.items():
            restored = fresh.core.workers[worker_id]
            assert tables(restored) == tables(worker)
            in_tables = {block for sequence in worker.sequences.values() for block in sequence.table}
            # A running sequence may have duplicates of blocks of ended sequences. These blocks have no user now.
            assert restored.device.used_blocks == len(in_tables) <= worker.device.used_blocks
            assert restored.host.used_blocks == worker.host.used_blocks
        self.go_on(fresh, rng)

    def go_on(self, link: d.Driver, rng: Random) -> None:
        """Runs until no sequence is left. The remaining blocks are handed out on the way."""
        core = link.core
        for sequence_id in rng.sample(sorted(core.admitted), len(core.admitted)):
            sequence = core.admitted[sequence_id]
            if core.workers[sequence.worker_id].device.available_blocks:
                link.extend(sequence_id)
            computed = min(len(sequence.table) * self.block_size, sequence.num_tokens + 2)
            link.commit(sequence_id, [0, 1], computed)
            if rng.random() < 0.5:
                forked = [*d.unpack(bytes(sequence.tokens))[: rng.randrange(computed + 1)], 9]
                assert sequence.root.namespace is not None
                salt = sequence.root.namespace.cache_salt
                op = d.fork_op(1000 + sequence_id, sequence.worker_id, sequence_id)
                link.exchange(d.match_op(1000 + sequence_id, forked, salt=salt), op)
        for sequence_id in sorted(core.swapped):
            link.exchange(d.swap_in_op(sequence_id))
        for worker_id, worker in core.workers.items():
            if num_free := worker.device.available_blocks:
                link.start(2000 + worker_id, [5] * num_free * self.block_size, worker_id)
        rest = [*core.admitted, *core.swapped, *core.waiting]
        link.free(*rng.sample(rest, len(rest)))
        for worker in core.workers.values():
            assert worker.device.used_blocks == worker.host.used_blocks == 0
            assert worker.device.available_blocks == worker.device.num_blocks


TestRestoreMachine = RestoreMachine.TestCase
TestRestoreMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
