"""When the cache is lost, running requests go on, and a new cache learns which blocks belong to which request.

The KV on the workers is still valid; only the ownership of blocks is lost. The scheduler keeps the block table of every
running request (Held.block_table) and the host blocks of every swapped-out request (Held.host_blocks). By phase:

    RUNNING, PARKED     The request stays, and gets the results of steps in flight. No step is planned without a cache.
    ALLOCATING          The request waits again. No step has written to the blocks that it may have been granted.
    swapped out         The request stays. Copies that no plan has carried yet go with the next plan, before anything
                        else, so the cache may grant the device blocks again.
    swap not answered   The request computes its tokens again: the cache has not said where its copies go.
    demotions           They are dropped: the new cache starts with nothing in host memory.

In a restore entry, as in a commit, the tokens of the steps already sent count as computed. A refused entry costs its
request a recomputation, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from paceline.v1.cache_pb2 import (
    AddWorkerOp,
    CacheOp,
    CacheServiceLinkRequest,
    CacheServiceLinkResponse,
    RestoredSequence,
    RestoreOp,
)
from paceline.v1.worker_pb2 import KeptSequence
from scheduler_svc.core.cache.link import MAX_EXCHANGE_BYTES, CacheLink, Sent
from scheduler_svc.core.lifecycle.lifecycle import Lifecycle
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.workers.state import WorkerState


def _kept_op(worker: int, kept: Iterable[KeptSequence], model: str, sequences: Iterator[int]) -> RestoreOp:
    """The operation that makes a worker's kept sequences cached prefixes. The worker kept them from an earlier link,
    for example to a scheduler that is gone. A request that ran on this worker and is submitted again then finds all its
    tokens in the cache. Sequences beyond MAX_EXCHANGE_BYTES are left out."""
    op = RestoreOp(worker=worker, cached=True)
    num_bytes = 0
    for one in kept:
        num_bytes += one.ByteSize()
        if num_bytes > MAX_EXCHANGE_BYTES:
            break
        entry = op.sequences.add(
            sequence=next(sequences),
            token_ids=one.token_ids,
            num_computed_tokens=one.num_computed_tokens,
            block_table=one.block_table,
        )
        entry.namespace.model, entry.namespace.cache_salt = model, one.cache_salt
    return op


@dataclass(frozen=True, slots=True)
class Recovery:
    """Restores running and swapped requests in a new cache."""

    cache: CacheLink
    workers: dict[int, WorkerState]
    life: Lifecycle

    def cache_lost(self) -> None:
        self.cache.forget()
        for worker in self.workers.values():
            for request in worker.drop_pending_step():
                self.life.unanswered(request)
            worker.forget_cache()
            self.life.recompute(request for request in worker.host.swapped.values() if not request.held.host_blocks)
        self.life.holdings.forget_matches()

    def added(self, worker: WorkerState) -> list[CacheOp]:
        """The operations that add this worker, and the prefixes that it kept, to a cache."""
        kept, worker.kept = worker.kept, []
        config = self.life.config
        op = AddWorkerOp(
            worker=worker.id,
            num_blocks=worker.num_blocks,
            block_size=worker.block_size,
            prefix_caching=config.prefix_caching,
            partial_reuse=config.partial_reuse,
            num_host_blocks=worker.registration.num_host_blocks,
            host_tier=config.host_cache,
        )
        ops = [CacheOp(add_worker=op)]
        if kept:
            ops.append(CacheOp(restore=_kept_op(worker.id, kept, self.cache.model, self.life.holdings.sequences)))
        return ops

    def begin(self) -> None:
        """Begin a link to an empty cache: first the workers, then their running, parked and swapped-out sequences."""
        added = {worker.id: self.added(worker) for worker in self.workers.values()}
        for worker in self.workers.values():
            if holders := {request.held.sequence: request for request in self._holders(worker)}:
                self.cache.restoring[worker.id] = holders
        if not self.cache.restoring:
            self.cache.added.update(added)
            return
        message = self._next_message()
        for add_worker, *_ in added.values():  # kept prefixes of a new worker are not worth another message
            message.ops.add().MergeFrom(add_worker)
        num_bytes = 0
        for worker_id, holders in self.cache.restoring.items():
            op = message.ops.add().restore
            op.worker = worker_id
            for request in holders.values():
                entry = op.sequences.add()
                self._fill(entry, request)
                num_bytes += len(entry.token_ids) + len(entry.block_table) + len(entry.host_blocks)
                if num_bytes > MAX_EXCHANGE_BYTES:
                    op.incomplete = True
                    num_bytes, message = 0, self._next_message()
                    op = message.ops.add().restore
                    op.worker = worker_id

    def answered(self, sent: Sent, response: CacheServiceLinkResponse) -> None:
        """The cache has answered an exchange of `begin`. Steps are planned again after the last one."""
        for index, worker_id in sent.restores:
            result, holders = response.results[index], self.cache.restoring[worker_id]
            if result.HasField("error"):
                refused = [(sequence, result.error.message) for sequence in holders]
            else:
                refused = [(one.sequence, one.message) for one in result.restore.refused]
            for sequence, why in refused:
                if (request := holders.pop(sequence, None)) is None:
                    continue
                self.life.counters.refused_restores += 1
                if request.held.sequence == sequence:  # the request has neither ended since, nor lost its worker
                    self.life.restore_refused(request, why)
                self.cache.never_knew(sequence)
        if not self.cache.opening:
            self.life.counters.restored += sum(map(len, self.cache.restoring.values()))
            self.cache.restoring.clear()

    def _holders(self, worker: WorkerState) -> Iterator[Request]:
        """All requests with blocks on the worker, with complete records. Notes what the cache will know of each."""
        worker.batch.slots.complete_tables()
        for slot, request in worker.batch.running.items():
            self.life.holdings.flush_output(worker, slot)
            request.held.num_committed = worker.batch.num_computed_tokens(slot)
            request.held.num_registered = request.num_tokens
            yield request
        yield from worker.parked.values()  # the cache knows all their tokens
        for request in worker.host.swapped.values():
            # as the swap told the cache
            request.held.num_committed = max(request.held.num_committed, request.num_tokens - 1)
            yield request

    def _next_message(self) -> CacheServiceLinkRequest:
        self.cache.opening.append(CacheServiceLinkRequest())
        return self.cache.opening[-1]

    def _fill(self, entry: RestoredSequence, request: Request) -> None:
        self.cache.fill(entry, request.held.sequence, request)
        entry.num_computed_tokens = request.held.num_committed
        if request.held.swapped_on:
            entry.host_blocks = request.held.host_blocks
        else:
            entry.block_table = request.held.block_table.tobytes()
