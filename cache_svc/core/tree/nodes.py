"""The data of the prefix tree: nodes, which memories hold them, and the subscriptions of waiting sequences."""

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

RetentionKey = tuple[
    int, int, int, int
]  # retention, turn, what ends deeper first; and the serial, of tails of one node
NO_KEY = (0, 0, 0, 0)
NO_CHILDREN: Any = MappingProxyType({})  # most nodes are leaves: a dict for each would be memory to fetch and to free


class RetentionOwner(Protocol):
    """A tenant that a memory retains nodes for (memory/shares.py)."""

    name: str

    def is_retained(self, residency: BlockResidency) -> bool: ...

    def add_front(self, front: BlockResidency, back: BlockResidency) -> None: ...

    def absorb(self, residency: BlockResidency, below: BlockResidency) -> None: ...

    def release(self, residency: BlockResidency) -> None: ...


class BlockResidency:
    """A node in one memory: `blocks[i]` there has the KV of the node's block i."""

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
        "turn",
        "unwritten",
        "users",
    )

    def __init__(self, node: PrefixNode, blocks: array[int], serial: int) -> None:
        self.node = node
        self.blocks = blocks
        self.users = 1  # sequences that run with it
        self.unwritten = False  # who is to write it has a place in a step, and the step has not been sent
        self.num_children = 0  # of the node, in the same memory
        # What says when it is evicted (eviction.py).
        self.serial = serial  # counts up with what the memory stores
        self.num_reuses = 0  # by sequences that were admitted since it was stored
        self.priority = 0.0  # the highest of the requests that used it
        self.retention = DEFAULT_RETENTION
        self.duration_ms = 0  # that the retention lasts from the last use on; 0: for ever
        self.expires_ms = 0
        # The tenant that it is retained for, and the tenants that pay for it (shares.py).
        self.owner: RetentionOwner | None = None
        self.owner_key: RetentionKey = NO_KEY
        self.claims: dict[RetentionOwner, int] | None = None
        self.turn = 0  # counts up with what falls out of use
        self.bucket: EvictionBucket | None = None  # in which it stands

    def split(self, front: PrefixNode, num_blocks: int) -> BlockResidency:
        """Its first blocks as a holding of `front`, which is its node's parent now; it keeps the others."""
        residency = BlockResidency(front, self.blocks[:num_blocks], self.serial)
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
    """What is equal to the strategy, least recently used first. (A linked list in C; a plain dict finds its oldest key
    by a scan over everything deleted before it.)"""

    def __init__(self, key: tuple[int, float]) -> None:
        super().__init__()
        self.key = key  # retention, and the strategy's rank


class PrefixNode:
    """Places in the tree are counted in blocks from the root: this node's blocks are start ... end - 1."""

    __slots__ = (
        "children",
        "end",
        "first_keys",
        "key",
        "num_partial_blocks",
        "parent",
        "points",
        "prefix_ids",
        "residencies",
        "start",
    )

    def __init__(self, parent: PrefixNode | None, key: bytes, end: int) -> None:
        self.parent = parent
        self.key = key
        # Known here, as the parent may grow once this one has left the tree.
        self.start: int = parent.end if parent is not None else end
        self.end: int = end
        # By the tokens of their first block (a tail: by all it has).
        self.children: dict[bytes, PrefixNode] = NO_CHILDREN
        self.num_partial_blocks = 0  # of the children
        # The keys of children that begin with a token, sorted; once somebody has asked.
        self.first_keys: dict[bytes, list[bytes]] | None = None
        self.residencies: dict[int, BlockResidency] = {}  # by memory index
        self.points: dict[int, SubscriptionPoint] | None = (
            None  # waiting sequences whose match ends in this node, by where
        )
        self.prefix_ids: array[int] | None = None  # of its blocks, once somebody has asked (events.py)


class PartialBlock(PrefixNode):
    """The block that a sequence had begun when it ended: fewer tokens than a block has. No walk gets here, as no whole
    block has its key, so it is a leaf. It is found as the beginning of any other block is (`nearest`), to be copied."""

    __slots__ = ()


class Namespace(NamedTuple):
    """What sequences must have in common, besides equal tokens, to share KV."""

    model: str = ""
    lora: str = ""
    cache_salt: str = ""


class Root(PrefixNode):
    """Of the tree of one namespace; or (None) of one that nobody else finds."""

    __slots__ = ("namespace", "users")

    def __init__(self, namespace: Namespace | None) -> None:
        super().__init__(None, b"", 0)
        self.namespace = namespace
        self.users = 0  # sequences of the namespace, waiting, running or swapped out


class SubscriptionPoint:
    """One place of the tree, and who waits there: by the tokens that come next, as many as a block has, or fewer if a
    match can have no more; and by id."""

    __slots__ = ("_in_order", "depth", "node", "waiting")

    def __init__(self, node: PrefixNode, depth: int) -> None:
        self.node = node
        self.depth = depth
        self.waiting: dict[bytes, dict[int, PrefixSubscription]] = {}
        self._in_order: list[bytes] | None = None  # what is waited for; once a block was stored behind here
        if node.points is None:
            node.points = {}
        node.points[depth] = self

    def move(self, node: PrefixNode) -> None:
        """The place belongs to another node now."""
        self._unhook()
        self.node = node
        if node.points is None:
            node.points = {}
        node.points[self.depth] = self

    def join(self, subscription: PrefixSubscription) -> None:
        group = self.waiting.get(subscription.wanted)
        if group is None:
            group = self.waiting[subscription.wanted] = {}
            if self._in_order is not None:
                insort(self._in_order, subscription.wanted)
        group[subscription.sequence_id] = subscription

    def leave(self, subscription: PrefixSubscription) -> None:
        group = self.waiting[subscription.wanted]
        del group[subscription.sequence_id]
        if not group:
            self._drop_group(subscription.wanted)

    def drop(self, wanted: bytes) -> dict[int, PrefixSubscription]:
        """Nobody waits here for that block any more; returns those who did."""
        return self._drop_group(wanted) if wanted in self.waiting else {}

    def drop_nearest(self, key: bytes, num_known: int) -> dict[int, PrefixSubscription]:
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
        nearest: dict[int, PrefixSubscription] = {}
        for wanted in in_order[begin:end]:
            nearest |= self._drop_group(wanted)
        return nearest

    def drop_all(self) -> dict[int, PrefixSubscription]:
        """The place is gone; returns everybody."""
        everybody: dict[int, PrefixSubscription] = {}
        for group in self.waiting.values():
            everybody |= group
        self.waiting, self._in_order = {}, None
        for subscription in everybody.values():
            subscription.point = None
        return everybody

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
    """`node` and `depth` are where its match ended when it was last looked at: the longest stored prefix, on whichever
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

    root: Root  # these two as long as there is a tree
    node: PrefixNode

    def __init__(self, sequence_id: int, token_ids: bytes, namespace: Namespace, metadata: RequestMetadata) -> None:
        self.sequence_id = sequence_id
        self.token_ids = token_ids
        self.namespace = namespace
        self.metadata = metadata
        self.depth = 0
        self.point: SubscriptionPoint | None = None
        self.wanted = b""
        self.reported: list[tuple[int, int, int, int]] = []  # what the scheduler knows (matching.py)

    def place(self) -> tuple[PrefixNode, int]:
        """Where its match ends, of one that is settled."""
        assert self.point is not None
        return self.point.node, self.depth


def subtree(*roots: PrefixNode) -> Iterator[PrefixNode]:
    """Every node below these, parents before children."""
    stack = [node for root in roots for node in root.children.values()]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
