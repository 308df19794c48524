"""Keeps the last block of a sequence that leaves the device, even if it is not full. So reuse loses no tokens to the
block size.

A partial block (tree.nodes.PartialBlock) is evictable like any other block. `PrefixTree.nearest` finds it, and it is
reused by copying; no walk reaches it. It is a child of the node where the whole blocks of its sequence end. Its last
user leaves it before the whole blocks, so it is evicted before them.

A memory never holds both a partial block and another block that begins with all its tokens. If the memory holds such a
block already, it does not keep the partial block. If it stores such a block later, it drops the partial block
(Memory.hold). It also does not keep a partial block if the search for such a block would cost too much
(PrefixTree.covering). An evicted partial block goes to the host like any block, and is found and copied from there.
"""

from __future__ import annotations

import sys

from cache_svc.core.memory.memory import Memory
from cache_svc.core.packing import TOKEN_BYTES
from cache_svc.core.sequences.sequence import Sequence
from cache_svc.core.tree.nodes import BlockResidency, PartialBlock, PrefixNode

FEW = 8  # up to this number, the children are compared one by one


def keep_partial_block(device: Memory, sequence: Sequence) -> bool:
    """Gives the block with the last computed tokens to the cache, if it is not full. Returns whether the cache took it.

    The sequence is about to leave and still uses its path.
    """
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
    )  # the node exists if another memory holds it
    device.hold(partial, sequence.table[node.end : node.end + 1], sequence.metadata.priority)
    if node.points:
        tree.can_be_copied(partial)
    _leave(device, partial.residencies[device.index], sequence)
    return True


def _has_relatives(node: PrefixNode, key: bytes) -> bool:
    """Whether a child may begin with these tokens, or these tokens may begin with those of a child."""
    children = node.children
    return len(children) > FEW or any(key.startswith(other) or other.startswith(key) for other in children)


def _leave(device: Memory, residency: BlockResidency, sequence: Sequence) -> None:
    """Ends the only use of a partial block."""
    metadata = sequence.metadata
    for one in metadata.retention:
        if one.start <= residency.node.start * device.tree.block_size < (one.end or sys.maxsize):
            device.set_retention(residency, one.priority, one.duration_ms, metadata.tenant)
            device.enforce_shares(metadata.tenant)
    residency.users = 0
    device.cached_blocks += 1
    device.queue.add(residency)
