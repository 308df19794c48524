"""Sequences that wait: each keeps its place in the prefix tree, and learns when that place changes.

A waiting sequence watches the place where its match ends, for the block that would come next. When that block is
stored, or one that begins with more of its tokens than what was there, or when the node leaves the tree, the sequence
is moved to `stale`, which costs nothing but that; it finds its new place from where it stands, not from the root, the
next time it is looked at. That is when somebody asks for it, or at the end of the exchange; no exchange settles more
than MAX_SETTLED of its own accord, so that a prefix for which thousands wait does not hold up a step: their turn comes
with the next ones.

So the longest match that any worker has is known exactly in whole blocks, and never as less than it is in tokens. What
a watcher does not notice: that another worker comes to hold its node or lets it go, that the node gets or loses its
last user or moves between device and host, and that a block goes of which it could have used the beginning. RematchOp
asks for all this: it is a look at who holds the nodes on the way back to the root, and no walk; not a token of the way
is compared again.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from cache_svc.core.sequences.sequence import Terms
from cache_svc.core.tree.tree import Namespace, PrefixNode, PrefixTree, Root, common_tokens

MAX_SETTLED = 256


class Watch:
    """One place of the tree, and who waits there: by the tokens that come next, as many as a block has, or fewer if a
    match can have no more; and by id."""

    __slots__ = ("_in_order", "depth", "node", "waiting")

    def __init__(self, node: PrefixNode, depth: int) -> None:
        self.node = node
        self.depth = depth
        self.waiting: dict[bytes, dict[int, Waiter]] = {}
        self._in_order: list[bytes] | None = None  # what is waited for; once a block was stored behind here
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

    def join(self, waiter: Waiter) -> None:
        group = self.waiting.get(waiter.wanted)
        if group is None:
            group = self.waiting[waiter.wanted] = {}
            if self._in_order is not None:
                insort(self._in_order, waiter.wanted)
        group[waiter.sequence_id] = waiter

    def leave(self, waiter: Waiter) -> None:
        group = self.waiting[waiter.wanted]
        del group[waiter.sequence_id]
        if not group:
            self._drop_group(waiter.wanted)

    def drop(self, wanted: bytes) -> dict[int, Waiter]:
        """Nobody waits here for that block any more; returns those who did."""
        return self._drop_group(wanted) if wanted in self.waiting else {}

    def drop_nearest(self, key: bytes, num_known: int) -> dict[int, Waiter]:
        """Those wait here no more whose next tokens have more than so many in common with a block's; returns them. In
        order of tokens they stand side by side, so that nobody else is looked at."""
        in_order = self._in_order
        if in_order is None:
            in_order = self._in_order = sorted(self.waiting)
        begin = end = bisect_left(in_order, key)
        while begin and common_tokens(in_order[begin - 1], key) > num_known:
            begin -= 1
        while end < len(in_order) and common_tokens(in_order[end], key) > num_known:
            end += 1
        nearest: dict[int, Waiter] = {}
        for wanted in in_order[begin:end]:
            nearest |= self._drop_group(wanted)
        return nearest

    def drop_all(self) -> dict[int, Waiter]:
        """The place is gone; returns everybody."""
        everybody: dict[int, Waiter] = {}
        for group in self.waiting.values():
            everybody |= group
        self.waiting, self._in_order = {}, None
        for waiter in everybody.values():
            waiter.watch = None
        return everybody

    def _drop_group(self, wanted: bytes) -> dict[int, Waiter]:
        group = self.waiting.pop(wanted)
        if self._in_order is not None:
            del self._in_order[bisect_left(self._in_order, wanted)]
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
        tree.stale[self.sequence_id] = self

    def place(self) -> tuple[PrefixNode, int]:
        """Where its match ends, of one that is settled."""
        assert self.watch is not None
        return self.watch.node, self.depth

    def settle(self, tree: PrefixTree) -> None:
        """Find the place in the tree anew, from the present one."""
        self.leave(tree)
        node, depth = self.node, self.depth
        while node.parent is not None and (not node.holdings or depth <= node.start):
            node, depth = node.parent, min(depth, node.start)
        self.node, self.depth = node, depth = tree.walk(self.token_ids, node, min(depth, node.end))
        self.wanted = tree.next_tokens(self.token_ids, depth)
        watch = node.watches.get(depth) if node.watches else None
        self.watch = watch or Watch(node, depth)
        self.watch.join(self)

    def leave(self, tree: PrefixTree) -> None:
        """Watch nothing: it waits no more, or is about to be settled anew."""
        tree.stale.pop(self.sequence_id, None)
        if self.watch is not None:
            self.watch.leave(self)
