"""What the blocks are used for, and which prefixes are worth most: a snapshot for the live view.

The core records one thing for this view only: when each node was stored. A snapshot reads every node once, in slices of
SLICE_NODES nodes. The caller lets exchanges run between two slices. If such an exchange grants or frees a block, the
snapshot may show the old or the new state of the block. If a worker comes or goes meanwhile, there is no snapshot.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from cache_svc.core.cache import CacheCore
from cache_svc.core.memory.memory import Memory
from cache_svc.core.packing import TOKEN_BYTES
from cache_svc.core.sequences.worker_blocks import WorkerBlocks
from cache_svc.core.tree.nodes import BlockResidency, PrefixNode, Root
from cache_svc.core.tree.tree import PrefixTree
from paceline.v1 import cache_pb2 as pb

MAX_CELLS = 2048  # of one memory
MAX_NODES = 100  # without their ancestors
MAX_NODES_WITH_ANCESTORS = 300
SLICE_NODES = 500  # about 1 ms
SHOWN_NAMESPACE_CHARS = 16

FREE, CACHED, USED, SHARED, PINNED = range(5)  # a cell of several blocks shows the largest state
_CHARACTERS = bytes.maketrans(bytes(range(5)), b".cusp")

SEVERAL = 2
# The blocks of the tree's nodes, by memory index and number of users: none, one, several.
_Blocks = dict[int, list["array[int]"]]
# Saved tokens, users, tokens, a number that makes the order unique, the node.
_Ranked = tuple[int, int, int, int, PrefixNode]


@dataclass(slots=True)
class NodeIds:
    """The ids of the nodes that the last snapshot showed, so that the next one shows the same ids."""

    by_node: dict[PrefixNode, int] = field(default_factory=dict)
    last: int = 0

    def renew(self, shown: Iterable[PrefixNode]) -> dict[PrefixNode, int]:
        """Returns the ids of these nodes, and forgets all others."""
        before, self.by_node = self.by_node, {}
        for node in shown:
            if (known := before.get(node)) is None:
                self.last = known = self.last + 1
            self.by_node[node] = known
        return self.by_node


def snapshot(
    core: CacheCore, ids: NodeIds, since_exchange_s: float
) -> Generator[None, None, pb.WatchBlocksResponse | None]:
    """Yields between two slices, and returns the snapshot. None: a worker came or went meanwhile.

    `since_exchange_s`: how long ago the core's last exchange was. The core's time plus this is the present time.
    """
    tree, workers = core.tree, list(core.workers.values())
    answer = pb.WatchBlocksResponse(
        linked=core.last_exchange > 0,
        prefix_query_tokens=core.counters.prefix_query_tokens,
        prefix_hit_tokens=core.counters.prefix_hit_tokens,
    )
    if tree is None:
        return answer
    seen = _Seen([memory for worker in workers for memory in (worker.device, worker.host)])
    for _ in seen.read(tree):
        yield
        if core.tree is not tree or list(core.workers.values()) != workers:
            return None
    pinned = {worker: core.pins.pinned_nodes(worker) for worker in workers}
    for worker in workers:
        answer.workers.append(_map_of(worker, seen.blocks, pinned[worker]))
    all_pinned = set().union(*pinned.values())
    shown = _with_ancestors(seen.best())
    known_ids = ids.renew(shown)
    now_ms = core.now_ms + int(1000 * since_exchange_s)
    for node in shown:
        answer.nodes.append(_node(node, known_ids, workers, pinned=node in all_pinned, now_ms=now_ms))
    answer.num_nodes, answer.num_tokens = seen.num_nodes, seen.num_bytes // TOKEN_BYTES
    return answer


class _Seen:
    """What the slices have read so far."""

    def __init__(self, memories: Iterable[Memory]) -> None:
        self.blocks: _Blocks = {memory.index: [array("i") for _ in range(SEVERAL + 1)] for memory in memories}
        self.num_nodes = self.num_bytes = 0
        self._ranked: list[_Ranked] = []

    def read(self, tree: PrefixTree) -> Iterator[None]:
        """Yields after each slice."""
        blocks, ranked, num_read = self.blocks, self._ranked, 0
        least = -1, 0, 0  # only a node that is worth more than this is added
        stack: list[PrefixNode] = list(tree.roots.values())
        while stack:
            node = stack.pop()
            if node.children:
                stack += node.children.values()
            if residencies := node.residencies:
                self.num_nodes += 1
                size = len(node.key)
                self.num_bytes += size
                num_hits = num_users = 0
                for index, residency in residencies.items():  # inlined: a function call for each would double the time
                    users = residency.users
                    blocks[index][users if users < SEVERAL else SEVERAL].extend(residency.blocks)
                    num_users += users
                    num_hits += residency.num_reuses
                if len(residencies) > 1:
                    num_hits = _num_hits(residencies)
                if (worth := (num_hits * size, num_users, size)) > least:
                    ranked.append((*worth, self.num_nodes, node))
            num_read += 1
            if num_read % SLICE_NODES == 0:
                if len(ranked) > 2 * MAX_NODES:
                    ranked[:] = heapq.nlargest(MAX_NODES, ranked)
                    least = ranked[-1][:3]
                yield

    def best(self) -> Iterator[PrefixNode]:
        """At most MAX_NODES nodes that are still in the tree, the one with the most saved tokens first."""
        return (node for *_, node in heapq.nlargest(MAX_NODES, self._ranked) if node.residencies)


def _states(memory: Memory, blocks: _Blocks) -> np.ndarray:
    """The state of each block of a memory, by id. Blocks in no node belong to one sequence, or are free."""
    states = np.full(memory.num_blocks + 1, USED, np.uint8)
    for state, of_state in zip((CACHED, USED, SHARED), blocks[memory.index], strict=True):
        if of_state:
            states[np.frombuffer(of_state, np.int32)] = state
    states[memory.pool.is_free()] = FREE
    return states


def _num_hits(residencies: dict[int, BlockResidency]) -> int:
    """Returns the reuses on all workers. The host's number includes the device's reuses before the eviction, so only
    the larger of a worker's two numbers counts."""
    by_worker: dict[int, int] = {}
    for index, residency in residencies.items():
        by_worker[index // 2] = max(by_worker.get(index // 2, 0), residency.num_reuses)
    return sum(by_worker.values())


def _map_of(worker: WorkerBlocks, blocks: _Blocks, pinned: Iterable[PrefixNode]) -> pb.WorkerBlockMap:
    device, host = _states(worker.device, blocks), _states(worker.host, blocks)
    if not worker.prefix_caching:
        _add_forks(worker, device)
    for node in pinned:
        if (residency := node.residencies.get(worker.index)) is not None:
            device[residency.blocks] = PINNED
    blocks_per_cell, cells = _cells(device[1:])
    host_blocks_per_cell, host_cells = _cells(host[1:])
    return pb.WorkerBlockMap(
        worker=worker.worker_id,
        num_blocks=worker.device.num_blocks,
        blocks_per_cell=blocks_per_cell,
        cells=cells,
        num_host_blocks=worker.host.num_blocks,
        host_blocks_per_cell=host_blocks_per_cell,
        host_cells=host_cells,
    )


def _add_forks(worker: WorkerBlocks, states: np.ndarray) -> None:
    """Without prefix caching, forks share blocks in private trees."""
    seen: set[PrefixNode] = set()
    for sequence in worker.sequences.values():
        node = sequence.node
        while node.parent is not None and node not in seen:
            seen.add(node)
            residency = node.residencies[worker.index]
            if residency.users > 1:
                states[residency.blocks] = SHARED
            node = node.parent


def _cells(states: np.ndarray) -> tuple[int, str]:
    """How many blocks a cell stands for, and the cells."""
    blocks_per_cell = max(1, -(-len(states) // MAX_CELLS))
    if blocks_per_cell > 1:
        num_cells = -(-len(states) // blocks_per_cell)
        padded = np.full(num_cells * blocks_per_cell, FREE, np.uint8)
        padded[: len(states)] = states
        states = padded.reshape(num_cells, blocks_per_cell).max(axis=1)
    return blocks_per_cell, states.tobytes().translate(_CHARACTERS).decode()


def _with_ancestors(best: Iterable[PrefixNode]) -> list[PrefixNode]:
    """These nodes and all their ancestors, parents first. Leaves out a node if the list would become too long."""
    chosen: dict[PrefixNode, None] = {}
    for node in best:
        path: list[PrefixNode] = []
        above: PrefixNode | None = node
        while above is not None and above.parent is not None and above not in chosen:
            path.append(above)
            above = above.parent
        if len(chosen) + len(path) <= MAX_NODES_WITH_ANCESTORS:
            chosen.update(dict.fromkeys(reversed(path)))
    return list(chosen)


def _node(
    node: PrefixNode, ids: dict[PrefixNode, int], workers: Sequence[WorkerBlocks], *, pinned: bool, now_ms: int
) -> pb.LivePrefixNode:
    residencies = node.residencies
    num_tokens, num_hits = len(node.key) // TOKEN_BYTES, _num_hits(residencies)
    parent, root = node.parent, node
    while root.parent is not None:
        root = root.parent
    assert isinstance(root, Root)
    salt = root.namespace.cache_salt if root.namespace is not None else ""
    stored_ms = min((residency.stored_ms for residency in residencies.values()), default=now_ms)
    return pb.LivePrefixNode(
        id=ids[node],
        parent=ids[parent] if parent is not None and parent.parent is not None else 0,
        namespace=salt[:SHOWN_NAMESPACE_CHARS],
        num_tokens=num_tokens,
        num_blocks=node.end - node.start,
        workers=[worker.worker_id for worker in workers if worker.holds(node)],
        num_users=sum(residency.users for residency in residencies.values()),
        num_hits=num_hits,
        saved_tokens=num_hits * num_tokens,
        age_s=(now_ms - stored_ms) / 1000,
        pinned=pinned,
    )
