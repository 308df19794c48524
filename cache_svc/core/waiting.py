"""Sequences that wait: each keeps its place in the prefix tree, and learns when that place changes.

A waiting sequence watches the place where its match ends, for the block that would come next. When that block is
stored, or the node leaves the tree, the sequence is moved to `stale`, which costs nothing but that; it finds its new
place from where it stands, not from the root, the next time it is looked at. That is when somebody asks for it, or at
the end of the exchange; no exchange settles more than MAX_SETTLED of its own accord, so that a prefix for which
thousands wait does not hold up a step: their turn comes with the next ones.

What a watcher does not notice: that another worker comes to hold its node or lets it go, that the node gets or loses
its last user or moves between device and host, and that some block comes or goes of which it could use the beginning.
None of these changes how many whole blocks the tree knows of the sequence; RematchOp asks for them.
"""

from __future__ import annotations

from cache_svc.core.table import Terms
from cache_svc.core.tree import Namespace, PrefixNode, PrefixTree, Root

MAX_SETTLED = 256


class Watch:
    """One place of the tree, and who waits there: by the tokens of the next block (none, if a match can get no longer),
    and by id."""

    __slots__ = ("depth", "node", "waiting")

    def __init__(self, node: PrefixNode, depth: int) -> None:
        self.node = node
        self.depth = depth
        self.waiting: dict[bytes, dict[int, Waiter]] = {}
        if node.watches is None:
            node.watches = {}
        node.watches[depth] = self

    def move(self, node: PrefixNode) -> None:
        """The place belongs to another node now."""
        self._unhook()
        self.node = node
        if node.watches is None:
            node.watches = {}
        node.watches[self.depth] = self

    def leave(self, waiter: Waiter) -> None:
        group = self.waiting[waiter.wanted]
        del group[waiter.sequence_id]
        if not group:
            self._drop_group(waiter.wanted)

    def drop(self, wanted: bytes) -> dict[int, Waiter]:
        """Nobody waits here for that block any more; returns those who did."""
        return self._drop_group(wanted) if wanted in self.waiting else {}

    def drop_all(self) -> dict[int, Waiter]:
        """The place is gone; returns everybody."""
        everybody: dict[int, Waiter] = {}
        for group in self.waiting.values():
            everybody |= group
        self.waiting = {}
        for waiter in everybody.values():
            waiter.watch = None
        return everybody

    def _drop_group(self, wanted: bytes) -> dict[int, Waiter]:
        group = self.waiting.pop(wanted)
        for waiter in group.values():
            waiter.watch = None
        if not self.waiting:
            self._unhook()
        return group

    def _unhook(self) -> None:
        watches = self.node.watches
        assert watches is not None
        del watches[self.depth]
        if not watches:
            self.node.watches = None


class Waiter:
    """`node` and `depth` are where its match ended when it was last looked at: the longest stored prefix, on whichever
    worker."""

    __slots__ = (
        "depth",
        "namespace",
        "node",
        "reported",
        "root",
        "sequence_id",
        "terms",
        "token_ids",
        "wanted",
        "watch",
    )

    root: Root  # these two as long as there is a tree
    node: PrefixNode

    def __init__(self, sequence_id: int, token_ids: bytes, namespace: Namespace, terms: Terms) -> None:
        self.sequence_id = sequence_id
        self.token_ids = token_ids
        self.namespace = namespace
        self.terms = terms
        self.depth = 0
        self.watch: Watch | None = None
        self.wanted = b""
        self.reported: list[tuple[int, int, int, int]] = []  # what the scheduler knows (matching.py)

    def enter(self, tree: PrefixTree) -> None:
        """There is a (new) tree."""
        self.root = self.node = tree.enter(self.namespace)
        self.depth, self.watch = 0, None
        tree.stale[self.sequence_id] = self

    def place(self) -> tuple[PrefixNode, int]:
        """Where its match ends, of one that is settled."""
        assert self.watch is not None
        return self.watch.node, self.depth

    def settle(self, tree: PrefixTree) -> bool:
        """Find the place in the tree anew, from the present one; whether it is another one."""
        self.leave(tree)
        node, depth = self.node, self.depth
        is_gone = node.parent is not None and not node.holdings
        while node.parent is not None and (not node.holdings or depth <= node.start):
            node, depth = node.parent, min(depth, node.start)
        node, depth = tree.walk(self.token_ids, node, min(depth, node.end))
        changed = is_gone or depth != self.depth
        self.node, self.depth = node, depth
        self.wanted = tree.next_block(self.token_ids, depth)
        watch = node.watches.get(depth) if node.watches else None
        self.watch = watch or Watch(node, depth)
        self.watch.waiting.setdefault(self.wanted, {})[self.sequence_id] = self
        return changed

    def leave(self, tree: PrefixTree) -> None:
        """Watch nothing. Its place is still known, as long as nobody changes the tree."""
        tree.stale.pop(self.sequence_id, None)
        if self.watch is not None:
            self.node, watch, self.watch = self.watch.node, self.watch, None
            watch.leave(self)
