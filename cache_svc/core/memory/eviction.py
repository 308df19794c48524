"""In which order a memory gives up what nobody uses.

Strategies (named as in SGLang; least recently used first within what they hold equal):

    lru        the least recently used                             (the default of vLLM, SGLang, TensorRT-LLM)
    lfu        the least often reused
    slru       what was never reused or once; then the rest        (segmented LRU, as in SGLang: protected from 2 on)
    fifo       what was stored first, however often it is used
    priority   the lowest priority of the requests that used it, the highest of these counting

Before the strategy comes what requests asked for (TensorRT-LLM's KvCacheRetentionConfig; see retention.py): blocks go
in order of their retention priority, and have DEFAULT_RETENTION if nobody asked, or once the time is over for which it
was asked, counted from when they fell out of use.

A parent never goes before its children. Least recently used first gives that by itself (why: memory.py), other orders
do not: what is met in its turn while children of it are held is set aside, and comes back, first of its equals, when
the last of them has gone. So whatever is set aside is set aside once for each time that it fell out of use, and finding
the next victim is O(1) amortised for lru, O(log ranks) for the others (fifo has as many ranks as nodes).
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
    """The unused holdings of one memory. Raises KeyError for a strategy that there is not.

    It is to be told the time (`expire`) before anything else.
    """

    __slots__ = ("_buckets", "_count", "_expiries", "_lowest", "_most_expiries", "_now_ms", "_rank_of")

    _now_ms: int

    def __init__(self, strategy: str) -> None:
        self._rank_of = STRATEGIES[strategy]
        self._count = itertools.count()
        self._expiries: list[
            tuple[int, int, int, BlockResidency]
        ] = []  # a heap, the first to expire first; of equals by turn
        self._most_expiries = FEW_EXPIRIES  # with so many, those are thrown out that concern nobody any more
        self._buckets: SortedDict[tuple[int, float], EvictionBucket] = SortedDict()
        self._lowest: EvictionBucket | None = None  # of these, as it is looked at most

    def add(self, residency: BlockResidency, first: bool = False, renew: bool = True) -> None:
        """Its last user has left; or (first) it was set aside, and its last child has gone. With `renew`, the time that
        it is retained for begins now."""
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
        """Whether it stands where the other one, to be added now, would come next."""
        bucket = residency.bucket
        return bucket is not None and bucket.key == self._key(of) and next(reversed(bucket)) is residency

    def use(self, residency: BlockResidency) -> None:
        """It has a user again."""
        self.remove(residency)
        if residency.duration_ms and residency.expires_ms <= self._now_ms:
            self._end_retention(residency)

    def forget(self, residency: BlockResidency) -> None:
        """It is gone."""
        if residency.bucket is not None:
            self.remove(residency)
        residency.users = GONE  # no expiry finds it unused

    def remove(self, residency: BlockResidency) -> None:
        """It stands here no more, if it did: it may have been set aside."""
        bucket = residency.bucket
        if bucket is None:
            return
        del bucket[residency]
        residency.bucket = None
        if not bucket:
            self._drop(bucket)

    def pop(self) -> BlockResidency | None:
        """The next one to be evicted, if there is one. It stands here no more."""
        while (bucket := self._lowest) is not None:
            residency, _ = bucket.popitem(last=False)
            residency.bucket = None
            if not bucket:
                self._drop(bucket)
            if not residency.num_children:
                return residency
        return None

    def _drop(self, bucket: EvictionBucket) -> None:
        """Nobody stands there."""
        del self._buckets[bucket.key]
        self._lowest = self._buckets.peekitem(0)[1] if self._buckets else None

    def expire(self, now_ms: int) -> None:
        """Time has passed: what was retained long enough stands with the others."""
        self._now_ms = now_ms
        while self._expiries and self._expiries[0][0] <= now_ms:
            expires_ms, _, _, residency = heapq.heappop(self._expiries)
            if _is_due(residency, expires_ms):
                self.remove(residency)
                self._end_retention(residency)
                self.add(residency)

    def fall_back(self, residency: BlockResidency) -> None:
        """Its tenant has too much retained: it stands with the others, as if just used."""
        stands = residency.bucket is not None
        self.remove(residency)
        self._end_retention(residency)
        if stands:
            self.add(residency)

    def _add_expiry(self, residency: BlockResidency, again: bool) -> None:
        if not again:
            residency.expires_ms = self._now_ms + residency.duration_ms
        if residency.expires_ms > self._now_ms:
            if len(self._expiries) >= self._most_expiries:
                self._forget_expiries()
            heapq.heappush(self._expiries, (residency.expires_ms, residency.turn, next(self._count), residency))
        else:  # while it stood nowhere
            self._end_retention(residency)

    def _forget_expiries(self) -> None:
        """Those of what was used since, or is gone: else each use would be remembered as long as it is retained for."""
        due = {one[3]: one for one in self._expiries if _is_due(one[3], one[0])}
        self._expiries = list(due.values())
        heapq.heapify(self._expiries)
        self._most_expiries = 2 * len(due) + FEW_EXPIRIES

    def _end_retention(self, residency: BlockResidency) -> None:
        residency.retention, residency.duration_ms = DEFAULT_RETENTION, 0
        if residency.owner is not None:
            residency.owner.release(residency)

    def upcoming(self, memory_index: int) -> list[BlockResidency]:
        """Everything that can be evicted, the next one first. For checks and tests: costs time for all there is."""
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
                    if above.duration_ms and above.expires_ms <= self._now_ms:  # while it stood nowhere
                        retention = DEFAULT_RETENTION
                    queues.setdefault((retention, bucket), deque()).appendleft(above)
                    standing.add(above)
        return order

    def _key(self, residency: BlockResidency) -> tuple[int, float]:
        return residency.retention, self._rank_of(residency)


def _is_due(residency: BlockResidency, expires_ms: int) -> bool:
    """Whether a retention is to end then: not if it was used since, nor twice."""
    return residency.duration_ms > 0 and residency.expires_ms == expires_ms and not residency.users
