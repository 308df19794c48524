"""Our prefix cache with the calls that bench/peers/cache_work.py measures, and whole exchanges of the cache core."""

from __future__ import annotations

from itertools import count

import numpy as np

from bench.peers.cache_work import BATCH, LENGTH, OWN, WORKERS, Samples, Tokens, Work, timed
from bench.peers.quiet import no_collections
from cache_svc.core.cache import CacheCore
from cache_svc.core.request_metadata import NO_METADATA
from cache_svc.core.sequences.sequence import Sequence
from cache_svc.core.sequences.worker_blocks import WorkerBlocks
from cache_svc.core.tree.nodes import Namespace, PrefixNode, PrefixSubscription
from cache_svc.core.tree.tree import PrefixTree
from paceline.v1 import cache_pb2 as pb

RUNNING, DECODED = 256, 16  # sequences of a step, and how many generated tokens a sequence commits when it ends


def packed(tokens: Tokens) -> bytes:
    return tokens.astype(np.int32).tobytes()


class OurCache:
    """One worker's prefix cache, with blocks for this many tokens."""

    def __init__(self, block_size: int, num_tokens: int) -> None:
        self.tree = PrefixTree(block_size)
        self.root = self.tree.acquire_root(Namespace())
        self.worker = WorkerBlocks(1, 0, self.tree, -(-num_tokens // block_size), True, False, 0, False, "lru")
        self.device = self.worker.device
        self.ids = count(1)

    def key(self, tokens: Tokens) -> bytes:
        return packed(tokens)

    def match(self, key: bytes) -> tuple[PrefixNode, int, int]:
        return self.device.held(*self.tree.walk(key, self.root, 0))

    def to_insert(self, tokens: Tokens) -> Sequence:
        """A sequence that has computed all its tokens: the insert walks from the root, as SGLang's insert does."""
        subscription, table = self.subscription(packed(tokens)), self.device.take(len(tokens) // self.tree.block_size)
        sequence = Sequence(subscription, self.worker.worker_id, table, self.root, len(tokens))
        self.worker.sequences[sequence.sequence_id] = sequence
        return sequence

    def subscription(self, key: bytes) -> PrefixSubscription:
        subscription = PrefixSubscription(next(self.ids), key, Namespace(), NO_METADATA)
        subscription.root = self.root
        return subscription

    def to_insert_rest(self, tokens: Tokens) -> Sequence:
        """An admitted sequence with its cached prefix."""
        key = packed(tokens)
        sequence = self.worker.admit(
            self.subscription(key), *self.tree.walk(key, self.root, 0), 0, copies=False
        ).sequence
        sequence.num_computed_tokens = len(tokens)
        return sequence

    def insert(self, made: Sequence) -> None:
        self.worker.store(made)

    def inserted(self, made: Sequence) -> None:
        self.worker.release(made)

    def to_lock(self, tokens: Tokens) -> PrefixNode:
        node, depth, _ = self.match(packed(tokens))
        return self.tree.cut(node, depth)

    def lock_unlock(self, node: PrefixNode) -> None:
        """`use_path` also returns the path's blocks, because every sequence that uses a path needs them."""
        self.device.use_path(node)
        self.device.leave_path(node)

    lock_table_unlock = lock_unlock

    def fill_up(self) -> None:
        self.device.take(self.device.free_blocks)

    def evict(self, num_tokens: int) -> None:
        self.device.take(num_tokens // self.tree.block_size)


def measure_insert_rest(cache: OurCache, work: Work) -> Samples:
    """Measures the store of an admitted sequence's commit. Call it after measure_calls."""
    made = [
        cache.to_insert_rest(np.concatenate((tokens[:-OWN], work.misses[i][:OWN])))
        for i, tokens in enumerate(work.inserts)
    ]
    with no_collections():
        return {"insert_256_after_match": timed(cache.insert, made)}


class Exchanges:
    """A cache core with this many workers. It gets the same messages as from the scheduler."""

    def __init__(self, block_size: int, num_workers: int, num_blocks: int) -> None:
        self.core = CacheCore()
        self.block_size = block_size
        self.numbers, self.ids = count(1), count(1)
        for worker in range(num_workers):
            added = pb.AddWorkerOp(worker=worker, num_blocks=num_blocks, block_size=block_size, prefix_caching=True)
            self.exchange([pb.CacheOp(add_worker=added)])

    def request(self, ops: list[pb.CacheOp]) -> pb.CacheServiceLinkRequest:
        return pb.CacheServiceLinkRequest(epoch=1, exchange=next(self.numbers), ops=ops)

    def exchange(self, ops: list[pb.CacheOp]) -> None:
        for result in self.core.exchange(self.request(ops)).results:
            assert not result.HasField("error"), result.error.message

    def matches(self, batch: list[Tokens]) -> tuple[list[pb.CacheOp], pb.CacheOp]:
        """The operations that match these prompts, and the operation that frees them."""
        ids = [next(self.ids) for _ in batch]
        ops = [
            pb.CacheOp(match=pb.MatchOp(sequence=i, token_ids=packed(tokens)))
            for i, tokens in zip(ids, batch, strict=True)
        ]
        return ops, pb.CacheOp(free=pb.FreeOp(sequences=ids))

    def arrival(self, tokens: Tokens, worker: int) -> tuple[int, list[pb.CacheOp]]:
        """Returns the id of a new sequence, and the operations that match and admit it."""
        (match,), _ = self.matches([tokens])
        sequence = match.match.sequence
        return sequence, [match, pb.CacheOp(admit=pb.AdmitOp(sequence=sequence, worker=worker, num_new_tokens=0))]

    def end(self, sequence: int, tokens: Tokens, num_computed: int) -> list[pb.CacheOp]:
        """Commits the sequence's generated tokens that are computed, and frees it."""
        commit = pb.CommitOp(
            sequences=[sequence],
            num_new_tokens=[len(tokens)],
            token_ids=packed(tokens),
            num_computed_tokens=[num_computed],
        )
        return [pb.CacheOp(commit=commit), pb.CacheOp(free=pb.FreeOp(sequences=[sequence]))]

    def store(self, tokens: Tokens, worker: int) -> None:
        sequence, ops = self.arrival(tokens, worker)
        self.exchange([*ops, *self.end(sequence, tokens[:0], len(tokens))])


def measure_workers(block_size: int, sequences: int, times: int, seed: int) -> Samples:
    """Measures a match for 8 workers, which is one walk: the time of an exchange with up to 16 MatchOps, divided by
    their number."""
    work = Work(sequences, times, seed)
    exchanges = Exchanges(block_size, WORKERS, -(-work.num_tokens // block_size))
    for tokens, holders in zip(work.sequences, work.holders(), strict=True):
        for worker in holders:
            exchanges.store(tokens, worker)
    samples = []
    with no_collections():
        for i in range(0, times, BATCH):
            batch = work.hits[i : i + BATCH]
            ops, forget = exchanges.matches(batch)
            request = exchanges.request(ops)
            samples += [us / len(batch) for us in timed(exchanges.core.exchange, [request])]
            exchanges.exchange([forget])
    return {"match_8_workers_1024": samples}


def measure_step(block_size: int, times: int, seed: int) -> Samples:
    """Measures the exchange of a step of 256 running sequences. 1 / block_size of them need a block. One sequence ends,
    and a new one of 1,024 tokens (768 of them stored) takes its place."""
    work = Work(RUNNING, times, seed)
    num_blocks = (2 * RUNNING + 2 * times) * (LENGTH + times + DECODED) // block_size
    exchanges = Exchanges(block_size, 1, num_blocks)
    running = []
    for tokens in work.sequences:
        sequence, ops = exchanges.arrival(tokens, 0)
        exchanges.exchange(ops)
        running.append(sequence)
    made = work.misses[0][:DECODED]
    requests = []
    per_step = max(1, RUNNING // block_size)
    for step in range(times):
        ended, *stay = running
        arrived, ops = exchanges.arrival(work.inserts[step], 0)
        extend = pb.CacheOp(
            extend=pb.ExtendOp(sequences=[stay[(step * per_step + i) % len(stay)] for i in range(per_step)])
        )
        # Only the prompt counts as computed: each table has blocks for it, but perhaps none for the generated tokens.
        end = exchanges.end(ended, made, LENGTH)
        requests.append(exchanges.request([*end, *ops, extend]))
        running = [*stay, arrived]
    with no_collections():
        return {"step_256": timed(exchanges.core.exchange, requests)}
