"""The prefix tree: which blocks of tokens are stored on which workers.

One tree for all workers. A node is one whole block of tokens after everything on the way from the root to it, and is
found by the tokens themselves (their bytes are the dictionary key), so equal hashes cannot serve wrong KV.

Two facts carry everything here. For any one worker, going down a path,

  * nodes it holds come first, nodes it does not hold come after     (`holders` only loses bits on the way down);
  * of these, nodes in use come first, nodes only cached come after  (`live` only loses bits on the way down).

The first holds because a sequence commits its blocks from the first on, and because eviction takes leaves before their
parents (shown in worker.py). The second because a sequence that uses a node uses all nodes above it. Hence
one walk down by tokens, the same for all workers, and then each worker's depth by bisection. And a node that loses its
last holder has no children left: it is unhooked at once, and nothing has to be swept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import chain
from operator import attrgetter
from struct import Struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cache_svc.core.waiting import Waiter

TOKEN_BYTES = 4
BLOCKS_PER_CUT = 32


class PrefixNode:
    """One block of tokens at one place of the tree. `holders` and `live` are masks of worker indexes."""

    __slots__ = ("block_of", "children", "holders", "key", "live", "parent", "watchers")

    def __init__(self, parent: PrefixNode | None, key: bytes, block_of: dict[int, int], mask: int) -> None:
        self.parent = parent
        self.key = key
        self.children: dict[bytes, PrefixNode] = {}
        self.block_of = block_of  # worker index -> block id
        self.holders = mask  # the keys of block_of
        self.live = mask  # of these, where the block has a user
        # Waiting sequences whose match ends here, by the key of their next block and their id (see waiting.py).
        self.watchers: dict[bytes, dict[int, Waiter]] | None = None


_holders: Callable[[PrefixNode], int] = attrgetter("holders")
_live: Callable[[PrefixNode], int] = attrgetter("live")


class PrefixTree:
    """A tree of blocks of `block_size` tokens each."""

    __slots__ = ("_cut", "block_bytes", "block_size", "num_nodes", "root", "stale")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.block_bytes = block_size * TOKEN_BYTES
        self.root = PrefixNode(None, b"", {}, 0)
        self.num_nodes = 0  # without the root
        self.stale: dict[int, Waiter] = {}  # waiting sequences whose place has changed, by id
        # Entry n cuts n blocks at once, several times as fast as n slices.
        self._cut = [Struct(f"{self.block_bytes}s" * n) for n in range(BLOCKS_PER_CUT + 1)]

    def walk(self, token_ids: bytes) -> list[PrefixNode]:
        """The nodes of the longest stored prefix of whole blocks, from the root down, on whichever worker.

        Never the block with the last token: a model needs at least one token to compute.
        """
        path: list[PrefixNode] = []
        self.walk_on(token_ids, path)
        return path

    def walk_on(self, token_ids: bytes, path: list[PrefixNode]) -> None:
        """Lengthen a path that is a prefix of the walk to all of it."""
        num_blocks = (len(token_ids) // TOKEN_BYTES - 1) // self.block_size
        children = path[-1].children if path else self.root.children
        if not children:
            return
        for key in self.blocks(token_ids, len(path), num_blocks):
            node = children.get(key)
            if node is None:
                return
            path.append(node)
            children = node.children

    def blocks(self, token_ids: bytes | bytearray, first: int, end: int) -> Iterator[bytes]:
        """The keys of these blocks of a sequence, which has as many. They are cut some at a time: one who stops early
        pays for few."""
        return chain.from_iterable(
            self._cut[min(BLOCKS_PER_CUT, end - start)].unpack_from(token_ids, start * self.block_bytes)
            for start in range(first, end, BLOCKS_PER_CUT)
        )

    def block_at(self, token_ids: bytes, index: int) -> bytes:
        """The key of that block of a sequence; empty if a match cannot reach so far."""
        if index >= (len(token_ids) // TOKEN_BYTES - 1) // self.block_size:
            return b""
        return token_ids[index * self.block_bytes : (index + 1) * self.block_bytes]

    def grow(self, parent: PrefixNode, key: bytes, index: int, block: int) -> PrefixNode:
        """A child of `parent` that was not there, held by the worker of this index and in use."""
        node = parent.children[key] = PrefixNode(parent, key, {index: block}, 1 << index)
        self.num_nodes += 1
        if parent.watchers is not None and (waiting := parent.watchers.pop(key, None)) is not None:
            self.stale.update(waiting)
        return node

    def release(self, node: PrefixNode, index: int) -> None:
        """The worker holds this node no more. A node without holders leaves the tree."""
        del node.block_of[index]
        keep = ~(1 << index)
        node.holders &= keep
        node.live &= keep
        if not node.holders:
            parent = node.parent
            assert parent is not None  # the root is never held
            del parent.children[node.key]
            self.num_nodes -= 1
            if node.watchers is not None:
                for waiting in node.watchers.values():
                    self.stale.update(waiting)
                node.watchers = None

    def nodes(self) -> Iterator[PrefixNode]:
        """Every node but the root, parents before children."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def held_depths(path: list[PrefixNode]) -> dict[int, int]:
    """Worker index -> how many nodes of the path it holds. Workers that hold none are left out."""
    return _depths(path, _holders)


def live_depths(path: list[PrefixNode]) -> dict[int, int]:
    """Worker index -> how many nodes of the path are in use there. Workers with none are left out."""
    return _depths(path, _live)


def held_depth(path: list[PrefixNode], bit: int) -> int:
    """How many nodes of the path the worker of this mask bit holds."""
    if path and path[-1].holders & bit:  # as mostly
        return len(path)
    return bisect_left(path, True, key=lambda node: not node.holders & bit)


def live_depth(path: list[PrefixNode], bit: int) -> int:
    """How many nodes of the path are in use on the worker of this mask bit."""
    if not path or not path[0].live & bit:  # as mostly
        return 0
    return bisect_left(path, True, key=lambda node: not node.live & bit)


def _depths(path: list[PrefixNode], mask_of: Callable[[PrefixNode], int]) -> dict[int, int]:
    """From the far end up: the masks only gain bits, so jump from one change to the next by bisection."""

    def fewness(node: PrefixNode) -> int:
        return -mask_of(node).bit_count()

    depths: dict[int, int] = {}
    answered = 0
    end = len(path)
    while end:
        mask = mask_of(path[end - 1])
        new = mask & ~answered
        while new:
            bit = new & -new
            depths[bit.bit_length() - 1] = end
            new ^= bit
        answered = mask
        if mask_of(path[0]) == mask:
            break
        end = bisect_left(path, -mask.bit_count(), 0, end, key=fewness)
    return depths
