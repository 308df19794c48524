"""The order in which a memory evicts unused nodes.

The strategies have SGLang's names. The table says which node goes first. Of nodes that a strategy ranks equal, the
least recently used goes first.

    lru        the least recently used                             (the default of vLLM, SGLang, TensorRT-LLM)
    lfu        the least often reused
    slru       a node that was reused at most once                 (segmented LRU, as in SGLang: protected from 2 on)
    fifo       the first stored, however often it is used
    priority   the lowest priority; a node has the highest priority of the requests that used it

The retention priority comes before the strategy (TensorRT-LLM's KvCacheRetentionConfig, see retention.py). It is
DEFAULT_RETENTION if no request has set it, and again when its duration is over. The duration counts from the last use.

A parent never goes before its children. For lru without retentions this holds by itself (memory.py shows why). In all
other cases the queue sets a node aside if its turn comes while children of it are held. The node returns, first among
its equals, when its last child has gone. So a node is set aside at most once per use. The next victim costs O(1)
amortised for lru, and O(log buckets) for the others (fifo has one bucket per node).
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable

from sortedcontainers import SortedDict

from cache_svc.core.retention import DEFAULT_RETENTION
from cache_svc.core.tree.nodes import BlockResidency, EvictionBucket

PROTECTED_REUSES = 2
FEW_EXPIRIES = 64
GONE = -1

STRATEGIES: dict[str, Callable[[BlockResidency], float]] = {
    "lru": lambda residency: 0,
    "lfu": lambda residency: residency.num_reuses,
    "slru": lambda residency: residency.num_reuses >= PROTECTED_REUSES,
    "fifo": lambda residency: residency.serial,
    "priority": lambda residency: residency.priority,
}


class EvictionQueue:
    """The unused residencies of one memory. Raises KeyError for an unknown strategy.

    Call `expire` first, since the queue has no clock.
    """

    __slots__ = ("_buckets", "_count", "_expiries", "_lowest", "_most_expiries", "_rank_of", "now_ms")

    def __init__(self, strategy: str) -> None:
        self._rank_of = STRATEGIES[strategy]
        self.now_ms = 0  # of the last call of `expire`
        self._count = itertools.count()
        self._expiries: list[tuple[int, int, int, BlockResidency]] = []  # a heap by expiry time, then by turn
        self._most_expiries = FEW_EXPIRIES  # at this length, entries without effect are removed
        self._buckets: SortedDict[tuple[int, float], EvictionBucket] = SortedDict()
        self._lowest: EvictionBucket | None = None  # the first of the buckets, because it is needed most often

    def add(self, residency: BlockResidency, first: bool = False, renew: bool = True) -> None:
        """Adds a residency: its last user has left, or (`first`) its last child has gone while it was not in the queue.

        With `renew`, but not with `first`, the duration of its retention begins now.
        """
        if not first:
            residency.turn = next(self._count)
        if residency.duration_ms:
            self._add_expiry(residency, again=first or not renew)
        key = self._key(residency)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = EvictionBucket(key)
            self._lowest = self._buckets.peekitem(0)[1]
        residency.bucket = bucket
        bucket[residency] = None
        if first:
            bucket.move_to_end(residency, last=False)

    def is_last(self, residency: BlockResidency, of: BlockResidency) -> bool:
        """Whether it stands directly before the place where `of` would be added now."""
        bucket = residency.bucket
        return bucket is not None and bucket.key == self._key(of) and next(reversed(bucket)) is residency

    def use(self, residency: BlockResidency) -> None:
        """The residency has a user again."""
        self.remove(residency)
        if residency.duration_ms and residency.expires_ms <= self.now_ms:
            self._end_retention(residency)

    def forget(self, residency: BlockResidency) -> None:
        """The memory holds it no more."""
        if residency.bucket is not None:
            self.remove(residency)
        residency.users = GONE  # not 0, so that its entry in _expiries is not due

    def remove(self, residency: BlockResidency) -> None:
        """Removes a residency, if the queue contains it. It may have been set aside."""
        bucket = residency.bucket
        if bucket is None:
            return
        del bucket[residency]
        residency.bucket = None
        if not bucket:
            self._drop(bucket)

    def pop(self) -> BlockResidency | None:
        """Removes and returns the next residency to evict. None if there is none."""
        while (bucket := self._lowest) is not None:
            residency, _ = bucket.popitem(last=False)
            residency.bucket = None
            if not bucket:
                self._drop(bucket)
            if not residency.num_children:
                return residency
        return None

    def _drop(self, bucket: EvictionBucket) -> None:
        """Removes an empty bucket."""
        del self._buckets[bucket.key]
        self._lowest = self._buckets.peekitem(0)[1] if self._buckets else None

    def expire(self, now_ms: int) -> None:
        """Sets the time, and ends the retentions that are due."""
        self.now_ms = now_ms
        while self._expiries and self._expiries[0][0] <= now_ms:
            expires_ms, _, _, residency = heapq.heappop(self._expiries)
            if _is_due(residency, expires_ms):
                self.remove(residency)
                self._end_retention(residency)
                self.add(residency)

    def fall_back(self, residency: BlockResidency) -> None:
        """Ends a retention early: its tenant has too many retained blocks, or has ended the retention. The residency
        counts as just used."""
        stands = residency.bucket is not None
        self.remove(residency)
        self._end_retention(residency)
        if stands:
            self.add(residency)

    def _add_expiry(self, residency: BlockResidency, again: bool) -> None:
        if not again:
            residency.expires_ms = self.now_ms + residency.duration_ms
        if residency.expires_ms > self.now_ms:
            if len(self._expiries) >= self._most_expiries:
                self._forget_expiries()
            heapq.heappush(self._expiries, (residency.expires_ms, residency.turn, next(self._count), residency))
        else:  # the duration ended while it was set aside
            self._end_retention(residency)

    def _forget_expiries(self) -> None:
        """Removes the entries of residencies that were used since, or are gone. Otherwise each use would leave an entry
        for the whole duration."""
        due = {one[3]: one for one in self._expiries if _is_due(one[3], one[0])}
        self._expiries = list(due.values())
        heapq.heapify(self._expiries)
        self._most_expiries = 2 * len(due) + FEW_EXPIRIES

    def _end_retention(self, residency: BlockResidency) -> None:
        residency.retention, residency.duration_ms = DEFAULT_RETENTION, 0
        if residency.owner is not None:
            residency.owner.release(residency)

    def upcoming(self, memory_index: int) -> list[BlockResidency]:
        """All residencies that can be evicted, in order. For checks and tests: the cost grows with the whole queue."""
        queues = {key: deque(bucket) for key, bucket in self._buckets.items()}
        standing = {residency for queue in queues.values() for residency in queue}
        children: dict[BlockResidency, int] = {}
        order = []
        while queues:
            key = min(queues)
            residency = queues[key].popleft()
            standing.remove(residency)
            if not queues[key]:
                del queues[key]
            if children.get(residency, residency.num_children):
                continue
            order.append(residency)
            parent = residency.node.parent
            if parent is not None and (above := parent.residencies.get(memory_index)) is not None:
                children[above] = children.get(above, above.num_children) - 1
                if not (children[above] or above.users or above in standing):
                    retention, bucket = self._key(above)
                    # the duration ended while it was set aside
                    if above.duration_ms and above.expires_ms <= self.now_ms:
                        retention = DEFAULT_RETENTION
                    queues.setdefault((retention, bucket), deque()).appendleft(above)
                    standing.add(above)
        return order

    def _key(self, residency: BlockResidency) -> tuple[int, float]:
        return residency.retention, self._rank_of(residency)


def _is_due(residency: BlockResidency, expires_ms: int) -> bool:
    """Whether the retention ends at this time. False if the residency was used since, or if the retention has ended
    already."""
    return residency.duration_ms > 0 and residency.expires_ms == expires_ms and not residency.users
