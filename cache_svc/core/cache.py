"""The cache's state machine: operations in; results, pool counters, demotions and match updates out. No clock, no
socket, no randomness."""

from __future__ import annotations

from array import array

from cache_svc.core.errors import Code, LinkError, OpError
from cache_svc.core.invariants import check_no_copies_due, check_state
from cache_svc.core.memory.shares import TENANT_SHARE, TOTAL_SHARE
from cache_svc.core.messages import add_matches, pool_counters
from cache_svc.core.operations import Operations
from cache_svc.core.packing import pack_int32
from cache_svc.core.sequences.pins import DEFAULT_SHARE
from cache_svc.core.sequences.worker_blocks import WorkerBlocks
from cache_svc.core.tree.events import EventLog
from paceline.v1 import cache_pb2 as pb

# The largest number of stale subscriptions that one exchange refreshes without a RematchOp. Thousands of waiting
# sequences may share a prefix, and refreshing all of them would delay a step. The others follow in the next exchanges.
MAX_REFRESHED = 256


class CacheCore(Operations):
    """Executes the exchanges of one link. `debug` checks every invariant after every operation, which is slow.
    `eviction` is one of eviction.STRATEGIES."""

    def __init__(
        self,
        debug: bool = False,
        eviction: str = "lru",
        events: EventLog | None = None,
        max_pinned_share: float = DEFAULT_SHARE,
        max_tenant_retained_share: float = TENANT_SHARE,
        max_retained_share: float = TOTAL_SHARE,
    ) -> None:
        """`max_pinned_share` is of each worker's device blocks. `max_tenant_retained_share` and
        `max_retained_share` are of the blocks of each memory (a worker's device, or its host): see memory/shares.py."""
        super().__init__(eviction, events, max_pinned_share, (max_tenant_retained_share, max_retained_share))
        self.debug = debug

    def reset(self) -> None:
        """A new link begins: no workers, no sequences, and the next exchange is number 1."""
        super().reset()
        self.last_exchange = 0
        self.epoch = 0  # of the first exchange

    def exchange(self, request: pb.CacheServiceLinkRequest) -> pb.CacheServiceLinkResponse:
        """Executes the operations in order. A failed operation has an error as its result and has
        changed no sequence, block or pin. After a failed ExtendOp, later operations for its workers may fail, too.

        Raises LinkError, having changed nothing, if the exchange is not the one after the last, or if its epoch differs
        from that of the first one. Raises InvariantError in debug mode.
        """
        if request.exchange != self.last_exchange + 1:
            raise LinkError(f"exchange {request.exchange} came where {self.last_exchange + 1} was expected")
        if not self.last_exchange:
            self.epoch = request.epoch
        elif request.epoch != self.epoch:
            raise LinkError(f"exchange {request.exchange} is of epoch {request.epoch}, the link is of {self.epoch}")
        self.last_exchange = request.exchange
        self.counters.exchanges += 1
        self.now_ms = request.now_ms
        for worker in self.workers.values():
            worker.expire(self.now_ms)
        response = pb.CacheServiceLinkResponse(epoch=request.epoch, exchange=request.exchange)
        results = response.results
        for op in request.ops:
            result = results.add()
            kind = op.WhichOneof("op")
            try:
                if kind is None:
                    raise OpError(Code.INVALID_ARGUMENT, "op: empty, or unknown to this version")
                self._handlers[kind](getattr(op, kind), result)
            except OpError as refused:
                self.counters.refused_ops += 1
                result.error.code = refused.code
                result.error.message = refused.message
            if self.debug:
                self.check_invariants(amid_exchange=True)
        self._stepless.clear()
        for worker in self._touched.values():
            worker.end_exchange()
            if worker.host.moves:
                self._report_demotions(worker, response)
        self._report_pools(response)
        self._report_matches(response)
        if self.debug:
            self.check_invariants()
        return response

    def check_invariants(self, amid_exchange: bool = False) -> None:
        """Raises InvariantError if the state contradicts itself. The cost grows with the whole state."""
        check_state(self.tree, self.workers, self.waiting, self.admitted, self.swapped, self.pins)
        if not amid_exchange:
            check_no_copies_due(self.workers)

    def pool_counters(self) -> list[pb.PoolCounters]:
        """The counters of every worker after the last exchange or admin call. Any thread may call this at any time."""
        return [
            pool_counters(worker.worker_id, worker.shown)
            for worker in list(self.workers.values())
            if worker.shown is not None
        ]

    def present_counters(self) -> list[pb.PoolCounters]:
        """The present counters of every worker. Call it between exchanges."""
        return [pool_counters(worker.worker_id, worker.counters()) for worker in self.workers.values()]

    def _report_pools(self, response: pb.CacheServiceLinkResponse) -> None:
        for worker in self._touched.values():
            worker.shown = counters = worker.counters()
            if counters != worker.reported:
                self._count_evictions(worker)
                worker.reported = counters
                response.pools.append(pool_counters(worker.worker_id, counters))
        self._touched.clear()

    def _report_demotions(self, worker: WorkerBlocks, response: pb.CacheServiceLinkResponse) -> None:
        moves = worker.host.moves
        self.counters.demoted_blocks += len(moves)
        self.counters.demoted_tails += len(worker.host.moved_partial_blocks)
        response.demotions.add(
            worker=worker.worker_id,
            device_blocks=pack_int32(array("i", moves.values())),
            host_blocks=pack_int32(array("i", moves)),
        )
        moves.clear()
        worker.host.moved_partial_blocks.clear()

    def _report_matches(self, response: pb.CacheServiceLinkResponse) -> None:
        """Reports matches that were asked for, and matches of stale subscriptions, if they differ from the last report.
        For a RematchOp with `always`, also reports matches that do not differ."""
        tree, asked = self.tree, self._asked
        if tree is not None and tree.stale:
            for subscription in list(tree.stale.values())[:MAX_REFRESHED]:
                tree.refresh(subscription)
                asked.setdefault(subscription.sequence_id, False)
        for sequence_id, always in asked.items():
            if sequence_id not in self.waiting:  # admitted or freed since
                continue
            subscription = self.waiting[sequence_id]
            if tree is not None and subscription.point is None:
                tree.refresh(subscription)
            before = subscription.reported
            if self._matches(subscription) != before or always:
                add_matches(response.match_updates.add(sequence=sequence_id).matches, subscription.reported)
        asked.clear()
