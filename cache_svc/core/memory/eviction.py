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
from cache_svc.core.tree.nodes import Holding, Rank

PROTECTED_REUSES = 2
FEW_EXPIRIES = 64
GONE = -1

STRATEGIES: dict[str, Callable[[Holding], float]] = {
    "lru": lambda holding: 0,
    "lfu": lambda holding: holding.num_reuses,
    "slru": lambda holding: holding.num_reuses >= PROTECTED_REUSES,
    "fifo": lambda holding: holding.serial,
    "priority": lambda holding: holding.priority,
}


class EvictionQueue:
    """The unused holdings of one memory. Raises KeyError for a strategy that there is not.

    It is to be told the time (`expire`) before anything else.
    """

    __slots__ = ("_count", "_expiries", "_lowest", "_most_expiries", "_now_ms", "_rank_of", "_ranks")

    _now_ms: int

    def __init__(self, strategy: str) -> None:
        self._rank_of = STRATEGIES[strategy]
        self._count = itertools.count()
        self._expiries: list[tuple[int, int, int, Holding]] = []  # a heap, the first to expire first; of equals by turn
        self._most_expiries = FEW_EXPIRIES  # with so many, those are thrown out that concern nobody any more
        self._ranks: SortedDict[tuple[int, float], Rank] = SortedDict()
        self._lowest: Rank | None = None  # of these, as it is looked at most

    def add(self, holding: Holding, first: bool = False, renew: bool = True) -> None:
        """Its last user has left; or (first) it was set aside, and its last child has gone. With `renew`, the time that
        it is retained for begins now."""
        if not first:
            holding.turn = next(self._count)
        if holding.duration_ms:
            self._add_expiry(holding, again=first or not renew)
        key = self._key(holding)
        rank = self._ranks.get(key)
        if rank is None:
            rank = self._ranks[key] = Rank(key)
            self._lowest = self._ranks.peekitem(0)[1]
        holding.queue = rank
        rank[holding] = None
        if first:
            rank.move_to_end(holding, last=False)

    def is_last(self, holding: Holding, of: Holding) -> bool:
        """Whether it stands where the other one, to be added now, would come next."""
        rank = holding.queue
        return rank is not None and rank.key == self._key(of) and next(reversed(rank)) is holding

    def use(self, holding: Holding) -> None:
        """It has a user again."""
        self.remove(holding)
        if holding.duration_ms and holding.expires_ms <= self._now_ms:
            self._end_retention(holding)

    def forget(self, holding: Holding) -> None:
        """It is gone."""
        if holding.queue is not None:
            self.remove(holding)
        holding.users = GONE  # no expiry finds it unused

    def remove(self, holding: Holding) -> None:
        """It stands here no more, if it did: it may have been set aside."""
        rank = holding.queue
        if rank is None:
            return
        del rank[holding]
        holding.queue = None
        if not rank:
            self._drop(rank)

    def pop(self) -> Holding | None:
        """The next one to be evicted, if there is one. It stands here no more."""
        while (rank := self._lowest) is not None:
            holding, _ = rank.popitem(last=False)
            holding.queue = None
            if not rank:
                self._drop(rank)
            if not holding.num_children:
                return holding
        return None

    def _drop(self, rank: Rank) -> None:
        """Nobody stands there."""
        del self._ranks[rank.key]
        self._lowest = self._ranks.peekitem(0)[1] if self._ranks else None

    def expire(self, now_ms: int) -> None:
        """Time has passed: what was retained long enough stands with the others."""
        self._now_ms = now_ms
        while self._expiries and self._expiries[0][0] <= now_ms:
            expires_ms, _, _, holding = heapq.heappop(self._expiries)
            if _is_due(holding, expires_ms):
                self.remove(holding)
                self._end_retention(holding)
                self.add(holding)

    def fall_back(self, holding: Holding) -> None:
        """Its tenant has too much retained: it stands with the others, as if just used."""
        stands = holding.queue is not None
        self.remove(holding)
        self._end_retention(holding)
        if stands:
            self.add(holding)

    def _add_expiry(self, holding: Holding, again: bool) -> None:
        if not again:
            holding.expires_ms = self._now_ms + holding.duration_ms
        if holding.expires_ms > self._now_ms:
            if len(self._expiries) >= self._most_expiries:
                self._forget_expiries()
            heapq.heappush(self._expiries, (holding.expires_ms, holding.turn, next(self._count), holding))
        else:  # while it stood nowhere
            self._end_retention(holding)

    def _forget_expiries(self) -> None:
        """Those of what was used since, or is gone: else each use would be remembered as long as it is retained for."""
        due = {one[3]: one for one in self._expiries if _is_due(one[3], one[0])}
        self._expiries = list(due.values())
        heapq.heapify(self._expiries)
        self._most_expiries = 2 * len(due) + FEW_EXPIRIES

    def _end_retention(self, holding: Holding) -> None:
        holding.retention, holding.duration_ms = DEFAULT_RETENTION, 0
        if holding.owner is not None:
            holding.owner.release(holding)

    def upcoming(self, memory_index: int) -> list[Holding]:
        """Everything that can be evicted, the next one first. For checks and tests: costs time for all there is."""
        queues = {key: deque(rank) for key, rank in self._ranks.items()}
        standing = {holding for queue in queues.values() for holding in queue}
        children: dict[Holding, int] = {}
        order = []
        while queues:
            key = min(queues)
            holding = queues[key].popleft()
            standing.remove(holding)
            if not queues[key]:
                del queues[key]
            if children.get(holding, holding.num_children):
                continue
            order.append(holding)
            parent = holding.node.parent
            if parent is not None and (above := parent.holdings.get(memory_index)) is not None:
                children[above] = children.get(above, above.num_children) - 1
                if not (children[above] or above.users or above in standing):
                    retention, rank = self._key(above)
                    if above.duration_ms and above.expires_ms <= self._now_ms:  # while it stood nowhere
                        retention = DEFAULT_RETENTION
                    queues.setdefault((retention, rank), deque()).appendleft(above)
                    standing.add(above)
        return order

    def _key(self, holding: Holding) -> tuple[int, float]:
        return holding.retention, self._rank_of(holding)


def _is_due(holding: Holding, expires_ms: int) -> bool:
    """Whether a retention is to end then: not if it was used since, nor twice."""
    return holding.duration_ms > 0 and holding.expires_ms == expires_ms and not holding.users
