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
from cache_svc.core.tree.nodes import BlockResidency, PartialBlock, PrefixNode, subtree
from cache_svc.core.tree.tree import PrefixTree

# The priority of a use that is nobody's request's: it changes that of no block.
NO_REQUEST = -math.inf


class LowerTier(Protocol):
    """A memory that takes in what another one evicts."""

    def take_in(self, evicted: list[BlockResidency]) -> None: ...


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
        while (missing := count - len(blocks)) > 0 and (residency := self.queue.pop()) is not None:
            if len(residency.blocks) > missing:
                self.tree.split(residency.node, residency.node.end - missing)  # it goes from its end
            gone = residency.blocks[::-1]
            self.evicted_blocks_total += len(gone)
            self.cached_blocks -= len(gone)
            self._let_go(residency)  # the node stays in the tree for the moment
            if self.sources:
                self._withhold(gone)
            blocks += gone
            evicted.append(residency)
        if self.lower is not None:
            self.lower.take_in(evicted)
        for residency in evicted:
            if not residency.node.residencies:
                self.tree.remove(residency.node)
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

    def hold(self, node: PrefixNode, blocks: array[int], priority: float = 0.0) -> BlockResidency:
        """From now on this memory holds the node, for one user."""
        self._num_stored += 1
        residency = node.residencies[self.index] = BlockResidency(node, blocks, self._num_stored)
        residency.priority = priority
        if self.shares.orphans:
            self.shares.adopt(residency)
        parent = node.parent
        if parent is not None and (above := parent.residencies.get(self.index)) is not None:
            above.num_children += 1
        if parent is not None and parent.num_partial_blocks and not isinstance(node, PartialBlock):
            self.drop_covered(node.key, parent)
        if self.events is not None:
            self.events.stored(residency)
        return residency

    def drop_covered(self, key: bytes, parent: PrefixNode) -> None:
        """A child of the parent that is held from now on begins with these tokens: a tail that has no others goes."""
        index, children = self.index, parent.children
        ends = range(TOKEN_BYTES, min(len(key), self.tree.block_bytes), TOKEN_BYTES)
        if len(children) < len(ends):
            partials = [
                partial
                for partial in children.values()
                if isinstance(partial, PartialBlock) and key.startswith(partial.key)
            ]
        else:
            partials = [partial for end in ends if isinstance(partial := children.get(key[:end]), PartialBlock)]
        for partial in partials:
            if (residency := partial.residencies.get(index)) is not None:
                self.cached_blocks -= 1
                dropped = residency.blocks
                self._forget(residency)
                self._withhold(dropped)
                self.pool.give_back(dropped)

    def use(self, residency: BlockResidency, priority: float = NO_REQUEST) -> None:
        """One user more, of a request of that priority."""
        if not residency.users:
            self.cached_blocks -= len(residency.blocks)
            self.queue.use(residency)
        residency.users += 1
        residency.priority = max(residency.priority, priority)

    def use_path(self, node: PrefixNode, priority: float = NO_REQUEST) -> array[int]:
        """One user more of the node and all above it; returns the blocks from the root to its end."""
        path = []
        while node.parent is not None:
            residency = node.residencies[self.index]
            self.use(residency, priority)
            residency.num_reuses += 1
            path.append(residency)
            node = node.parent
        blocks = array("i")
        for residency in reversed(path):
            blocks += residency.blocks
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
                self.set_retention(below.residencies[self.index], one.priority, one.duration_ms, tenant)
                below = below.parent
        self.enforce_shares(tenant)

    def set_retention(
        self, residency: BlockResidency, priority: int, duration_ms: int, tenant: str, turn: int | None = None
    ) -> None:
        """As a request of the tenant says, now or in that turn. Another tenant's retention is not lowered. `shares` is
        not enforced."""
        owner = residency.owner
        if owner is not None and owner.is_retained(residency):
            if owner.name != tenant and priority <= residency.retention:
                return
            owner.release(residency)
        residency.retention, residency.duration_ms = priority, duration_ms
        if priority > DEFAULT_RETENTION:
            self.shares.retain(residency, tenant, turn)

    def enforce_shares(self, tenant: str) -> None:
        """What the tenant has retained beyond its share falls back, block by block."""
        share = self.shares.tenants.get(tenant)
        while share is not None and (excess := self.shares.excess(share)) and share.retained:
            residency = share.retained.peekitem(0)[1]
            keeps_children = residency.claims is not None and residency.claims[share] > 1
            if not keeps_children and len(residency.blocks) > excess:
                self.tree.split(residency.node, residency.node.end - excess)  # its front part stays retained
            self.queue.fall_back(residency)

    def leave_path(self, node: PrefixNode) -> None:
        """One user less of the node and all above it, from the tail to the head."""
        while node.parent is not None:
            residency, node = node.residencies[self.index], node.parent
            residency.users -= 1
            if residency.users:
                continue
            if self.keeps and not residency.unwritten:
                self.cached_blocks += len(residency.blocks)
                self.queue.add(residency)
            else:
                self.pool.give_back(residency.blocks[::-1])
                self._forget(residency)

    def _forget(self, residency: BlockResidency) -> None:
        self._let_go(residency)
        if not residency.node.residencies:
            self.tree.remove(residency.node)

    def _let_go(self, residency: BlockResidency) -> None:
        node, index = residency.node, self.index
        parent = node.parent
        assert parent is not None
        assert not residency.num_children, "children are forgotten before their parents"
        if self.events is not None:
            self.events.removed(residency)
        self.queue.forget(residency)
        if residency.owner is not None:
            residency.owner.release(residency)
        del node.residencies[index]
        if (above := parent.residencies.get(index)) is not None:
            above.num_children -= 1
            if not (above.num_children or above.users) and above.bucket is None:
                self.queue.add(above, first=True)

    def held(self, node: PrefixNode, depth: int) -> tuple[PrefixNode, int, int]:
        """Of the way to a place in the tree: the last node of which this memory holds something, how many blocks of the
        way it holds, and how many of these are in use."""
        index = self.index
        while node.parent is not None and index not in node.residencies:
            node = node.parent
            depth = node.end
        last, referenced = node, depth
        while node.parent is not None and not node.residencies[index].users:
            node = node.parent
            referenced = node.end
        return last, depth, referenced

    def forget_unused(self, *tops: PrefixNode) -> int:
        """Nobody wants what is cached in these nodes and below, and has no user; returns how many blocks that was."""
        dropped = array("i")
        for node in reversed([*tops, *subtree(*tops)]):
            residency = node.residencies.get(self.index)
            if residency is not None and not residency.users:
                dropped += residency.blocks
                self._forget(residency)
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
            if node.residencies.pop(self.index, None) is not None and not node.residencies:
                self.tree.remove(node)
