"""The host memory of one worker: blocks of swapped-out sequences, and blocks that its device has evicted.

The host keeps copies of evicted blocks (`moves`). A sequence that needs them again gets them copied back into new
device blocks (`reuse`). So on every path in the tree the device has the beginning, and the host has what follows. The
host may have some of the beginning too: a copied-back block stays here, so that the device can evict it again without a
copy. No path has a gap:

  * if the device evicts a node and the host has no room, the node is dropped, with all nodes below it;
  * when the host evicts a node, this node has no children here (eviction.py). It has children on the device only if the
    device holds the node, too.

No sequence uses a node here. A swapped-out sequence has blocks of its own, outside the tree.

Order of copies in one exchange: first those to the host, then those from the host, then everything else on the worker.
So a device block that is copied to the host may be granted, and written, in the same exchange. A block that a later
copy reads (from the host, or within the device) must not be granted before the end of the exchange (`sources`).
"""

from __future__ import annotations

from array import array

from cache_svc.core.memory.memory import Memory
from cache_svc.core.memory.shares import TENANT_SHARE, TOTAL_SHARE
from cache_svc.core.tree.nodes import BlockResidency, PartialBlock, PrefixNode
from cache_svc.core.tree.tree import PrefixTree


class HostMemory(Memory):
    """`above` is the memory index of the worker's device."""

    __slots__ = ("above", "moved_partial_blocks", "moves", "orphans")

    def __init__(
        self,
        index: int,
        above: int,
        tree: PrefixTree,
        num_blocks: int,
        eviction: str,
        retained: tuple[float, float] = (TENANT_SHARE, TOTAL_SHARE),
    ) -> None:
        super().__init__(index, tree, num_blocks, True, eviction, retained)
        self.above = above
        self.moves: dict[int, int] = {}  # copies to the host in this exchange: target block -> source block
        self.moved_partial_blocks: set[int] = set()  # those targets that get a partial block
        self.orphans: dict[PrefixNode, int] = {}  # nodes not held here -> how many of their children are held here

    def take(self, count: int) -> array[int]:
        """Takes blocks as Memory.take does. A taken block is no longer the target of a move."""
        blocks = super().take(count)
        if self.moves:
            for block in blocks:
                self.moves.pop(block, None)
                self.moved_partial_blocks.discard(block)
        return blocks

    # ------------------------------------------------------------------------------------------ down from the device

    def take_in(self, evicted: list[BlockResidency]) -> None:
        """Keeps or drops the nodes that the device has just evicted. `evicted` lists children before their parents.

        It handles parents first, because a child is worth nothing without its parent. It never evicts one of these
        nodes to make room for another one.
        """
        index = self.index
        known = {residency for gone in evicted if (residency := gone.node.residencies.get(index)) is not None}
        for residency in known:
            self.use(residency)
        batch = {gone.node for gone in evicted}
        kept: list[tuple[BlockResidency, BlockResidency]] = []
        tenants: set[str] = set()
        for gone in reversed(evicted):
            residency = gone.node.residencies.get(index) or self._copy(gone, batch)
            if residency is not None:
                kept.append((residency, gone))
        for residency, gone in reversed(kept):
            if residency.node.residencies.get(index) is not residency:
                continue  # dropped with a parent
            residency.num_reuses = max(residency.num_reuses, gone.num_reuses)
            residency.priority = max(residency.priority, gone.priority)
            tenant = gone.owner.name if gone.owner is not None else ""
            self.shares.next_turn()
            self.set_retention(residency, gone.retention, gone.duration_ms, tenant)
            residency.expires_ms = gone.expires_ms
            tenants.add(tenant)
            residency.users -= 1
            self.cached_blocks += len(residency.blocks)
            self._join(residency, batch)
            self.queue.add(residency, renew=False)
            parent = residency.node.parent
            if residency in known and parent is not None and self.above in parent.residencies:
                self._refresh(parent)
        for tenant in sorted(tenants):
            self.enforce_shares(tenant)

    def _join(self, residency: BlockResidency, batch: set[PrefixNode]) -> None:
        """Joins a node with its only child into one run again, if both have equal properties and are neighbours in the
        eviction order. The device may have evicted the run block by block from its end."""
        node = residency.node
        if len(node.children) != 1 or len(node.residencies) != 1 or node.num_partial_blocks:
            return
        (child,) = node.children.values()
        below = child.residencies.get(self.index)
        if below is None or len(child.residencies) != 1 or child in batch:
            return
        known = [
            (one.num_reuses, one.priority, one.retention, one.duration_ms, one.owner) for one in (residency, below)
        ]
        is_short = child.end - node.start <= self.tree.max_node_blocks
        if is_short and known[0] == known[1] and not residency.duration_ms and self.queue.is_last(below, of=residency):
            self.queue.forget(below)
            self.tree.absorb(node, child)

    def _copy(self, gone: BlockResidency, batch: set[PrefixNode]) -> BlockResidency | None:
        """Holds the node that the device has lost, or as much of its beginning as there is room for."""
        node, size = gone.node, len(gone.blocks)
        parent = node.parent
        assert parent is not None
        wanted = parent.parent is None or self.above in parent.residencies or self.index in parent.residencies
        if isinstance(node, PartialBlock) and wanted:
            wanted = self.tree.covering(parent, node.key, self.index) == (None, True)
        count = min(size, max(0, self.available_blocks)) if wanted else 0
        blocks = self._take_below(parent, count)
        count = len(blocks)
        if 0 < count < size:
            node = self.tree.split(node, node.start + count)
        if count:
            if isinstance(node, PartialBlock):
                self.drop_covered(node.key, parent)
                self.moved_partial_blocks.add(blocks[0])
            residency = self.hold(node, blocks, gone.priority)
            residency.num_children = self.orphans.pop(node, 0)
            if parent.parent is not None and self.index not in parent.residencies:
                self.orphans[parent] = self.orphans.get(parent, 0) + 1
            self.moves.update(zip(blocks, gone.blocks[:count], strict=True))
        if count < size:
            self._drop_below(gone.node, batch)
        return residency if count else None

    def _take_below(self, parent: PrefixNode, count: int) -> array[int]:
        """Takes at most `count` blocks, without evicting the parent."""
        above = parent.residencies.get(self.index)
        if above is None:
            return self.take(count)
        above.num_children += 1
        blocks = self.take(count)
        above.num_children -= 1
        if not (above.num_children or above.users) and above.bucket is None:
            self.queue.add(above, first=True)
        return blocks

    def _drop_below(self, node: PrefixNode, batch: set[PrefixNode]) -> None:
        """Forgets all held nodes below a node that is held no more. Nodes of the batch stay in the tree."""
        below = [node]
        for above in below:
            below += [child for child in above.children.values() if self.index in child.residencies]
        dropped = array("i")
        for node in reversed(below[1:]):
            residency = node.residencies[self.index]
            dropped += residency.blocks
            if not residency.users:
                self.cached_blocks -= len(residency.blocks)
            self._let_go(residency)
            if not node.residencies and node not in batch:
                self.tree.evicted.add(node)
                self.tree.remove(node)
        self.evicted_blocks_total += len(dropped)
        if dropped:
            dropped = array("i", sorted(dropped))
            self._withhold(dropped)
            self.pool.give_back(dropped)

    def _let_go(self, residency: BlockResidency) -> None:
        super()._let_go(residency)
        parent = residency.node.parent
        assert parent is not None
        count = self.orphans.get(parent)
        if count is not None and count > 1:
            self.orphans[parent] = count - 1
        elif count is not None:
            del self.orphans[parent]

    def _refresh(self, node: PrefixNode) -> None:
        """Moves the held nodes on the path to the end of the eviction order, children before their parents."""
        while node.parent is not None:
            residency = node.residencies.get(self.index)
            if residency is not None:
                self.queue.remove(residency)
                self.queue.add(residency, renew=False)
            node = node.parent

    # -------------------------------------------------------------------------------------------- up to the device

    def behind(self, node: PrefixNode, depth: int, device_end: PrefixNode) -> tuple[PrefixNode, int]:
        """Returns the last node of a path that the device or the host holds, and how many blocks of the path are held.
        The path ends at `depth` in `node`. The device holds it up to `device_end`, and the host holds what follows."""
        while node is not device_end and self.index not in node.residencies:
            assert node.parent is not None
            node = node.parent
            depth = node.end
        return node, depth

    def reuse(self, node: PrefixNode, device_end: PrefixNode, priority: float) -> array[int]:
        """Returns the blocks from `device_end` to the end of the node. Copies read them in this exchange.

        This counts as a use of every held node on the path.
        """
        path = []
        start = device_end.end
        while node.parent is not None:
            residency = node.residencies.get(self.index)
            if residency is not None:
                self.queue.use(residency)
                residency.num_reuses += 1
                residency.priority = max(residency.priority, priority)
                self.queue.add(residency)
                if node.end > start:
                    path.append(residency)
            node = node.parent
        blocks = array("i")
        for residency in reversed(path):
            blocks += residency.blocks
        self.sources.update(blocks)
        return blocks
