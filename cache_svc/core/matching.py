"""What each worker has of a waiting sequence."""

from __future__ import annotations

from collections.abc import Iterable

from cache_svc.core.tree import PrefixNode, PrefixTree
from cache_svc.core.waiting import Waiter
from cache_svc.core.worker import Worker

# Worker id; tokens on the device; of these, tokens in blocks that live sequences use; tokens behind them on the host.
Match = tuple[int, int, int, int]


def matches_of(waiter: Waiter, tree: PrefixTree, workers: Iterable[Worker]) -> list[Match]:
    """One way up from where the walk ended meets every worker's depth: the first time a worker is met says how far it
    goes. The waiter is settled. Workers that have nothing are left out."""
    held: dict[int, tuple[PrefixNode, int]] = {}
    live: dict[int, int] = {}
    node, depth = waiter.place()
    while node.parent is not None:
        for index, holding in node.holdings.items():
            if index not in held:
                held[index] = node, depth
            if holding.users and index not in live:
                live[index] = depth
        node = node.parent
        depth = node.end
    nothing = waiter.root, 0
    block_size = tree.block_size
    matches = []
    for worker in workers:
        index = worker.index
        node, depth = held.get(index, nothing)
        num_tokens, num_host_tokens = depth * block_size, 0
        if worker.host_tier:
            num_host_tokens = max(0, held.get(worker.host.index, nothing)[1] - depth) * block_size
        if worker.partial_reuse and not num_host_tokens:
            num_tokens += tree.nearest(node, depth, waiter.token_ids, index)[1]
        if num_tokens or num_host_tokens:
            matches.append((worker.worker_id, num_tokens, live.get(index, 0) * block_size, num_host_tokens))
    return matches
