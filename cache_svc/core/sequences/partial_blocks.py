"""The last block of a sequence that ends, kept though it is not full: reuse loses nothing to block size.

A tail (tree.Tail) is evictable content like any other, found by `PrefixTree.nearest` and copied, never by a walk.
It hangs where the whole blocks of its sequence end; it falls out of use before they do, so it is evicted before them.
No memory holds a tail of which another block there has all tokens: such a one is not kept, or is dropped when the other
is stored (Memory.hold); nor one of which too many blocks would have to be looked at to know (PrefixTree.covering). What
is evicted goes to the host as any block does, and is found and copied from there.
"""

from __future__ import annotations

import sys

from cache_svc.core.memory.memory import Memory
from cache_svc.core.packing import TOKEN_BYTES
from cache_svc.core.sequences.sequence import Sequence
from cache_svc.core.tree.nodes import BlockResidency, PartialBlock, PrefixNode

FEW = 8  # so many children are looked at one by one


def keep_partial_block(device: Memory, sequence: Sequence) -> bool:
    """Whether the block behind the sequence's whole ones, in which computed tokens end, is the cache's from now on. The
    sequence is about to leave, and still uses its path."""
    tree, node = device.tree, sequence.node
    begin, end = node.end * tree.block_size, sequence.num_computed_tokens
    if not begin < end < begin + tree.block_size or end <= sequence.num_begun_tokens:
        return False
    key = sequence.tokens[begin * TOKEN_BYTES : end * TOKEN_BYTES]
    if _has_relatives(node, key):
        covering, is_known = tree.covering(node, key, device.index)
        if not is_known:
            return False
        if covering is not None:
            if isinstance(covering.node, PartialBlock):
                device.use(covering, sequence.metadata.priority)
                _leave(device, covering, sequence)
            return False
        device.drop_covered(key, node)
    partial: PrefixNode = node.children.get(key) or tree.grow_partial_block(
        node, key
    )  # it is there if another memory holds it
    device.hold(partial, sequence.table[node.end : node.end + 1], sequence.metadata.priority)
    if node.points:
        tree.can_be_copied(partial)
    _leave(device, partial.residencies[device.index], sequence)
    return True


def _has_relatives(node: PrefixNode, key: bytes) -> bool:
    """Whether there may be a child that begins with these tokens, or with which they begin."""
    children = node.children
    return len(children) > FEW or any(key.startswith(other) or other.startswith(key) for other in children)


def _leave(device: Memory, residency: BlockResidency, sequence: Sequence) -> None:
    """The sequence uses it no more, and nobody else did."""
    metadata = sequence.metadata
    for one in metadata.retention:
        if one.start <= residency.node.start * device.tree.block_size < (one.end or sys.maxsize):
            turn = None  # that of the block before it, so that it falls back first
            if (before := sequence.node.residencies.get(device.index)) is not None and before.retention == one.priority:
                turn = before.owner_key[1]
            device.set_retention(residency, one.priority, one.duration_ms, metadata.tenant, turn)
            device.enforce_shares(metadata.tenant)
    residency.users = 0
    device.cached_blocks += 1
    device.queue.add(residency)
