"""How much of a waiting sequence each worker has."""

from __future__ import annotations

from collections.abc import Iterable

from cache_svc.core.sequences.worker_blocks import WorkerBlocks
from cache_svc.core.tree.nodes import PrefixNode, PrefixSubscription
from cache_svc.core.tree.tree import PrefixTree

# Worker id; tokens on the device; of these, tokens in blocks that running sequences or pins use; then tokens on the
# host.
MatchedTokens = tuple[int, int, int, int]


def matches_of(
    subscription: PrefixSubscription, tree: PrefixTree, workers: Iterable[WorkerBlocks]
) -> list[MatchedTokens]:
    """Returns the matches of all workers that have any. The subscription must not be stale.

    One walk up from the end of the match finds the depth of every worker: a worker's depth is where the walk first
    meets it.
    """
    held: dict[int, tuple[PrefixNode, int]] = {}
    referenced: dict[int, int] = {}
    node, depth = subscription.place()
    while node.parent is not None:
        for index, residency in node.residencies.items():
            if index not in held:
                held[index] = node, depth
            if residency.users and index not in referenced:
                referenced[index] = depth
        node = node.parent
        depth = node.end
    nothing = subscription.root, 0
    block_size = tree.block_size
    matches = []
    for worker in workers:
        index = worker.index
        node, depth = held.get(index, nothing)
        num_tokens, num_host_tokens = depth * block_size, 0
        host_node, host_depth = node, depth
        if worker.host_tier and (behind := held.get(worker.host.index, nothing))[1] > depth:
            host_node, host_depth = behind
            num_host_tokens = (host_depth - depth) * block_size
        if worker.partial_reuse:
            _, num_copied, on_host = worker.nearest(node, depth, host_node, host_depth, subscription.token_ids)
            if on_host:
                num_host_tokens += num_copied
            else:
                num_tokens += num_copied
        if num_tokens or num_host_tokens:
            matches.append((worker.worker_id, num_tokens, referenced.get(index, 0) * block_size, num_host_tokens))
    return matches
