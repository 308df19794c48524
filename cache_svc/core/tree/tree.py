"""The prefix tree: a radix tree over whole blocks, one for all workers.

A node is a run of whole blocks. They come after all blocks on the path from the root to the node. The key of a node is
its tokens themselves, and a parent finds a child by the tokens of the child's first block, so a hash collision cannot
serve wrong KV. The tree splits a run where two sequences diverge, and where a part of a run gets other holders,
users or another retention than the rest. So everything about a node holds for all of it: a memory holds a whole node or
nothing of it, and a sequence uses a whole node or nothing of it.

Two facts hold for every device memory, on every path downwards (a host may hold only the later nodes of a path):

  * the nodes that the memory holds come before the nodes that it does not hold;
  * among the held nodes, the nodes in use come before the nodes that are only cached.

The first fact holds because a sequence commits its blocks in order, and because eviction takes children before their
parents (memory/eviction.py). The second one holds because a sequence that uses a node uses all nodes above it.

So one walk down by tokens serves all workers. One walk up from its end finds how many blocks of the path each worker
holds. A node that loses its last holder has no children left: the tree removes it at once, and needs no sweep.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from cache_svc.core.packing import TOKEN_BYTES, common_tokens
from cache_svc.core.tree.evicted import EvictedPrefixes, front_hash
from cache_svc.core.tree.nodes import (
    BlockResidency,
    Namespace,
    PartialBlock,
    PrefixNode,
    PrefixSubscription,
    Root,
    SubscriptionPoint,
)

# A longer run becomes several nodes, because a split copies the node's tokens.
MAX_NODE_TOKENS = 2048
NEAREST_TRIED = 8
COVERING_TRIED = 64


class PrefixTree:
    """Blocks of `block_size` tokens. Each namespace has its own tree, so no walk crosses into another one."""

    __slots__ = ("block_bytes", "block_size", "evicted", "max_node_blocks", "partial_reuse", "roots", "stale")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.block_bytes = block_size * TOKEN_BYTES
        self.max_node_blocks = max(1, MAX_NODE_TOKENS // block_size)
        self.roots: dict[Namespace, Root] = {}
        self.evicted = EvictedPrefixes(self.block_bytes)
        self.partial_reuse = False  # whether any worker copies the beginning of a block
        self.stale: dict[int, PrefixSubscription] = {}  # subscriptions to refresh, by sequence id

    def acquire_root(self, namespace: Namespace) -> Root:
        """Returns the root for the walks of one more sequence."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Root(namespace)
        root.users += 1
        return root

    def release_root(self, root: Root) -> None:
        """The sequence has ended. The tree forgets a namespace that has no sequences and no blocks."""
        root.users -= 1
        self._forget_empty(root)

    def _forget_empty(self, root: Root) -> None:
        if not (root.users or root.children) and root.namespace is not None:
            del self.roots[root.namespace]

    def max_match(self, token_ids: bytes) -> int:
        """The most blocks that a match may have. The block with the last token is excluded: a model must compute one
        token."""
        return (len(token_ids) // TOKEN_BYTES - 1) // self.block_size

    def next_tokens(self, token_ids: bytes, depth: int) -> bytes:
        """The sequence's tokens in the block at `depth`, without the last token of the sequence."""
        begin = depth * self.block_bytes
        return token_ids[begin : min(begin + self.block_bytes, len(token_ids) - TOKEN_BYTES)]

    def walk(self, token_ids: bytes, node: PrefixNode, depth: int) -> tuple[PrefixNode, int]:
        """Returns where the longest prefix stored on any worker ends: a node, and the depth in blocks from the root.

        `node` and `depth` are where the walk starts: the root and 0, or the result of an earlier walk.
        """
        limit, block_bytes = self.max_match(token_ids), self.block_bytes
        while depth < limit:
            if depth == node.end:
                begin = depth * block_bytes
                child = node.children.get(token_ids[begin : begin + block_bytes])
                if child is None:
                    break
                node = child
            depth = self.follow(node, token_ids, limit)
            if depth < node.end:
                break
        return node, depth

    def follow(self, node: PrefixNode, token_ids: bytes, limit: int) -> int:
        """Returns the depth up to which the node's tokens equal `token_ids`: at most the node's end, at most `limit`.

        The caller must have compared the tokens before the node.
        """
        block_bytes, start = self.block_bytes, node.start
        begin = start * block_bytes
        if node.end <= limit and token_ids.startswith(node.key, begin):
            return node.end
        key = memoryview(node.key)
        low, high = 0, min(node.end, limit) - start
        while low < high:  # the first `low` blocks are equal, and at most the first `high`
            middle = (low + high + 1) // 2
            at = begin + low * block_bytes
            if token_ids.startswith(key[low * block_bytes : middle * block_bytes], at):
                low = middle
            else:
                high = middle - 1
        return start + low

    def nearest(self, node: PrefixNode, depth: int, token_ids: bytes, index: int) -> tuple[int, int]:
        """Finds the block in one memory that has the longest common beginning with the sequence's next tokens.

        The match of the sequence has `depth` blocks and ends in `node`. Returns the block id (0: no block has a token
        in common) and the number of common tokens, never counting the last token of the sequence. Among children sorted
        by tokens, the neighbours of the sequence's own block have the most in common with it. On each side the search
        stops after NEAREST_TRIED children that the memory does not hold.
        """
        block_bytes, rest = self.block_bytes, self.next_tokens(token_ids, depth)
        if depth < node.end:
            at = depth - node.start
            common = common_tokens(node.key[at * block_bytes : (at + 1) * block_bytes], rest)
            residency = node.residencies.get(index)
            if common and residency is not None and not residency.unwritten:
                return residency.blocks[at], common
            return 0, 0
        keys = _first_keys(node).get(rest[:TOKEN_BYTES])
        if keys is None:  # the usual case
            return 0, 0
        place, best = bisect_left(keys, rest), (0, 0)
        for side in (keys[place : place + NEAREST_TRIED], keys[max(0, place - NEAREST_TRIED) : place][::-1]):
            for key in side:
                common = common_tokens(key, rest)
                if common <= best[1]:
                    break
                held = node.children[key].residencies.get(index)
                if held is not None and not held.unwritten:  # the copy is made before the step writes anything
                    best = held.blocks[0], common
                    break
        return best

    def covering(self, node: PrefixNode, partial: bytes, index: int) -> tuple[BlockResidency | None, bool]:
        """Finds a child of the node that begins with all tokens of `partial` and that the memory holds.

        Returns its residency in this memory, or None if no child is found, and whether the result is certain. Of
        several children it takes the first in token order. The search stops after COVERING_TRIED children that the
        memory does not hold. There may be thousands, because `partial` may be one token that many children begin with.
        """
        keys = _first_keys(node).get(partial[:TOKEN_BYTES], [])
        place = bisect_left(keys, partial)
        for key in keys[place : place + COVERING_TRIED]:
            if not key.startswith(partial):
                return None, True
            if (residency := node.children[key].residencies.get(index)) is not None:
                return residency, True
        return None, place + COVERING_TRIED >= len(keys)

    def grow_partial_block(self, parent: PrefixNode, key: bytes) -> PartialBlock:
        """Like `grow`, for less than a block."""
        if not parent.children:
            parent.children = {}
        partial = parent.children[key] = PartialBlock(parent, key, parent.end + 1)
        parent.num_partial_blocks += 1
        if parent.first_keys is not None:
            insort(parent.first_keys.setdefault(key[:TOKEN_BYTES], []), key)
        return partial

    def grow(self, parent: PrefixNode, key: bytes) -> PrefixNode:
        """Adds a child to `parent`. No memory holds it yet, and no child with the same first block may exist."""
        block_bytes = self.block_bytes
        first = key[:block_bytes]
        if not parent.children:
            parent.children = {}
        node = parent.children[first] = PrefixNode(parent, key, parent.end + len(key) // block_bytes)
        if parent.first_keys is not None:
            insort(parent.first_keys.setdefault(first[:TOKEN_BYTES], []), first)
        point = parent.points.get(parent.end) if parent.points else None
        if point is not None:
            self.stale.update(point.drop(first))
        return node

    def can_be_copied(self, node: PrefixNode) -> None:
        """From now on, a sequence may copy the beginning of one of the node's blocks. Marks a subscription stale if its
        next tokens have more in common with one of these blocks than with any earlier block."""
        parent = node.parent
        assert parent is not None
        if not self.partial_reuse or not (parent.points or node.points):
            return
        block_bytes = self.block_bytes
        if parent.points and (point := parent.points.get(parent.end)) is not None:
            first = node.key[:block_bytes]
            if nearest := point.drop_nearest(first, _most_in_common(parent, first)):
                self.stale.update(nearest)
        for depth, point in list((node.points or {}).items()):
            if depth < node.end:
                begin = (depth - node.start) * block_bytes
                self.stale.update(point.drop_nearest(node.key[begin : begin + block_bytes], 0))

    def split(self, node: PrefixNode, depth: int) -> PrefixNode:
        """Splits a node in two at a depth within it, and returns the front part.

        The node itself becomes the back part, so a sequence with a path that ends there keeps its node.
        """
        parent = node.parent
        assert parent is not None
        num_blocks = depth - parent.end
        assert 0 < num_blocks < node.end - parent.end, "a node is split within it"
        cut, block_bytes = num_blocks * self.block_bytes, self.block_bytes
        front = PrefixNode(parent, node.key[:cut], depth)
        front.path_hash = front_hash(node, cut)
        parent.children[node.key[:block_bytes]] = front
        node.key, node.parent, node.start = node.key[cut:], front, depth
        front.children = {node.key[:block_bytes]: node}
        for index, residency in node.residencies.items():
            front.residencies[index] = residency.split(front, num_blocks)
        if node.prefix_ids is not None:
            front.prefix_ids, node.prefix_ids = node.prefix_ids[:num_blocks], node.prefix_ids[num_blocks:]
        if node.points:
            for point in [point for at, point in node.points.items() if at <= depth]:
                point.move(front)
        return front

    def absorb(self, node: PrefixNode, child: PrefixNode) -> None:
        """Undoes a split: the node takes over its only child. Both must be held by the same memories."""
        node.key += child.key
        node.end = child.end
        node.children, node.first_keys, node.num_partial_blocks = (
            child.children,
            child.first_keys,
            child.num_partial_blocks,
        )
        for below in node.children.values():
            below.parent = node
        for index, residency in node.residencies.items():
            other = child.residencies[index]
            residency.blocks, residency.num_children = residency.blocks + other.blocks, other.num_children
            residency.claims = other.claims
            if other.owner is not None and other.owner.is_retained(other):
                other.owner.absorb(residency, other)
        ids = node.prefix_ids, child.prefix_ids
        node.path_hash = child.path_hash
        node.prefix_ids = ids[0] + ids[1] if ids[0] is not None and ids[1] is not None else None
        for point in list((child.points or {}).values()):
            point.move(node)
        child.residencies = {}

    def remove(self, node: PrefixNode) -> None:
        """Removes a node that no memory holds."""
        parent = node.parent
        assert parent is not None
        assert not node.children, "a node without holders has no children"
        first = node.key[: self.block_bytes]
        del parent.children[first]
        if parent.num_partial_blocks:
            parent.num_partial_blocks -= isinstance(node, PartialBlock)
        if parent.first_keys is not None:
            keys = parent.first_keys[first[:TOKEN_BYTES]]
            del keys[bisect_left(keys, first)]
            if not keys:
                del parent.first_keys[first[:TOKEN_BYTES]]
        if node.points:
            for point in node.points.values():
                self.stale.update(point.drop_all())
            node.points = None
        if parent.parent is None:
            assert isinstance(parent, Root)
            self._forget_empty(parent)

    def cut(self, node: PrefixNode, depth: int) -> PrefixNode:
        """Returns the node on the path to this one that ends at `depth`. Splits a node if none ends there."""
        while node.start >= depth and node.parent is not None:
            node = node.parent
        return node if node.end == depth else self.split(node, depth)

    # ------------------------------------------------------------------------------------------- subscriptions

    def subscribe(self, subscription: PrefixSubscription) -> None:
        """Gives a waiting sequence its root in this tree. Its match is unknown until the first refresh."""
        subscription.root = subscription.node = self.acquire_root(subscription.namespace)
        self.stale[subscription.sequence_id] = subscription

    def refresh(self, subscription: PrefixSubscription) -> None:
        """Finds the end of the match again, starting from its last known end, and subscribes to it."""
        self.unsubscribe(subscription)
        node, depth = subscription.node, subscription.depth
        while node.parent is not None and (not node.residencies or depth <= node.start):
            node, depth = node.parent, min(depth, node.start)
        subscription.node, subscription.depth = node, depth = self.walk(
            subscription.token_ids, node, min(depth, node.end)
        )
        subscription.wanted = self.next_tokens(subscription.token_ids, depth)
        point = node.points.get(depth) if node.points else None
        subscription.point = point or SubscriptionPoint(node, depth)
        subscription.point.join(subscription)

    def unsubscribe(self, subscription: PrefixSubscription) -> None:
        """Ends the subscription: the sequence no longer waits, or a refresh follows."""
        self.stale.pop(subscription.sequence_id, None)
        if subscription.point is not None:
            subscription.point.leave(subscription)


def _first_keys(node: PrefixNode) -> dict[bytes, list[bytes]]:
    if node.first_keys is None:
        node.first_keys = {}
        for key in node.children:
            insort(node.first_keys.setdefault(key[:TOKEN_BYTES], []), key)
    return node.first_keys


def _most_in_common(node: PrefixNode, key: bytes) -> int:
    """Returns how many tokens `key`, the first block of a child, has in common with the most similar written sibling.
    Compares only the nearest siblings in token order."""
    keys, most = _first_keys(node)[key[:TOKEN_BYTES]], 0
    place = bisect_left(keys, key)
    for side in (keys[place + 1 : place + 1 + NEAREST_TRIED], keys[max(0, place - NEAREST_TRIED) : place][::-1]):
        for other in side:
            if not all(residency.unwritten for residency in node.children[other].residencies.values()):
                most = max(most, common_tokens(other, key))
                break
    return most
