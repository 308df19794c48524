"""The data of the prefix tree: nodes, the memories that hold them, and the subscriptions of waiting sequences.

A waiting sequence subscribes to the place in the tree where its match ends. The tree marks the subscription stale when:

  * the next block of the sequence is stored at this place;
  * a block appears there that has more tokens in common with the next block than any earlier block there;
  * the node of this place leaves the tree.

Marking a subscription stale does no other work. `PrefixTree.refresh` finds the new place later. It starts from the old
place, not from the root.

A subscription that is not stale knows how many whole blocks the longest match on any worker has. With partial reuse the
match may have more tokens than these blocks, and the subscription does not know how many. It does not notice these
changes:

  * another worker begins to hold the node, or a worker ceases to hold it;
  * the node gets its first user, or loses its last one;
  * the node moves between device and host;
  * the sequence would copy a part of a block, and this block is evicted.

A RematchOp reports them. It looks at the holders of the nodes from the place up to the root. It compares tokens only
for partial reuse.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from cache_svc.core.packing import common_tokens
from cache_svc.core.request_metadata import RequestMetadata
from cache_svc.core.retention import DEFAULT_RETENTION

RetentionKey = tuple[int, int, int, int]  # retention, turn of RetentionShares, minus the node's end, serial number
NO_KEY = (0, 0, 0, 0)
NO_CHILDREN: Any = MappingProxyType({})  # most nodes are leaves: an empty dict for each of them costs memory and time


class RetentionOwner(Protocol):
    """A tenant for which a memory retains nodes. `memory.shares.TenantShare` implements it."""

    name: str

    def is_retained(self, residency: BlockResidency) -> bool:
        """Whether the tenant retains the residency."""

    def add_front(self, front: BlockResidency, back: BlockResidency) -> None:
        """A retained residency was split: `front` is retained like `back`."""

    def absorb(self, residency: BlockResidency, below: BlockResidency) -> None:
        """Two residencies were joined: `below` becomes a part of `residency`."""

    def release(self, residency: BlockResidency) -> None:
        """Ends the retention of the residency."""


class BlockResidency:
    """One node in one memory: `blocks[i]` of that memory has the KV of the node's block i."""

    __slots__ = (
        "blocks",
        "bucket",
        "claims",
        "duration_ms",
        "expires_ms",
        "node",
        "num_children",
        "num_reuses",
        "owner",
        "owner_key",
        "priority",
        "retention",
        "serial",
        "stored_ms",
        "turn",
        "unwritten",
        "users",
    )

    def __init__(self, node: PrefixNode, blocks: array[int], serial: int, stored_ms: int) -> None:
        self.node = node
        self.blocks = blocks
        self.users = 1  # running sequences and pins that use the node here
        self.unwritten = False  # True until the step is sent that writes these blocks
        self.num_children = 0  # children of the node that the same memory holds
        self.stored_ms = stored_ms  # the time of the exchange that stored it
        # These fields decide when the node is evicted (memory/eviction.py).
        self.serial = serial  # counts the nodes that the memory has stored
        self.num_reuses = 0  # how often an admitted sequence or a new pin has reused it since it was stored
        self.priority = 0.0  # the highest priority among the requests that used it
        self.retention = DEFAULT_RETENTION
        self.duration_ms = 0  # how long the retention lasts after the last use; 0: for ever
        self.expires_ms = 0
        # The tenant that it is retained for, and the tenants that pay for it (memory/shares.py).
        self.owner: RetentionOwner | None = None
        self.owner_key: RetentionKey = NO_KEY
        self.claims: dict[RetentionOwner, int] | None = None
        self.turn = 0  # its number in the order in which the memory's residencies became unused
        self.bucket: EvictionBucket | None = None  # the bucket of the eviction queue that contains it

    def split(self, front: PrefixNode, num_blocks: int) -> BlockResidency:
        """Returns the residency of `front`, the node's new parent, with the first blocks. This one keeps the rest."""
        residency = BlockResidency(front, self.blocks[:num_blocks], self.serial, self.stored_ms)
        self.blocks = self.blocks[num_blocks:]
        residency.users, residency.num_children, residency.unwritten = self.users, 1, self.unwritten
        residency.num_reuses, residency.priority = self.num_reuses, self.priority
        residency.retention, residency.duration_ms = self.retention, self.duration_ms
        residency.expires_ms, residency.turn = self.expires_ms, self.turn
        if self.claims:
            residency.claims = dict.fromkeys(self.claims, 1)
            if (owner := self.owner) is not None and owner.is_retained(self):
                residency.claims[owner] += 1
                owner.add_front(residency, self)
        return residency


class EvictionBucket(OrderedDict[BlockResidency, None]):
    """Unused residencies of equal retention that the eviction strategy ranks equal, least recently used first.

    An OrderedDict is a linked list in C. A plain dict finds its oldest key by scanning over all deleted ones before it.
    """

    def __init__(self, key: tuple[int, float]) -> None:
        super().__init__()
        self.key = key  # retention priority, and the strategy's rank


class PrefixNode:
    """A run of whole blocks, start ... end - 1, counted from the root."""

    __slots__ = (
        "children",
        "end",
        "first_keys",
        "key",
        "num_partial_blocks",
        "parent",
        "path_hash",
        "points",
        "prefix_ids",
        "residencies",
        "start",
    )

    def __init__(self, parent: PrefixNode | None, key: bytes, end: int) -> None:
        self.parent = parent
        self.key = key
        # A copy of the parent's end, because the parent may grow after this node has left the tree.
        self.start: int = parent.end if parent is not None else end
        self.end: int = end
        # By the tokens of the child's first block. A partial block: by all its tokens.
        self.children: dict[bytes, PrefixNode] = NO_CHILDREN
        self.num_partial_blocks = 0  # how many of the children are partial blocks
        # By first token, the sorted keys of the children that begin with it. None until a search needs it.
        self.first_keys: dict[bytes, list[bytes]] | None = None
        self.residencies: dict[int, BlockResidency] = {}  # by memory index
        self.points: dict[int, SubscriptionPoint] | None = None  # by depth: subscriptions to places in this node
        self.path_hash: int | None = None  # of all tokens up to its end; None until it is needed (evicted.py)
        self.prefix_ids: array[int] | None = None  # one id per block; None until an event needs them (events.py)


class PartialBlock(PrefixNode):
    """The last block of a sequence that has left the device, with fewer tokens than a whole block.

    Its key is shorter than a block, so no walk reaches it, and it is always a leaf. `PrefixTree.nearest` finds it, as
    it finds whole blocks, and a sequence reuses it by copying.
    """

    __slots__ = ()


class Namespace(NamedTuple):
    """Sequences share KV only if these fields are equal, besides their tokens."""

    model: str = ""
    lora: str = ""
    cache_salt: str = ""


class Root(PrefixNode):
    """The root of one namespace's tree. `namespace` None: a private tree, which no walk of another sequence reaches."""

    __slots__ = ("namespace", "users")

    def __init__(self, namespace: Namespace | None) -> None:
        super().__init__(None, b"", 0)
        self.namespace = namespace
        self.users = 0  # sequences of the namespace: waiting, running or swapped out


class SubscriptionPoint:
    """One place in the tree, and the subscriptions to it: by their next tokens, then by sequence id.

    The next tokens of a sequence are those of one block, or fewer at its end. They never include its last token.
    """

    __slots__ = ("_in_order", "depth", "node", "waiting")

    def __init__(self, node: PrefixNode, depth: int) -> None:
        self.node = node
        self.depth = depth
        self.waiting: dict[bytes, dict[int, PrefixSubscription]] = {}
        self._in_order: list[bytes] | None = None  # the keys of `waiting`, sorted; None until drop_nearest needs them
        if node.points is None:
            node.points = {}
        node.points[depth] = self

    def move(self, node: PrefixNode) -> None:
        """The place belongs to another node from now on."""
        self._unhook()
        self.node = node
        if node.points is None:
            node.points = {}
        node.points[self.depth] = self

    def join(self, subscription: PrefixSubscription) -> None:
        """Adds a subscription that waits here for its next block."""
        group = self.waiting.get(subscription.wanted)
        if group is None:
            group = self.waiting[subscription.wanted] = {}
            if self._in_order is not None:
                insort(self._in_order, subscription.wanted)
        group[subscription.sequence_id] = subscription

    def leave(self, subscription: PrefixSubscription) -> None:
        """Removes a subscription. Raises KeyError if it is not here."""
        group = self.waiting[subscription.wanted]
        del group[subscription.sequence_id]
        if not group:
            self._drop_group(subscription.wanted)

    def drop(self, wanted: bytes) -> dict[int, PrefixSubscription]:
        """Removes and returns the subscriptions that wait for exactly this block."""
        return self._drop_group(wanted) if wanted in self.waiting else {}

    def drop_nearest(self, key: bytes, num_known: int) -> dict[int, PrefixSubscription]:
        """Removes and returns the subscriptions that have more than `num_known` next tokens in common with a block.

        In sorted order these are adjacent, so the search looks at no others.
        """
        in_order = self._in_order
        if in_order is None:
            in_order = self._in_order = sorted(self.waiting)
        begin = end = bisect_left(in_order, key)
        while begin and common_tokens(in_order[begin - 1], key) > num_known:
            begin -= 1
        while end < len(in_order) and common_tokens(in_order[end], key) > num_known:
            end += 1
        nearest: dict[int, PrefixSubscription] = {}
        for wanted in in_order[begin:end]:
            nearest |= self._drop_group(wanted)
        return nearest

    def drop_all(self) -> dict[int, PrefixSubscription]:
        """The place is gone: removes and returns all subscriptions."""
        dropped: dict[int, PrefixSubscription] = {}
        for group in self.waiting.values():
            dropped |= group
        self.waiting, self._in_order = {}, None
        for subscription in dropped.values():
            subscription.point = None
        return dropped

    def _drop_group(self, wanted: bytes) -> dict[int, PrefixSubscription]:
        group = self.waiting.pop(wanted)
        if self._in_order is not None:
            del self._in_order[bisect_left(self._in_order, wanted)]
        for subscription in group.values():
            subscription.point = None
        if not self.waiting:
            self._unhook()
        return group

    def _unhook(self) -> None:
        points = self.node.points
        assert points is not None
        del points[self.depth]
        if not points:
            self.node.points = None


class PrefixSubscription:
    """A waiting sequence. `node` and `depth` say where its match ended at the last refresh: the longest prefix on any
    worker."""

    __slots__ = (
        "depth",
        "metadata",
        "namespace",
        "node",
        "point",
        "reported",
        "root",
        "sequence_id",
        "token_ids",
        "wanted",
    )

    root: Root  # `root` and `node` are set while there is a tree
    node: PrefixNode

    def __init__(self, sequence_id: int, token_ids: bytes, namespace: Namespace, metadata: RequestMetadata) -> None:
        self.sequence_id = sequence_id
        self.token_ids = token_ids
        self.namespace = namespace
        self.metadata = metadata
        self.depth = 0
        self.point: SubscriptionPoint | None = None
        self.wanted = b""
        # the matches that the scheduler knows (sequences/matching.py)
        self.reported: list[tuple[int, int, int, int]] = []

    def place(self) -> tuple[PrefixNode, int]:
        """Where the match ends. The subscription must not be stale."""
        assert self.point is not None
        return self.point.node, self.depth


def subtree(*roots: PrefixNode) -> Iterator[PrefixNode]:
    """Yields every node below these, parents before children."""
    stack = [node for root in roots for node in root.children.values()]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
