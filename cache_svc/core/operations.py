"""The handlers of the operations: they change workers, and sequences that wait, run or are swapped out.

A handler does its whole operation, or it raises OpError and has changed no sequence, block or pin.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from cache_svc.core.counters import CacheCounters
from cache_svc.core.errors import Code, OpError, named_sequences
from cache_svc.core.messages import add_matches, add_misses
from cache_svc.core.packing import TOKEN_BYTES, check_token_bytes, pack_int32
from cache_svc.core.request_metadata import NO_METADATA, read_metadata
from cache_svc.core.sequences.commits import checked_commits
from cache_svc.core.sequences.matching import MatchedTokens, matches_of
from cache_svc.core.sequences.misses import MissFinder
from cache_svc.core.sequences.pins import Pins
from cache_svc.core.sequences.restore import restore
from cache_svc.core.sequences.retained import end_retention
from cache_svc.core.sequences.sequence import Sequence, SwappedSequence
from cache_svc.core.sequences.worker_blocks import WorkerBlocks
from cache_svc.core.tree.events import EventLog
from cache_svc.core.tree.nodes import Namespace, PrefixSubscription
from cache_svc.core.tree.tree import PrefixTree
from paceline.v1 import cache_pb2 as pb

MAX_NUM_BLOCKS = 2**31 - 1  # block ids are int32 in messages


class Operations:
    """The blocks of all workers, and a handler for each operation in CacheOp."""

    now_ms: int  # of the exchange

    def __init__(
        self, eviction: str, events: EventLog | None, max_pinned_share: float, retained: tuple[float, float]
    ) -> None:
        self.events = events or EventLog()
        self.max_pinned_share = max_pinned_share
        self.retained = retained
        self.eviction = eviction
        self.counters = CacheCounters()
        self._handlers: dict[str | None, Callable[[Any, pb.CacheOpResult], None]] = {
            "add_worker": self._add_worker,
            "remove_worker": self._remove_worker,
            "match": self._match,
            "admit": self._admit,
            "extend": self._extend,
            "commit": self._commit,
            "free": self._free,
            "rematch": self._rematch,
            "swap_out": self._swap_out,
            "swap_in": self._swap_in,
            "restore": self._restore,
            "give_up_pins": self._give_up_pins,
            "end_retention": self._end_retention,
        }
        self.reset()

    def reset(self) -> None:
        """Removes all workers and sequences."""
        self.events.clear()
        self.tree: PrefixTree | None = None  # None without a worker; the first worker sets the block size
        self.workers: dict[int, WorkerBlocks] = {}
        self.waiting: dict[int, PrefixSubscription] = {}  # matched, not admitted
        self.admitted: dict[int, Sequence] = {}
        self.pins = Pins(self.max_pinned_share)
        self.swapped: dict[int, SwappedSequence] = {}
        self._misses = MissFinder()
        self._touched: dict[int, WorkerBlocks] = {}  # by worker id; their counters may have changed in this exchange
        self._stepless: set[int] = set()  # workers with a refused ExtendOp in this exchange
        self._incomplete_restores: dict[int, list[pb.RestoredSequence]] = {}  # from incomplete RestoreOps, by worker id
        self._asked: dict[int, bool] = {}  # sequence -> whether to report it even if nothing has changed

    def touch(self, workers: Iterable[WorkerBlocks]) -> None:
        """The counters of these workers may have changed between exchanges. The next exchange reports them."""
        for worker in workers:
            self._touched[worker.worker_id] = worker
            worker.shown = worker.counters()

    def _count_evictions(self, worker: WorkerBlocks) -> None:
        evicted = worker.device.evicted_blocks_total, worker.host.evicted_blocks_total
        self.counters.evicted_blocks += evicted[0] - worker.counted_evictions[0]
        self.counters.evicted_host_blocks += evicted[1] - worker.counted_evictions[1]
        worker.counted_evictions = evicted

    # ------------------------------------------------------------------------------------------------- workers

    def _add_worker(self, op: pb.AddWorkerOp, _: pb.CacheOpResult) -> None:
        if op.worker in self.workers:
            raise OpError(Code.ALREADY_EXISTS, f"worker {op.worker} was added before")
        if not 1 <= op.num_blocks <= MAX_NUM_BLOCKS:
            raise OpError(Code.INVALID_ARGUMENT, f"num_blocks: {op.num_blocks} is not within 1..{MAX_NUM_BLOCKS}")
        if op.num_host_blocks > MAX_NUM_BLOCKS:
            raise OpError(Code.INVALID_ARGUMENT, f"num_host_blocks: {op.num_host_blocks} is over {MAX_NUM_BLOCKS}")
        if op.block_size < 1:
            raise OpError(Code.INVALID_ARGUMENT, "block_size: must be at least 1 token")
        if self.tree is None:
            self.tree = PrefixTree(op.block_size)
            for subscription in self.waiting.values():
                self.tree.subscribe(subscription)
        elif self.tree.block_size != op.block_size:
            raise OpError(
                Code.FAILED_PRECONDITION,
                f"block_size: {op.block_size} differs from {self.tree.block_size}, which the other workers have",
            )
        numbers = {worker.number for worker in self.workers.values()}
        number = next(number for number in itertools.count() if number not in numbers)
        worker = self.workers[op.worker] = WorkerBlocks(
            op.worker,
            number,
            self.tree,
            op.num_blocks,
            op.prefix_caching,
            op.partial_reuse,
            op.num_host_blocks,
            op.host_tier,
            self.eviction,
            self.retained,
        )
        worker.expire(self.now_ms)
        if worker.prefix_caching:
            worker.device.events = self.events.recorder(worker.device.index, op.worker)
        if worker.host_tier:
            worker.host.events = self.events.recorder(worker.host.index, op.worker, pb.CACHE_TIER_HOST)
        self._touched[op.worker] = worker

    def _remove_worker(self, op: pb.RemoveWorkerOp, _: pb.CacheOpResult) -> None:
        worker = self._worker(op.worker)
        self._count_evictions(worker)
        worker.leave_tree()
        self.events.clear_worker(op.worker)
        self.pins.forget_worker(worker)
        for sequence_id, sequence in worker.sequences.items():
            del self.admitted[sequence_id]
            worker.tree.release_root(sequence.root)
        for sequence_id, swapped in worker.swapped.items():
            del self.swapped[sequence_id]
            worker.tree.release_root(swapped.root)
        del self.workers[op.worker]
        self._incomplete_restores.pop(op.worker, None)
        self._touched.pop(op.worker, None)
        if not self.workers:
            self.tree = None
            for subscription in self.waiting.values():
                self._asked.setdefault(subscription.sequence_id, False)
                subscription.depth, subscription.point = 0, None

    def _restore(self, op: pb.RestoreOp, result: pb.CacheOpResult) -> None:
        worker = self._worker(op.worker)
        if not worker.is_untouched:
            self._incomplete_restores.pop(op.worker, None)
            raise OpError(Code.FAILED_PRECONDITION, f"worker {op.worker} has handed out blocks already")
        result.restore.SetInParent()
        restored = [*self._incomplete_restores.pop(op.worker, ()), *op.sequences]
        if op.incomplete:
            self._incomplete_restores[op.worker] = restored
            return
        sequences, swapped, refused = restore(worker, restored, self._is_known)
        self.admitted.update((sequence.sequence_id, sequence) for sequence in sequences)
        self.swapped.update((sequence.sequence_id, sequence) for sequence in swapped)
        if op.cached:
            known: list[Sequence | SwappedSequence] = [*sequences, *swapped]
            for sequence in sequences:
                sequence.num_begun_tokens = 0  # no copy is pending: all computed tokens are in its blocks
            self._let_go([one.sequence_id for one in known])
        self._touched[op.worker] = worker
        self.counters.restored_sequences += len(sequences) + len(swapped)
        self.counters.refused_claims += len(refused)
        for position, error in sorted(refused.items()):
            sequence_id = restored[position].sequence
            result.restore.refused.add(sequence=sequence_id, code=error.code, message=error.message)

    def _give_up_pins(self, op: pb.GiveUpPinsOp, _: pb.CacheOpResult) -> None:
        worker = self._worker(op.worker)
        self.counters.pins_given_up += self.pins.give_up(worker)
        self._touched[op.worker] = worker

    def _end_retention(self, op: pb.EndRetentionOp, _: pb.CacheOpResult) -> None:
        check_token_bytes(op.token_ids)
        names = op.namespace
        if (
            self.tree is None
            or (root := self.tree.roots.get(Namespace(names.model, names.lora, names.cache_salt))) is None
        ):
            return
        end_retention(self.tree, self.workers.values(), root, op.token_ids, op.tenant)

    def _is_not(self, sequence_id: int, state: str) -> OpError:
        if self._is_known(sequence_id):
            return OpError(Code.FAILED_PRECONDITION, f"sequence {sequence_id} is not {state}")
        return OpError(Code.NOT_FOUND, f"sequence {sequence_id} is not known")

    def _is_known(self, sequence_id: int) -> bool:
        return sequence_id in self.waiting or sequence_id in self.admitted or sequence_id in self.swapped

    def _worker(self, worker_id: int) -> WorkerBlocks:
        worker = self.workers.get(worker_id)
        if worker is None:
            raise OpError(Code.NOT_FOUND, f"worker {worker_id} is not known")
        return worker

    # ----------------------------------------------------------------------------------------------- sequences

    def _match(self, op: pb.MatchOp, result: pb.CacheOpResult) -> None:
        token_ids = op.token_ids
        if self._is_known(op.sequence):
            raise OpError(Code.ALREADY_EXISTS, f"sequence {op.sequence} is known already")
        check_token_bytes(token_ids)
        if not token_ids:
            raise OpError(Code.INVALID_ARGUMENT, "token_ids: a sequence has at least one token")
        metadata, names = NO_METADATA, op.namespace
        if op.priority or op.retention:
            metadata = read_metadata(op.priority, op.retention, op.tenant)
        namespace = Namespace(names.model, names.lora, names.cache_salt)
        subscription = self.waiting[op.sequence] = PrefixSubscription(op.sequence, token_ids, namespace, metadata)
        result.match.SetInParent()
        if self.tree is not None:
            self.tree.subscribe(subscription)
            self.tree.refresh(subscription)
            add_matches(result.match.matches, self._matches(subscription))

    def _rematch(self, op: pb.RematchOp, _: pb.CacheOpResult) -> None:
        sequence_ids = op.sequences[:]
        unknown = [sequence_id for sequence_id in sequence_ids if sequence_id not in self.waiting]
        if unknown:
            raise OpError(Code.NOT_FOUND, f"not waiting: {named_sequences(unknown)}; nothing is reported")
        for sequence_id in sequence_ids:
            self._asked[sequence_id] = op.always or self._asked.get(sequence_id, False)

    def _matches(self, subscription: PrefixSubscription) -> list[MatchedTokens]:
        """Computes the matches for a report, and stores them as `reported`."""
        subscription.reported = (
            matches_of(subscription, self.tree, self.workers.values()) if self.tree is not None else []
        )
        return subscription.reported

    def _admit(self, op: pb.AdmitOp, result: pb.CacheOpResult) -> None:
        subscription = self.waiting.get(op.sequence)
        if subscription is None:
            raise self._is_not(op.sequence, "waiting: it is admitted or swapped out")
        worker, num_planned = self._worker(op.worker), op.num_planned_tokens
        self._expect_step(worker.worker_id)
        if num_planned > op.num_new_tokens > 0:
            raise OpError(
                Code.INVALID_ARGUMENT,
                f"num_planned_tokens: {num_planned} is more than num_new_tokens, {op.num_new_tokens}",
            )
        host_blocks = array("i")
        if op.fork_of:
            (parent,) = self._all_admitted([op.fork_of])
            sequence, copy_from = worker.fork(subscription, parent)
            num_cached_tokens = sequence.num_computed_tokens
            self.counters.forked_sequences += 1
        else:
            if subscription.point is None:
                worker.tree.refresh(subscription)
            node, depth = (subscription.root, 0) if op.no_reuse else subscription.place()
            new_tokens, copies = op.num_new_tokens, not op.no_reuse
            sequence, copy_from, host_blocks, num_cached_tokens = worker.admit(
                subscription, node, depth, new_tokens, copies
            )
            sequence.alone = op.no_reuse
            if num_cached_tokens % worker.tree.block_size:
                self.counters.copied_blocks += 1
                self.counters.copied_host_blocks += not copy_from
            if worker.prefix_caching and not (op.no_reuse or op.again):
                place = node, depth
                misses = self._misses.find(sequence, place, num_cached_tokens, self.workers, self.admitted)
                add_misses(result.admit, misses)
        worker.tree.unsubscribe(subscription)
        del self.waiting[op.sequence]
        self.admitted[op.sequence] = sequence
        self._touched[op.worker] = worker
        granted = result.admit
        granted.copy_from = copy_from
        if host_blocks:
            first, end = sequence.node.end, sequence.node.end + len(host_blocks)
            self.counters.promoted_blocks += len(host_blocks)
            granted.device_blocks = pack_int32(sequence.table[first:end])
            granted.host_blocks = pack_int32(host_blocks)
        if sequence.unwritten:
            granted.shares_planned = True
            self.counters.sharing_sequences += 1
        if num_planned:
            worker.plan(sequence, min(num_cached_tokens + num_planned, sequence.num_tokens))
        if worker.prefix_caching and not (op.no_reuse or op.again or op.fork_of):
            self.counters.prefix_query_tokens += sequence.num_tokens
            self.counters.prefix_hit_tokens += num_cached_tokens
        granted.num_cached_tokens, granted.block_table = num_cached_tokens, pack_int32(sequence.table)

    def _swap_out(self, op: pb.SwapOutOp, result: pb.CacheOpResult) -> None:
        (sequence,) = self._all_admitted([op.sequence])
        worker = self.workers[sequence.worker_id]
        swapped = self.swapped[op.sequence] = worker.swap_out(sequence)
        del self.admitted[op.sequence]
        self._touched[worker.worker_id] = worker
        self.counters.swapped_out_blocks += len(swapped.host_blocks)
        result.swap_out.device_blocks = pack_int32(sequence.table[: len(swapped.host_blocks)])
        result.swap_out.host_blocks = pack_int32(swapped.host_blocks)

    def _swap_in(self, op: pb.SwapInOp, result: pb.CacheOpResult) -> None:
        swapped = self.swapped.get(op.sequence)
        if swapped is None:
            raise self._is_not(op.sequence, "swapped out")
        worker = self.workers[swapped.worker_id]
        self._expect_step(worker.worker_id)
        sequence, num_cached = worker.swap_in(swapped)
        self.admitted[op.sequence] = sequence
        del self.swapped[op.sequence]
        self._touched[worker.worker_id] = worker
        end = len(swapped.host_blocks)
        self.counters.swapped_in_blocks += end - num_cached
        admit = result.swap_in.admit
        admit.num_cached_tokens = min(swapped.num_computed_tokens, swapped.num_tokens - 1)
        admit.block_table = pack_int32(sequence.table)
        result.swap_in.device_blocks = pack_int32(sequence.table[num_cached:end])
        result.swap_in.host_blocks = pack_int32(swapped.host_blocks[num_cached:])

    def _extend(self, op: pb.ExtendOp, result: pb.CacheOpResult) -> None:
        sequences = self._all_admitted(op.sequences[:])
        worker_ids = [sequence.worker_id for sequence in sequences]
        alike = worker_ids.count(worker_ids[0]) if worker_ids else 0
        needed = Counter(worker_ids) if alike < len(worker_ids) else dict.fromkeys(worker_ids[:1], alike)
        for worker_id, num_blocks in needed.items():
            try:
                self.workers[worker_id].check_room(num_blocks)
            except OpError:
                self._stepless.update(needed)
                raise
        taken = {}
        for worker_id, num_blocks in needed.items():
            worker = self._touched[worker_id] = self.workers[worker_id]
            taken[worker_id] = worker.device.take(num_blocks)
        if len(taken) == 1:
            (block_ids,) = taken.values()
        else:
            grants = {worker_id: iter(blocks) for worker_id, blocks in taken.items()}
            block_ids = array("i", (next(grants[worker_id]) for worker_id in worker_ids))
        for sequence, block in zip(sequences, block_ids, strict=True):
            sequence.table.append(block)
        result.extend.block_ids = pack_int32(block_ids)

    def _commit(self, op: pb.CommitOp, _: pb.CacheOpResult) -> None:
        token_ids = op.token_ids
        block_size = self.tree.block_size if self.tree is not None else 0  # without a worker there is no sequence
        entries = checked_commits(op, len(token_ids), block_size, self._all_admitted)
        workers, touched = self.workers, self._touched
        if op.planned:
            for entry in entries:
                self._expect_step(entry[0].worker_id)
            for sequence, _none, computed in entries:
                worker = touched[sequence.worker_id] = workers[sequence.worker_id]
                worker.plan(sequence, computed)
            return
        start = 0
        for sequence, num_new, computed in entries:
            end = start + num_new * TOKEN_BYTES
            if num_new:
                sequence.tokens += token_ids[start:end]
                sequence.num_tokens += num_new
                start = end
            sequence.num_computed_tokens = computed
            worker = touched[sequence.worker_id] = workers[sequence.worker_id]
            if sequence.unwritten:
                worker.written(sequence)
            if worker.prefix_caching and computed // block_size > sequence.node.end:
                worker.store(sequence)

    def _free(self, op: pb.FreeOp, _: pb.CacheOpResult) -> None:
        sequence_ids = op.sequences[:]
        admitted, waiting, swapped = self.admitted, self.waiting, self.swapped
        unknown = [s for s in sequence_ids if s not in admitted and s not in waiting and s not in swapped]
        if unknown:
            raise OpError(Code.NOT_FOUND, f"not known: {named_sequences(unknown)}; nothing was freed")
        if len(set(sequence_ids)) != len(sequence_ids):
            twice = [s for s, count in Counter(sequence_ids).items() if count > 1]
            raise OpError(Code.INVALID_ARGUMENT, f"named more than once: {named_sequences(twice)}; nothing was freed")
        self._let_go(sequence_ids, op.discard)

    def _let_go(self, sequence_ids: list[int], discard: bool = False) -> None:
        for sequence_id in sequence_ids:
            subscription = self.waiting.pop(sequence_id, None)
            if subscription is not None:
                if self.tree is not None:
                    self.tree.unsubscribe(subscription)
                    self.tree.release_root(subscription.root)
            elif (swapped := self.swapped.pop(sequence_id, None)) is not None:
                worker = self._touched[swapped.worker_id] = self.workers[swapped.worker_id]
                worker.forget_swapped(swapped)
                worker.tree.release_root(swapped.root)
            else:
                sequence = self.admitted.pop(sequence_id)
                worker = self._touched[sequence.worker_id] = self.workers[sequence.worker_id]
                worker.release(sequence, discard)
                worker.tree.release_root(sequence.root)

    def _expect_step(self, worker_id: int) -> None:
        """Raises OpError(ABORTED) if the worker gets no step from this exchange."""
        if worker_id in self._stepless:
            raise OpError(Code.ABORTED, f"worker {worker_id}: an ExtendOp of this exchange was refused")

    def _all_admitted(self, sequence_ids: list[int]) -> list[Sequence]:
        try:
            return [self.admitted[sequence_id] for sequence_id in sequence_ids]
        except KeyError as missing:
            raise self._is_not(missing.args[0], "admitted: it is waiting or swapped out") from None
