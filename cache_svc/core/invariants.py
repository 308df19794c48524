"""DESIGN §5, asserted over the whole state. Recounts everything from the sequences; trusts no counter."""

from __future__ import annotations

from collections import Counter

from cache_svc.core.errors import InvariantError
from cache_svc.core.table import Sequence, SwappedSequence
from cache_svc.core.tree import PrefixTree
from cache_svc.core.waiting import Waiter
from cache_svc.core.worker import Worker


def check_state(
    tree: PrefixTree | None,
    workers: dict[int, Worker],
    waiting: dict[int, Waiter],
    admitted: dict[int, Sequence],
    swapped: dict[int, SwappedSequence],
) -> None:
    """Raises InvariantError naming the first contradiction."""
    _require(bool(workers) == (tree is not None), "the tree is there exactly while there is a worker")
    num_known = len(waiting.keys() | admitted.keys() | swapped.keys())
    _require(len(waiting) + len(admitted) + len(swapped) == num_known, "a sequence is in two states")
    by_worker = {sequence_id: s for worker in workers.values() for sequence_id, s in worker.sequences.items()}
    _require(by_worker == admitted, "the workers' sequences are not the admitted ones")
    off_device = {sequence_id: s for worker in workers.values() for sequence_id, s in worker.swapped.items()}
    _require(off_device == swapped, "the workers' swapped sequences are not those that are swapped out")
    _require(len({worker.index for worker in workers.values()}) == len(workers), "two workers share a mask bit")
    if tree is None:
        return
    for sequence in admitted.values():
        _check_sequence(sequence)
    for waiter in waiting.values():
        _check_waiter(waiter, tree)
    _require(tree.stale.keys() <= waiting.keys(), "a place is stale of a sequence that does not wait")
    for worker in workers.values():
        _check_pool(worker)
        _check_host(worker)
        _check_eviction_order(worker)
    _check_tree(tree, workers)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvariantError(message)


def _check_sequence(sequence: Sequence) -> None:
    name = f"sequence {sequence.sequence_id}"
    worker, tree = sequence.worker, sequence.worker.tree
    whole_computed = sequence.num_computed_tokens // tree.block_size
    _require(sequence.num_computed_tokens <= sequence.num_tokens, f"{name}: computed more tokens than it has")
    _require(whole_computed <= len(sequence.table), f"{name}: computed more tokens than its blocks hold")
    _require(len(set(sequence.table)) == len(sequence.table), f"{name}: a block stands twice in its table")
    _require(len(sequence.nodes) == (whole_computed if worker.prefix_caching else 0), f"{name}: wrong number of nodes")
    parent = tree.root
    for i, node in enumerate(sequence.nodes):
        expected = bytes(sequence.tokens[i * tree.block_bytes : (i + 1) * tree.block_bytes])
        _require(node.parent is parent and node.key == expected, f"{name}: node {i} is not the one of its tokens")
        _require(bool(node.live & worker.bit), f"{name}: node {i} is in use and not live")
        parent = node


def _check_waiter(waiter: Waiter, tree: PrefixTree) -> None:
    name = f"waiting sequence {waiter.sequence_id}"
    if waiter.sequence_id in tree.stale:
        return
    _require(waiter.path == tree.walk(waiter.token_ids), f"{name}: its place is not where a walk ends")
    end = waiter.path[-1] if waiter.path else tree.root
    _require(waiter.watched is end, f"{name}: watches another node than its last")
    watched = (end.watchers or {}).get(waiter.wanted, {}).get(waiter.sequence_id)
    _require(watched is waiter, f"{name}: its node does not know of it")


def _check_pool(worker: Worker) -> None:
    """Users recounted; each block in one state; a shared or stored block is never one that somebody still writes."""
    name, pool = f"worker {worker.worker_id}", worker.pool
    users: Counter[int] = Counter()
    for sequence in worker.sequences.values():
        shared = [node.block_of[worker.index] for node in sequence.nodes]
        users.update(set(shared) | set(sequence.table))
        writable = sequence.table[len(shared) :]
        _require(not any(block in worker.node_of for block in writable), f"{name}: a stored block can be written")
    for block, count in users.items():
        may_share = block in worker.node_of or not worker.prefix_caching
        _require(count == 1 or may_share, f"{name}: block {block} has {count} users and is not stored")
    counted = {block: count for block, count in enumerate(pool.users) if count}
    _require(counted == users, f"{name}: the pool's users are not those of the sequences")
    free, cached = pool.free_block_ids(), pool.cached_block_ids()
    states = [*free, *cached, *users]
    handed_out = pool.first_untouched - 1
    _require(len(states) == handed_out, f"{name}: {len(states)} blocks in some state, not {handed_out}")
    _require(set(states) == set(range(1, handed_out + 1)), f"{name}: a block is in two states, or out of range")
    _require(handed_out <= pool.num_blocks, f"{name}: block {handed_out} is beyond the pool")
    _require(pool.free_blocks + pool.cached_blocks + pool.used_blocks == pool.num_blocks, f"{name}: wrong counters")
    _require(pool.used_blocks == len(users), f"{name}: used_blocks is {pool.used_blocks}, not {len(users)}")
    _require(
        set(cached) == {b for b in worker.node_of if not pool.users[b]}, f"{name}: cached is not stored and unused"
    )


def _check_host(worker: Worker) -> None:
    """Host blocks are free, or held by one swapped-out sequence."""
    name, pool = f"worker {worker.worker_id}", worker.host
    for swapped in worker.swapped.values():
        num_blocks = -(-swapped.num_computed_tokens // worker.tree.block_size)
        _require(swapped.worker is worker, f"{name}: holds a swapped sequence of another worker")
        _require(
            len(swapped.host_blocks) == num_blocks, f"{name}: sequence {swapped.sequence_id} has wrong host blocks"
        )
    used = [block for swapped in worker.swapped.values() for block in swapped.host_blocks]
    states = [*pool.free_block_ids(), *used]
    handed_out = pool.first_untouched - 1
    _require(sorted(states) == list(range(1, handed_out + 1)), f"{name}: a host block is lost, or in two states")
    _require(handed_out <= pool.num_blocks, f"{name}: host block {handed_out} is beyond the pool")
    _require(all(pool.users[block] == 1 for block in used), f"{name}: a host block has not one user")
    _require((pool.cached_blocks, pool.used_blocks) == (0, len(used)), f"{name}: wrong host counters")
    _require(pool.free_blocks + pool.used_blocks == pool.num_blocks, f"{name}: host blocks do not add up")


def _check_eviction_order(worker: Worker) -> None:
    """Children before their parents (why: worker.py)."""
    order = {block: position for position, block in enumerate(worker.pool.cached_block_ids())}
    for block, position in order.items():
        parent = worker.node_of[block].parent
        if parent is None or parent.parent is None:
            continue  # the parent is the root
        _require(worker.index in parent.block_of, f"worker {worker.worker_id}: the parent of block {block} is gone")
        above = order.get(parent.block_of[worker.index])
        _require(above is None or position < above, f"worker {worker.worker_id}: a parent goes before block {block}")


def _check_tree(tree: PrefixTree, workers: dict[int, Worker]) -> None:
    stored: dict[int, set[tuple[int, int]]] = {worker.index: set() for worker in workers.values()}
    by_index = {worker.index: worker for worker in workers.values()}
    num_nodes = 0
    for node in tree.nodes():
        num_nodes += 1
        parent = node.parent
        _require(parent is not None and parent.children.get(node.key) is node, "a node is not its parent's child")
        _require(len(node.key) == tree.block_bytes, "a node is not one block long")
        _require(node.holders == sum(1 << index for index in node.block_of), "holders is not the mask of block_of")
        _require(node.holders != 0, "a node without holders is left in the tree")
        live = sum(1 << index for index, block in node.block_of.items() if by_index[index].pool.users[block])
        _require(node.live == live, "live is not the mask of the blocks in use")
        if parent is not None and parent is not tree.root:
            _require(not node.holders & ~parent.holders, "a node is held by a worker that does not hold its parent")
            _require(not node.live & ~parent.live, "a node is live on a worker where its parent is not")
        for index, block in node.block_of.items():
            _require(by_index[index].node_of.get(block) is node, f"block {block} does not lead back to its node")
            stored[index].add((index, block))
    _require(num_nodes == tree.num_nodes, f"num_nodes is {tree.num_nodes}, not {num_nodes}")
    for worker in workers.values():
        known = {(worker.index, block) for block in worker.node_of}
        _require(stored[worker.index] == known, f"worker {worker.worker_id}: node_of is not what the tree holds")
