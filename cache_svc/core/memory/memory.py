"""The blocks of one memory, and the nodes of the prefix tree that it holds.

Each block is in exactly one of three states:

    free    no user, no content                    in the pool
    cached  no user, content in the tree           in a residency without users
    used    content in the tree, with users        in a residency with users
            or not in the tree, with one user      in the table of one sequence
            or freed, but a copy still reads it    in `withheld`, until the end of the exchange

eviction.py decides which unused node goes first. With the default strategy, least recently used first, and without
retentions, a parent never stands before its children. Proof, for a node P and its child C that the memory both holds:

  1. Every user of C uses P: a sequence takes a path from the root, extends it node by node, and leaves it as a whole.
  2. So the last user of C also used P. It left C before P, since `leave_path` goes from the end of the path to
     the root. No sequence has used C since. The last user of P left at the same time or later.
  3. So if both are unused, C entered the queue before P, and eviction takes the oldest entry first.

When an unused node is split, its front part is not in the queue until the back part is evicted. The front part then
enters the queue at the front. It would have the same place if it had been a node of its own from the beginning. On a
device, the held nodes are always connected to the root, and so are the used ones. check_invariants asserts it.
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

# The priority of a use that belongs to no request. It changes no block's priority.
NO_REQUEST = -math.inf


class LowerTier(Protocol):
    """A memory that takes in the nodes that another memory evicts."""

    def take_in(self, evicted: list[BlockResidency]) -> None:
        """Keeps or drops nodes that the memory above has just evicted. Children come before their parents."""


class Memory:
    """`index` names the memory in `node.residencies`. `keeps`: whether unused nodes are kept for reuse."""

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
        """`retained`: shares of the blocks that may be retained, for one tenant and for all tenants."""
        self.index = index
        self.tree = tree
        self.num_blocks = num_blocks
        self.keeps = keeps
        self.pool = BlockPool(num_blocks)
        self.cached_blocks = 0
        self.evicted_blocks_total = 0
        self.queue = EvictionQueue(eviction)
        self.shares = RetentionShares(index, num_blocks, *retained)
        self.events: Recorder | None = None  # None if the memory keeps nothing for reuse
        self.lower: LowerTier | None = None  # takes in the nodes that are evicted here
        self._num_stored = 0
        # Blocks that the copies of this exchange read. They are not granted before its end.
        self.sources: set[int] = set()
        self.withheld = array("i")  # evicted or freed blocks among them

    @property
    def free_blocks(self) -> int:
        """Blocks without content."""
        return self.pool.num_free

    @property
    def available_blocks(self) -> int:
        """`take` can hand out at least this many blocks: free and cached ones, minus the sources (even those that are
        in use)."""
        return self.pool.num_free + self.cached_blocks - len(self.sources)

    @property
    def used_blocks(self) -> int:
        """Blocks that are neither free nor cached."""
        return self.num_blocks - self.pool.num_free - self.cached_blocks

    def take(self, count: int) -> array[int]:
        """Takes blocks without content: free blocks first, then cached ones, which it evicts.

        The caller checks `available_blocks` first. With fewer than `count` available, the result is shorter.
        """
        blocks = self.pool.take(count)
        if len(blocks) == count:
            return blocks
        evicted = []
        while (missing := count - len(blocks)) > 0 and (residency := self.queue.pop()) is not None:
            if len(residency.blocks) > missing:
                self.tree.split(residency.node, residency.node.end - missing)  # a node is evicted from its end
            gone = residency.blocks[::-1]
            self.evicted_blocks_total += len(gone)
            self.cached_blocks -= len(gone)
            self._let_go(residency)  # the node itself stays in the tree for now
            if self.sources:
                self._withhold(gone)
            blocks += gone
            evicted.append(residency)
        if self.lower is not None:
            self.lower.take_in(evicted)
        for residency in evicted:
            if not residency.node.residencies:
                self.tree.evicted.add(residency.node)
                self.tree.remove(residency.node)
        return blocks

    def _withhold(self, blocks: array[int]) -> None:
        for block in [block for block in blocks if block in self.sources]:
            blocks.remove(block)
            self.sources.remove(block)
            self.withheld.append(block)

    def give_back_later(self, blocks: array[int]) -> None:
        """Frees these blocks at the end of the exchange, because copies of the exchange read them."""
        self.withheld += blocks

    def end_exchange(self) -> None:
        """Frees the withheld blocks: the copies of this exchange come before everything that the next one grants."""
        if self.withheld:
            self.pool.give_back(self.withheld)
            self.withheld = array("i")
        self.sources.clear()

    def hold(self, node: PrefixNode, blocks: array[int], priority: float = 0.0) -> BlockResidency:
        """The memory holds the node from now on, with one user."""
        self._num_stored += 1
        residency = node.residencies[self.index] = BlockResidency(node, blocks, self._num_stored, self.queue.now_ms)
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
        """A child of `parent` begins with these tokens from now on. Drops the partial blocks with a shorter prefix of
        these tokens."""
        index, children = self.index, parent.children
        ends = range(TOKEN_BYTES, min(len(key), self.tree.block_bytes), TOKEN_BYTES)
        for partial in [one for end in ends if isinstance(one := children.get(key[:end]), PartialBlock)]:
            if (residency := partial.residencies.get(index)) is not None:
                self.cached_blocks -= 1
                dropped = residency.blocks
                self._forget(residency)
                self._withhold(dropped)
                self.pool.give_back(dropped)

    def use(self, residency: BlockResidency, priority: float = NO_REQUEST) -> None:
        """Adds a user, with the priority of its request."""
        if not residency.users:
            self.cached_blocks -= len(residency.blocks)
            self.queue.use(residency)
        residency.users += 1
        residency.priority = max(residency.priority, priority)

    def use_path(self, node: PrefixNode, priority: float = NO_REQUEST) -> array[int]:
        """Adds a user to the node and all nodes above it. Returns the blocks from the root to its end."""
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
        """Sets the retention of the nodes on a path, all of which must be in use. Splits nodes at the ends of a
        range.

        If a limit is then exceeded, retentions of the tenant end block by block.
        """
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

    def set_retention(self, residency: BlockResidency, priority: int, duration_ms: int, tenant: str) -> None:
        """Sets a retention for a tenant. Never lowers that of another tenant.

        Does not enforce the tenant's share.
        """
        owner = residency.owner
        if owner is not None and owner.is_retained(residency):
            if owner.name != tenant and priority <= residency.retention:
                return
            owner.release(residency)
        residency.retention, residency.duration_ms = priority, duration_ms
        if priority > DEFAULT_RETENTION:
            self.shares.retain(residency, tenant)

    def enforce_shares(self, tenant: str) -> None:
        """Ends retentions of the tenant, block by block, until both limits hold or it has no retention left."""
        share = self.shares.tenants.get(tenant)
        while share is not None and (excess := self.shares.excess(share)) and share.retained:
            residency = share.retained.peekitem(0)[1]
            keeps_children = residency.claims is not None and residency.claims[share] > 1
            if not keeps_children and len(residency.blocks) > excess:
                self.tree.split(residency.node, residency.node.end - excess)  # the front part stays retained
            self.queue.fall_back(residency)

    def leave_path(self, node: PrefixNode) -> None:
        """Removes a user from the node and all nodes above it, from the end of the path to the root."""
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
        """Returns the last held node on the path to a place, how many blocks of the path are held, and how many of the
        held blocks are in use."""
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
        """Forgets the unused nodes among these and below them. Returns the number of blocks."""
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
        """The memory is gone: the tree forgets all that it holds."""
        for node in reversed(list(subtree(*self.tree.roots.values()))):
            if node.residencies.pop(self.index, None) is not None and not node.residencies:
                self.tree.remove(node)
