"""The blocks of one memory, and what of the prefix tree it holds.

Each block is in exactly one of three states:

    free    no user, content worthless             in the pool
    cached  no user, content in the tree           in a holding without users
    used    content in the tree, with users        in a holding with users
            or not, with one user                  in the table of one sequence

Which of the unused ones goes first is the business of eviction.py. With the default, least recently used first, a
parent never stands before its children there. Say node P is the parent of node C, and the memory holds both.

  1. Whoever uses C uses P: a sequence takes a path from the root, extends it one node at a time, and lets it go whole.
  2. So the last user of C that left did use P, and left C before it left P (`leave_path` goes from the tail to the
     head), and nobody has used C since. P's last user left no earlier than that one did.
  3. Hence if neither is in use, C came to stand among the unused before P, and eviction takes the oldest first.

The front part of an unused node that is split does not stand there at all until the rest is evicted; then it stands
first, where it would stand if it had been a node of its own from the beginning. What is held, and what is live, stays
connected to the root. check_invariants asserts it.
"""

from __future__ import annotations

import math
from array import array
from typing import Protocol

from cache_svc.core.memory.eviction import EvictionQueue
from cache_svc.core.memory.pool import BlockPool
from cache_svc.core.memory.shares import TENANT_SHARE, TOTAL_SHARE, RetentionShares
from cache_svc.core.packing import TOKEN_BYTES
from cache_svc.core.retention import DEFAULT_RETENTION, Range
from cache_svc.core.tree.events import Recorder
from cache_svc.core.tree.nodes import Holding, PrefixNode, Tail, subtree
from cache_svc.core.tree.tree import PrefixTree

# The priority of a use that is nobody's request's: it changes that of no block.
NO_REQUEST = -math.inf


class LowerTier(Protocol):
    """A memory that takes in what another one evicts."""

    def take_in(self, evicted: list[Holding]) -> None: ...


class Memory:
    """`index` names it in the nodes' holdings. `keeps`: whether what has no user is kept for reuse."""

    __slots__ = (
        "_num_stored",
        "cached_blocks",
        "events",
        "evicted_blocks_total",
        "index",
        "keeps",
        "lower",
        "num_blocks",
        "pool",
        "queue",
        "shares",
        "sources",
        "tree",
        "withheld",
    )

    def __init__(
        self,
        index: int,
        tree: PrefixTree,
        num_blocks: int,
        keeps: bool,
        eviction: str = "lru",
        retained: tuple[float, float] = (TENANT_SHARE, TOTAL_SHARE),
    ) -> None:
        """`retained`: shares of the blocks that may be retained for one tenant, and for all."""
        self.index = index
        self.tree = tree
        self.num_blocks = num_blocks
        self.keeps = keeps
        self.pool = BlockPool(num_blocks)
        self.cached_blocks = 0
        self.evicted_blocks_total = 0
        self.queue = EvictionQueue(eviction)
        self.shares = RetentionShares(index, num_blocks, *retained)
        self.events: Recorder | None = None  # who is told what is held here; None if it is kept for nobody
        self.lower: LowerTier | None = None  # takes in what is evicted here
        self._num_stored = 0
        # Blocks that are to be copied before anything else is written: nobody gets them in this exchange.
        self.sources: set[int] = set()
        self.withheld = array("i")  # what was evicted of them

    @property
    def free_blocks(self) -> int:
        return self.pool.num_free

    @property
    def available_blocks(self) -> int:
        """How many blocks `take` can hand out: free ones and cached ones (sources may be among the latter)."""
        return self.pool.num_free + self.cached_blocks - len(self.sources)

    @property
    def used_blocks(self) -> int:
        return self.num_blocks - self.pool.num_free - self.cached_blocks

    def take(self, count: int) -> array[int]:
        """Blocks with no content: free ones, then cached ones, which are evicted.

        The caller has made sure that there are as many (`available_blocks`); else it gets fewer.
        """
        blocks = self.pool.take(count)
        if len(blocks) == count:
            return blocks
        evicted = []
        while (missing := count - len(blocks)) > 0 and (holding := self.queue.pop()) is not None:
            if len(holding.blocks) > missing:
                self.tree.split(holding.node, holding.node.end - missing)  # it goes from its end
            gone = holding.blocks[::-1]
            self.evicted_blocks_total += len(gone)
            self.cached_blocks -= len(gone)
            self._let_go(holding)  # the node stays in the tree for the moment
            if self.sources:
                self._withhold(gone)
            blocks += gone
            evicted.append(holding)
        if self.lower is not None:
            self.lower.take_in(evicted)
        for holding in evicted:
            if not holding.node.holdings:
                self.tree.remove(holding.node)
        return blocks

    def _withhold(self, blocks: array[int]) -> None:
        for block in [block for block in blocks if block in self.sources]:
            blocks.remove(block)
            self.sources.remove(block)
            self.withheld.append(block)

    def give_back_later(self, blocks: array[int]) -> None:
        """These are free, but are to be copied from in this exchange."""
        self.withheld += blocks

    def end_exchange(self) -> None:
        """The copies that this exchange has asked for come before all that the next one grants."""
        if self.withheld:
            self.pool.give_back(self.withheld)
            self.withheld = array("i")
        self.sources.clear()

    def hold(self, node: PrefixNode, blocks: array[int], priority: float = 0.0) -> Holding:
        """From now on this memory holds the node, for one user."""
        self._num_stored += 1
        holding = node.holdings[self.index] = Holding(node, blocks, self._num_stored)
        holding.priority = priority
        if self.shares.orphans:
            self.shares.adopt(holding)
        parent = node.parent
        if parent is not None and (above := parent.holdings.get(self.index)) is not None:
            above.num_children += 1
        if parent is not None and parent.num_tails and not isinstance(node, Tail):
            self.drop_covered(node.key, parent)
        if self.events is not None:
            self.events.stored(holding)
        return holding

    def drop_covered(self, key: bytes, parent: PrefixNode) -> None:
        """A child of the parent that is held from now on begins with these tokens: a tail that has no others goes."""
        index, children = self.index, parent.children
        ends = range(TOKEN_BYTES, min(len(key), self.tree.block_bytes), TOKEN_BYTES)
        if len(children) < len(ends):
            tails = [tail for tail in children.values() if isinstance(tail, Tail) and key.startswith(tail.key)]
        else:
            tails = [tail for end in ends if isinstance(tail := children.get(key[:end]), Tail)]
        for tail in tails:
            if (holding := tail.holdings.get(index)) is not None:
                self.cached_blocks -= 1
                dropped = holding.blocks
                self._forget(holding)
                self._withhold(dropped)
                self.pool.give_back(dropped)

    def use(self, holding: Holding, priority: float = NO_REQUEST) -> None:
        """One user more, of a request of that priority."""
        if not holding.users:
            self.cached_blocks -= len(holding.blocks)
            self.queue.use(holding)
        holding.users += 1
        holding.priority = max(holding.priority, priority)

    def use_path(self, node: PrefixNode, priority: float = NO_REQUEST) -> array[int]:
        """One user more of the node and all above it; returns the blocks from the root to its end."""
        path = []
        while node.parent is not None:
            holding = node.holdings[self.index]
            self.use(holding, priority)
            holding.num_reuses += 1
            path.append(holding)
            node = node.parent
        blocks = array("i")
        for holding in reversed(path):
            blocks += holding.blocks
        return blocks

    def retain(self, node: PrefixNode, ranges: tuple[Range, ...], tenant: str) -> None:
        """Set how long the node and those above it are kept, all of which are in use. Nodes that are only partly within
        a range are split. What goes beyond the tenant's share falls back, block by block."""
        block_size = self.tree.block_size
        self.shares.next_turn()
        for one in ranges:
            first, end = -(-one.start // block_size), -(-one.end // block_size) or node.end
            if first >= min(end, node.end):
                continue
            below = self.tree.cut(node, min(end, node.end))
            if first:
                self.tree.cut(below, first)
            while below.parent is not None and below.end > first:
                self.set_retention(below.holdings[self.index], one.priority, one.duration_ms, tenant)
                below = below.parent
        self.enforce_shares(tenant)

    def set_retention(
        self, holding: Holding, priority: int, duration_ms: int, tenant: str, turn: int | None = None
    ) -> None:
        """As a request of the tenant says, now or in that turn. Another tenant's retention is not lowered. `shares` is
        not enforced."""
        owner = holding.owner
        if owner is not None and owner.is_retained(holding):
            if owner.name != tenant and priority <= holding.retention:
                return
            owner.release(holding)
        holding.retention, holding.duration_ms = priority, duration_ms
        if priority > DEFAULT_RETENTION:
            self.shares.retain(holding, tenant, turn)

    def enforce_shares(self, tenant: str) -> None:
        """What the tenant has retained beyond its share falls back, block by block."""
        share = self.shares.tenants.get(tenant)
        while share is not None and (excess := self.shares.excess(share)) and share.retained:
            holding = share.retained.peekitem(0)[1]
            keeps_children = holding.claims is not None and holding.claims[share] > 1
            if not keeps_children and len(holding.blocks) > excess:
                self.tree.split(holding.node, holding.node.end - excess)  # its front part stays retained
            self.queue.fall_back(holding)

    def leave_path(self, node: PrefixNode) -> None:
        """One user less of the node and all above it, from the tail to the head."""
        while node.parent is not None:
            holding, node = node.holdings[self.index], node.parent
            holding.users -= 1
            if holding.users:
                continue
            if self.keeps and not holding.unwritten:
                self.cached_blocks += len(holding.blocks)
                self.queue.add(holding)
            else:
                self.pool.give_back(holding.blocks[::-1])
                self._forget(holding)

    def _forget(self, holding: Holding) -> None:
        self._let_go(holding)
        if not holding.node.holdings:
            self.tree.remove(holding.node)

    def _let_go(self, holding: Holding) -> None:
        node, index = holding.node, self.index
        parent = node.parent
        assert parent is not None
        assert not holding.num_children, "children are forgotten before their parents"
        if self.events is not None:
            self.events.removed(holding)
        self.queue.forget(holding)
        if holding.owner is not None:
            holding.owner.release(holding)
        del node.holdings[index]
        if (above := parent.holdings.get(index)) is not None:
            above.num_children -= 1
            if not (above.num_children or above.users) and above.queue is None:
                self.queue.add(above, first=True)

    def held(self, node: PrefixNode, depth: int) -> tuple[PrefixNode, int, int]:
        """Of the way to a place in the tree: the last node of which this memory holds something, how many blocks of the
        way it holds, and how many of these are in use."""
        index = self.index
        while node.parent is not None and index not in node.holdings:
            node = node.parent
            depth = node.end
        last, live = node, depth
        while node.parent is not None and not node.holdings[index].users:
            node = node.parent
            live = node.end
        return last, depth, live

    def forget_unused(self, *tops: PrefixNode) -> int:
        """Nobody wants what is cached in these nodes and below, and has no user; returns how many blocks that was."""
        dropped = array("i")
        for node in reversed([*tops, *subtree(*tops)]):
            holding = node.holdings.get(self.index)
            if holding is not None and not holding.users:
                dropped += holding.blocks
                self._forget(holding)
        num_blocks = len(dropped)
        self.cached_blocks -= num_blocks
        if dropped:
            dropped = array("i", sorted(dropped))
            self._withhold(dropped)
            self.pool.give_back(dropped)
        return num_blocks

    def leave_tree(self) -> None:
        """The memory is gone, and all that it holds."""
        for node in reversed(list(subtree(*self.tree.roots.values()))):
            if node.holdings.pop(self.index, None) is not None and not node.holdings:
                self.tree.remove(node)
