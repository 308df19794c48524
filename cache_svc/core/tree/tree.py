"""The prefix tree: which tokens are stored where. A radix tree over whole blocks, one for all workers.

A node is a run of whole blocks of tokens that come after everything on the way from the root to it. Its key is these
very tokens, and a child is found by the tokens of its first block, so equal hashes cannot serve wrong KV. Runs are cut
(`split`) where sequences part, and where what is known of them differs, so that everything about a node holds for all
of it: a memory (memory.py) holds a whole node or nothing of it, and who uses a node uses all of it.

Two facts carry everything here. For any one memory, going down a path,

  * nodes it holds come first, nodes it does not hold come after;
  * of these, nodes in use come first, nodes only cached come after.

The first holds because a sequence commits its blocks from the first on, and because eviction takes leaves before their
parents (shown in memory.py). The second because a sequence that uses a node uses all nodes above it. Hence one walk
down by tokens, the same for all workers, and then one way up that meets each worker's depth. And a node that loses its
last holder has no children left: it is unhooked at once, and nothing has to be swept.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from cache_svc.core.packing import TOKEN_BYTES, common_tokens
from cache_svc.core.tree.nodes import (
    BlockResidency,
    Namespace,
    PartialBlock,
    PrefixNode,
    PrefixSubscription,
    Root,
    SubscriptionPoint,
)

# Longer runs become several nodes: to split one costs a copy of it.
MAX_NODE_TOKENS = 2048
NEAREST_TRIED = 8
COVERING_TRIED = 64


class PrefixTree:
    """Blocks of `block_size` tokens each; a tree for each namespace, so that no walk gets from one into another."""

    __slots__ = ("block_bytes", "block_size", "max_node_blocks", "partial_reuse", "roots", "stale")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.block_bytes = block_size * TOKEN_BYTES
        self.max_node_blocks = max(1, MAX_NODE_TOKENS // block_size)
        self.roots: dict[Namespace, Root] = {}
        self.partial_reuse = False  # whether any worker copies what a block begins with
        self.stale: dict[int, PrefixSubscription] = {}  # waiting sequences whose match has changed, by id

    def enter(self, namespace: Namespace) -> Root:
        """Where the walks of one more sequence begin."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Root(namespace)
        root.users += 1
        return root

    def leave(self, root: Root) -> None:
        """The sequence has ended. A namespace with no sequences and nothing stored is forgotten."""
        root.users -= 1
        self._forget_empty(root)

    def _forget_empty(self, root: Root) -> None:
        if not (root.users or root.children) and root.namespace is not None:
            del self.roots[root.namespace]

    def max_match(self, token_ids: bytes) -> int:
        """Blocks that a match may have: never the one with the last token, as a model needs one to compute."""
        return (len(token_ids) // TOKEN_BYTES - 1) // self.block_size

    def next_tokens(self, token_ids: bytes, depth: int) -> bytes:
        """Of that block, the tokens that a match may have: all but the last one of the sequence."""
        begin = depth * self.block_bytes
        return token_ids[begin : min(begin + self.block_bytes, len(token_ids) - TOKEN_BYTES)]

    def walk(self, token_ids: bytes, node: PrefixNode, depth: int) -> tuple[PrefixNode, int]:
        """Where the longest stored prefix ends, on whichever worker: a node, and how many blocks from the root.

        `node` and `depth` are a place on the way to it: a root and 0, or one that an earlier walk found.
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
        """How many blocks of the tokens the tree has along this node (of which the parent's path has all), up to
        the node's end or the limit."""
        block_bytes, start = self.block_bytes, node.start
        begin = start * block_bytes
        if node.end <= limit and token_ids.startswith(node.key, begin):
            return node.end
        key = memoryview(node.key)
        low, high = 0, min(node.end, limit) - start
        while low < high:  # blocks 0 ... low - 1 are equal, block `high` is not
            middle = (low + high + 1) // 2
            at = begin + low * block_bytes
            if token_ids.startswith(key[low * block_bytes : middle * block_bytes], at):
                low = middle
            else:
                high = middle - 1
        return start + low

    def nearest(self, node: PrefixNode, depth: int, token_ids: bytes, index: int) -> tuple[int, int]:
        """Behind a match of `depth` blocks that ends in `node`: the block of a memory that begins with the most tokens
        that come next in the sequence (0: none does), and how many; never the last token.

        Of children in order of their tokens the neighbours of the sequence's own share the most with it. The search is
        given up, on each side, behind NEAREST_TRIED of them that the memory does not hold.
        """
        block_bytes, rest = self.block_bytes, self.next_tokens(token_ids, depth)
        if not rest:
            return 0, 0
        if depth < node.end:
            at = depth - node.start
            common = common_tokens(node.key[at * block_bytes : (at + 1) * block_bytes], rest)
            residency = node.residencies.get(index)
            if common and residency is not None and not residency.unwritten:
                return residency.blocks[at], common
            return 0, 0
        keys = _first_keys(node).get(rest[:TOKEN_BYTES])
        if keys is None:  # as mostly
            return 0, 0
        place, best = bisect_left(keys, rest), (0, 0)
        for side in (keys[place : place + NEAREST_TRIED], keys[max(0, place - NEAREST_TRIED) : place][::-1]):
            for key in side:
                common = common_tokens(key, rest)
                if common <= best[1]:
                    break
                held = node.children[key].residencies.get(index)
                if held is not None and not held.unwritten:  # a copy is made before the step writes anything
                    best = held.blocks[0], common
                    break
        return best

    def covering(self, node: PrefixNode, partial: bytes, index: int) -> tuple[BlockResidency | None, bool]:
        """What a memory holds of the node's children that begin with all these tokens: the first in order of tokens.
        And whether that is known: the search is given up behind COVERING_TRIED that the memory does not hold, for there
        may be thousands (all that begins as a prompt of one token does)."""
        keys = _first_keys(node).get(partial[:TOKEN_BYTES], [])
        place = bisect_left(keys, partial)
        for key in keys[place : place + COVERING_TRIED]:
            if not key.startswith(partial):
                return None, True
            if (residency := node.children[key].residencies.get(index)) is not None:
                return residency, True
        return None, place + COVERING_TRIED >= len(keys)

    def grow_partial_block(self, parent: PrefixNode, key: bytes) -> PartialBlock:
        """As `grow`, of less than a block."""
        if not parent.children:
            parent.children = {}
        partial = parent.children[key] = PartialBlock(parent, key, parent.end + 1)
        parent.num_partial_blocks += 1
        if parent.first_keys is not None:
            insort(parent.first_keys.setdefault(key[:TOKEN_BYTES], []), key)
        return partial

    def grow(self, parent: PrefixNode, key: bytes) -> PrefixNode:
        """A child of `parent` that was not there. It is held by nobody yet."""
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
        """From now on: whoever waits and could use the beginning of a block, where he had less of it, is stale."""
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
        """Cut a node in two at a place within it; returns the front part. The node itself becomes the back part, so
        that whoever uses both keeps what he has."""
        parent = node.parent
        assert parent is not None
        num_blocks = depth - parent.end
        assert 0 < num_blocks < node.end - parent.end, "a node is split within it"
        cut, block_bytes = num_blocks * self.block_bytes, self.block_bytes
        front = PrefixNode(parent, node.key[:cut], depth)
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
        """Undo a split: the node's only child, which the same memories hold, becomes a part of it."""
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
        node.prefix_ids = ids[0] + ids[1] if ids[0] is not None and ids[1] is not None else None
        for point in list((child.points or {}).values()):
            point.move(node)
        child.residencies = {}

    def remove(self, node: PrefixNode) -> None:
        """A node that nobody holds any more leaves the tree."""
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
        """The node on the way to this one that ends there; it is made if there is none."""
        while node.start >= depth and node.parent is not None:
            node = node.parent
        return node if node.end == depth else self.split(node, depth)

    # ------------------------------------------------------------------------------------------- subscriptions

    def subscribe(self, subscription: PrefixSubscription) -> None:
        """There is a (new) tree."""
        subscription.root = subscription.node = self.enter(subscription.namespace)
        self.stale[subscription.sequence_id] = subscription

    def refresh(self, subscription: PrefixSubscription) -> None:
        """Find the place in the tree anew, from the present one."""
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
        """Watch nothing: it waits no more, or is about to be settled anew."""
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
    """How many tokens a child's first block shares with the nearest others that are written."""
    keys, most = _first_keys(node)[key[:TOKEN_BYTES]], 0
    place = bisect_left(keys, key)
    for side in (keys[place + 1 : place + 1 + NEAREST_TRIED], keys[max(0, place - NEAREST_TRIED) : place][::-1]):
        for other in side:
            if not all(residency.unwritten for residency in node.children[other].residencies.values()):
                most = max(most, common_tokens(other, key))
                break
    return most
