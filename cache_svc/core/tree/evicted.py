"""Remembers which prefixes were evicted lately, so that a miss can be explained.

It knows ids of blocks (prefix_ids.py) and no tokens. An evicted block costs its hash and one entry of a set, 1.3 us
together. Entries are kept in two generations: when the newer one is full, the older one is forgotten.
"""

from __future__ import annotations

from cache_svc.core.tree.nodes import PartialBlock, PrefixNode
from cache_svc.core.tree.prefix_ids import chain, prefix_ids_within

GENERATION_BLOCKS = 2**15  # 2 MiB
# Blocks that one call hashes, and that one search looks at: together at most 1 ms.
MAX_HASHED_BLOCKS = 512


class EvictedPrefixes:
    """The last GENERATION_BLOCKS blocks that have left a tree because of eviction, and up to as many before them."""

    __slots__ = ("_block_bytes", "_newer", "_older")

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._newer: set[int] = set()
        self._older: set[int] = set()

    def __len__(self) -> int:
        return len(self._newer) + len(self._older)

    def add(self, node: PrefixNode) -> None:
        """The tree is about to lose the node, because the last memory that held it has evicted it. Partial blocks are
        not noted, and neither are the first evictions below a long path without ids."""
        if isinstance(node, PartialBlock):
            return
        ids = prefix_ids_within(node, self._block_bytes, MAX_HASHED_BLOCKS)
        if ids is None:
            return
        self._newer.update(ids)
        if len(self._newer) >= GENERATION_BLOCKS:
            self._older, self._newer = self._newer, set()

    def count(self, node: PrefixNode, token_ids: bytes, num_skipped: int, end: int) -> int:
        """How many blocks of a sequence were evicted, one after the other, after its path to the end of a node.

        `num_skipped`: blocks after the node at which the search begins. `end`: the block before which it ends. After
        MAX_HASHED_BLOCKS blocks, the others are taken to be like the last one.
        """
        if not (self._newer or self._older):
            return 0
        before = prefix_ids_within(node, self._block_bytes, MAX_HASHED_BLOCKS)
        if before is None:
            return 0
        last, block_bytes = before[-1], self._block_bytes
        first = node.end + num_skipped
        for at in range(node.end, min(end, node.end + MAX_HASHED_BLOCKS)):
            begin = at * block_bytes
            (last,) = chain(last, token_ids[begin : begin + block_bytes], block_bytes)
            if at >= first and last not in self._newer and last not in self._older:
                return at - first
        return max(end - first, 0)
