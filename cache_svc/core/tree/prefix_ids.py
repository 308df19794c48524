"""Ids of prefixes: blake2b chains, the same in all processes.

An id stands for the namespace and all tokens up to the end of its block. The tree's nodes keep them, so each block is
hashed once, which takes about 1 us.
"""

from __future__ import annotations

import sys
from array import array
from hashlib import blake2b

from cache_svc.core.tree.nodes import Namespace, PrefixNode, Root

ID_BYTES = 8


def prefix_ids(node: PrefixNode, block_bytes: int) -> array[int]:
    """Returns the ids of the node's blocks. Computes and stores those that are missing, here and above."""
    ids = prefix_ids_within(node, block_bytes, sys.maxsize)
    assert ids is not None
    return ids


def prefix_ids_within(node: PrefixNode, block_bytes: int, max_blocks: int) -> array[int] | None:
    """The same, but computes the ids of about `max_blocks` blocks at most, from the root on. None if more are missing:
    the next call goes on."""
    above = node
    missing = []
    while above.prefix_ids is None and above.parent is not None:
        missing.append(above)
        above = above.parent
    ids = above.prefix_ids
    if ids is None:
        ids = above.prefix_ids = array("Q", [namespace_id(namespace_of(above))])
    for below in reversed(missing):
        if max_blocks <= 0:
            return None
        ids = below.prefix_ids = chain(ids[-1], below.key, block_bytes)
        max_blocks -= len(ids)
    return ids


def namespace_id(namespace: Namespace) -> int:
    """The parent id of the first blocks of the namespace's sequences."""
    named = b"".join(name.encode() + b"\0" for name in namespace)
    return int.from_bytes(blake2b(named, digest_size=ID_BYTES).digest(), "little")


def chain(parent_id: int, tokens: bytes, block_bytes: int) -> array[int]:
    """The ids of consecutive blocks. `parent_id`: of the block before them, or of the namespace."""
    ids = array("Q")
    digest = parent_id.to_bytes(ID_BYTES, "little")
    for begin in range(0, len(tokens), block_bytes):
        digest = blake2b(digest + tokens[begin : begin + block_bytes], digest_size=ID_BYTES).digest()
        ids.append(int.from_bytes(digest, "little"))
    return ids


def namespace_of(node: PrefixNode) -> Namespace:
    """The namespace of the tree that has the node."""
    while node.parent is not None:
        node = node.parent
    assert isinstance(node, Root)
    assert node.namespace is not None, "blocks of private trees have no ids"
    return node.namespace
