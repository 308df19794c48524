"""Remembers which prefixes were evicted lately, so that the cache can explain a miss.

An entry is the run of tokens of one evicted node. The key of an entry is the hash of the path before the run, and the
first block of the run.

The hash of a path is computed from its tokens as one large number, modulo 2^61 - 1, so it does not depend on how the
path is split into nodes. Each node keeps the hash of the path up to its end. When a node is split, the hash of the
front part follows from the hash of the node (`front_hash`). So a long run is hashed once, even if it is evicted block
by block: an evicted block costs about 0.1 us. If two paths have the same hash, an explanation is wrong, nothing else.

Most prompts continue with a block that was not evicted. A set of the first blocks of all runs shows this, so that the
path need not be hashed.
"""

from __future__ import annotations

from cache_svc.core.packing import TOKEN_BYTES, common_tokens
from cache_svc.core.tree.nodes import PartialBlock, PrefixNode, Root

# Entries are kept in two generations. The older generation is forgotten when the newer one has GENERATION_BYTES of
# tokens, or MAX_ENTRIES entries. An entry takes some 290 bytes besides its tokens.
GENERATION_BYTES, MAX_ENTRIES = 2**22, 2**16
_BITS = 61
_MODULUS = (1 << _BITS) - 1  # that of Python's hash of an integer


class EvictedPrefixes:
    """The runs that were evicted last, in two generations."""

    __slots__ = ("_block_bytes", "_firsts", "_newer", "_num_bytes", "_older", "_older_firsts")

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self.clear()

    def clear(self) -> None:
        """Forgets all entries."""
        self._newer: dict[tuple[int, bytes], bytes] = {}
        self._older: dict[tuple[int, bytes], bytes] = {}
        self._firsts: set[bytes] = set()  # the first blocks of the newer entries
        self._older_firsts: set[bytes] = set()
        self._num_bytes = 0  # the tokens of the newer entries

    def __len__(self) -> int:
        return len(self._newer) + len(self._older)

    def add(self, node: PrefixNode) -> None:
        """The tree is about to lose the node, because the last memory that held it has evicted it. Partial blocks are
        not remembered."""
        if isinstance(node, PartialBlock):
            return
        key, parent = node.key, node.parent
        assert parent is not None
        before, first = parent.path_hash, key[: self._block_bytes]
        self._newer[path_hash(parent) if before is None else before, first] = key
        self._firsts.add(first)
        self._num_bytes += len(key)
        if self._num_bytes >= GENERATION_BYTES or len(self._newer) >= MAX_ENTRIES:
            self._older, self._older_firsts = self._newer, self._firsts
            self._newer, self._firsts, self._num_bytes = {}, set(), 0

    def count(self, node: PrefixNode, token_ids: bytes, num_skipped: int, end: int) -> int:
        """How many consecutive blocks of a sequence were evicted. The sequence begins with the path to the node.

        The count begins `num_skipped` blocks after the end of the node, and stops before block `end`.
        """
        size = self._block_bytes
        begin = node.end * size
        at = begin + num_skipped * size
        first = token_ids[at : at + size]
        if at >= end * size or not (first in self._firsts or first in self._older_firsts):
            return 0
        hashed = _extended(path_hash(node), token_ids[begin:at])
        while at < end * size:
            key = hashed, token_ids[at : at + size]
            run = self._newer.get(key) or self._older.get(key)
            if run is None:
                break
            if at + len(run) >= end * size or not token_ids.startswith(run, at):  # the last run
                same = common_tokens(run, token_ids[at : min(at + len(run), end * size)])
                at += same * TOKEN_BYTES // size * size
                break
            at += len(run)
            hashed = _extended(hashed, run)
        return at // size - node.end - num_skipped


def path_hash(node: PrefixNode) -> int:
    """The hash of the namespace and all tokens up to the end of the node."""
    missing = []
    while node.path_hash is None and node.parent is not None:
        missing.append(node)
        node = node.parent
    hashed = node.path_hash
    if hashed is None:
        assert isinstance(node, Root)
        hashed = node.path_hash = hash(node.namespace) % _MODULUS
    for below in reversed(missing):
        hashed = below.path_hash = _extended(hashed, below.key)
    return hashed


def front_hash(node: PrefixNode, num_front_bytes: int) -> int | None:
    """The hash of the path up to a place within the node, without reading the tokens before the place.

    None if the node's own hash is not known, or if hashing the tokens before the place costs less.
    """
    key, hashed = node.key, node.path_hash
    if hashed is None or 2 * num_front_bytes < len(key):
        return None
    back = key[num_front_bytes:]
    # The reverse of _extended: to shift by `shift` bits less is to shift by _BITS - shift bits more.
    rest = (hashed - hash(int.from_bytes(back, "big"))) % _MODULUS
    return (rest << (_BITS - 8 * len(back) % _BITS)) % _MODULUS


def _extended(hashed: int, tokens: bytes) -> int:
    """The hash of a path with more tokens. 2^61 is 1 modulo 2^61 - 1, so a shift is by less than 61 bits."""
    shift = 8 * len(tokens) % _BITS
    return ((hashed << shift) + hash(int.from_bytes(tokens, "big"))) % _MODULUS
