"""Sequences that wait: each keeps its place in the prefix tree, and learns when that place changes.

A waiting sequence watches the node where its match ends (the root, if nothing matches), for the block that would come
next. When that block is stored, or the node leaves the tree, the watcher is moved to `stale`, which costs nothing but
that; it finds its new place from where it stands, not from the root, the next time it is looked at. That is when
somebody asks for it, or at the end of the exchange; no exchange settles more than MAX_SETTLED of its own accord, so
that a prefix for which thousands wait does not hold up a step: their turn comes with the next ones.

What a watcher does not notice, because the node stays: that another worker comes to hold it or lets it go, and that
it gets or loses its last user. Both only change what is reported of a worker, never how far the tree knows the
sequence; RematchOp asks for them.
"""

from __future__ import annotations

from cache_svc.core.tree import PrefixNode, PrefixTree

MAX_SETTLED = 256


class Waiter:
    """`path` leads from the root to where the match ends: the longest stored prefix, on whichever worker."""

    __slots__ = ("path", "sequence_id", "token_ids", "wanted", "watched")

    def __init__(self, sequence_id: int, token_ids: bytes) -> None:
        self.sequence_id = sequence_id
        self.token_ids = token_ids
        self.path: list[PrefixNode] = []
        self.watched: PrefixNode | None = None
        self.wanted = b""  # key of the next block; empty: the match can get no longer

    def settle(self, tree: PrefixTree) -> bool:
        """Find the place in the tree anew, from the present one; whether it is another one."""
        path = self.path
        before = path[-1] if path else None
        self.leave(tree)
        while path and not path[-1].holders:
            path.pop()
        tree.walk_on(self.token_ids, path)
        end = path[-1] if path else tree.root
        self.watched, self.wanted = end, tree.block_at(self.token_ids, len(path))
        if end.watchers is None:
            end.watchers = {}
        end.watchers.setdefault(self.wanted, {})[self.sequence_id] = self
        return (path[-1] if path else None) is not before

    def leave(self, tree: PrefixTree) -> None:
        """Watch nothing."""
        tree.stale.pop(self.sequence_id, None)
        node, self.watched = self.watched, None
        if node is None or node.watchers is None:
            return
        group = node.watchers.get(self.wanted)
        if group is not None and group.pop(self.sequence_id, None) is not None and not group:
            del node.watchers[self.wanted]
            if not node.watchers:
                node.watchers = None
