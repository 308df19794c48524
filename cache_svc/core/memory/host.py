"""A worker's host memory: blocks of sequences that are swapped out, and what its device had to evict.

What the device evicts is kept here for a second chance, its blocks copied (`moves`), and what is needed again is copied
back into new device blocks (`reuse`). So of what a worker has of any path in the tree, the device has the beginning
and the host what comes behind it (and maybe some of the beginning, too: what is copied back stays here, so that it
need not be copied again when the device evicts it once more). No path has a gap:

  * what the device evicts, and there is no room for here, is dropped, and with it all that only the host has below it;
  * what is evicted here has no children here (eviction.py), and if the device does not have it, no children there.

Nobody uses a node here. A sequence that is swapped out has blocks of its own, outside of the tree.

The order of copies: those of one exchange to the host are made before those from it, which are made before anything
else happens on the worker. Hence a block that is to be copied from is no target in the same exchange (`sources`).
"""

from __future__ import annotations

from array import array

from cache_svc.core.memory.memory import Memory
from cache_svc.core.memory.shares import TENANT_SHARE, TOTAL_SHARE
from cache_svc.core.tree.nodes import BlockResidency, PartialBlock, PrefixNode
from cache_svc.core.tree.tree import PrefixTree


class HostMemory(Memory):
    """`above` is the index of the worker's device."""

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
        self.moves: dict[int, int] = {}  # of this exchange: device blocks, by the host block that they are copied to
        self.moved_partial_blocks = 0  # of these
        self.orphans: dict[PrefixNode, int] = {}  # of nodes that are not held here: how many of their children are

    def take(self, count: int) -> array[int]:
        blocks = super().take(count)
        if self.moves:
            for block in blocks:
                self.moves.pop(block, None)
        return blocks

    # ------------------------------------------------------------------------------------------ down from the device

    def take_in(self, evicted: list[BlockResidency]) -> None:
        """What the device has evicted just now, children before their parents: keep it, or drop it. Parents are seen
        to first, for what is below them is worth nothing without them. None of it is evicted for another."""
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
        """What the device evicts block by block, from the end of a run, becomes a run again, if nothing tells the parts
        from each other and they are to be evicted one after the other anyhow."""
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
        """Hold the node of something that the device has lost, or as much of its beginning as there is room for."""
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
                self.moved_partial_blocks += 1
            residency = self.hold(node, blocks, gone.priority)
            residency.num_children = self.orphans.pop(node, 0)
            if parent.parent is not None and self.index not in parent.residencies:
                self.orphans[parent] = self.orphans.get(parent, 0) + 1
            self.moves.update(zip(blocks, gone.blocks[:count], strict=True))
        if count < size:
            self._drop_below(gone.node, batch)
        return residency if count else None

    def _take_below(self, parent: PrefixNode, count: int) -> array[int]:
        """So many blocks, or as many as can be had without evicting the parent, nor what has children in the batch."""
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
        """Nothing leads to what is held below the node any more. Nodes of the batch stay in the tree for the moment."""
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
        """What is held of the way to the node stands behind what was used before now, children before their parents."""
        while node.parent is not None:
            residency = node.residencies.get(self.index)
            if residency is not None:
                self.queue.remove(residency)
                self.queue.add(residency, renew=False)
            node = node.parent

    # -------------------------------------------------------------------------------------------- up to the device

    def behind(self, node: PrefixNode, depth: int, device_end: PrefixNode) -> tuple[PrefixNode, int]:
        """Of the way to a place in the tree, where what is held of it ends. The device has it up to `device_end`."""
        while node is not device_end and self.index not in node.residencies:
            assert node.parent is not None
            node = node.parent
            depth = node.end
        return node, depth

    def reuse(self, node: PrefixNode, device_end: PrefixNode, priority: float) -> array[int]:
        """The blocks behind `device_end` up to the end of the node, which are to be copied from in this exchange. That
        is a use of all of the way to there that is held."""
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
