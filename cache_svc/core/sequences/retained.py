"""Ends the retention of a prefix before its time is over."""

from __future__ import annotations

from collections.abc import Iterable

from cache_svc.core.memory.memory import Memory
from cache_svc.core.packing import TOKEN_BYTES
from cache_svc.core.sequences.worker_blocks import WorkerBlocks
from cache_svc.core.tree.nodes import PartialBlock, PrefixNode, Root
from cache_svc.core.tree.tree import PrefixTree


def end_retention(tree: PrefixTree, workers: Iterable[WorkerBlocks], root: Root, token_ids: bytes, tenant: str) -> None:
    """The blocks of the prefix that are retained for the tenant get the default priority, on all workers and in both
    memories. They count as just used. What another tenant retains stays."""
    # A walk leaves out the last token, which a request computes. Here it belongs to the prefix.
    node, depth = tree.walk(token_ids + bytes(TOKEN_BYTES), root, 0)
    last = tree.cut(node, depth)
    rest = token_ids[depth * tree.block_bytes :]
    partials = [
        child
        for end in range(TOKEN_BYTES, min(len(rest), tree.block_bytes) + 1, TOKEN_BYTES)
        if isinstance(child := last.children.get(rest[:end]), PartialBlock)
    ]
    for worker in workers:
        for memory in (worker.device, worker.host):
            for one in (*partials, *_path(last)):
                _end(memory, one, tenant)


def _path(node: PrefixNode) -> list[PrefixNode]:
    """The node and all nodes above it, without the root."""
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path


def _end(memory: Memory, node: PrefixNode, tenant: str) -> None:
    residency = node.residencies.get(memory.index)
    if residency is None or (owner := residency.owner) is None:
        return
    if owner.name == tenant and owner.is_retained(residency):
        memory.queue.fall_back(residency)
