"""Asserts the invariants of the whole state. Recounts everything from the sequences and trusts no counter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from cache_svc.core.errors import InvariantError
from cache_svc.core.memory.memory import Memory
from cache_svc.core.retention import DEFAULT_RETENTION
from cache_svc.core.sequences.pins import Pins
from cache_svc.core.sequences.sequence import Sequence, SwappedSequence
from cache_svc.core.sequences.worker_blocks import WorkerBlocks
from cache_svc.core.tree.nodes import (
    BlockResidency,
    PartialBlock,
    PrefixNode,
    PrefixSubscription,
    RetentionOwner,
    subtree,
)
from cache_svc.core.tree.tree import PrefixTree


def check_state(
    tree: PrefixTree | None,
    workers: dict[int, WorkerBlocks],
    waiting: dict[int, PrefixSubscription],
    admitted: dict[int, Sequence],
    swapped: dict[int, SwappedSequence],
    pins: Pins,
) -> None:
    """Raises InvariantError naming the first contradiction."""
    _require(bool(workers) == (tree is not None), "there is a tree without a worker, or a worker without a tree")
    num_known = len(waiting.keys() | admitted.keys() | swapped.keys())
    _require(len(waiting) + len(admitted) + len(swapped) == num_known, "a sequence is in two states")
    by_worker = {sequence_id: s for worker in workers.values() for sequence_id, s in worker.sequences.items()}
    for worker in workers.values():
        here = all(sequence.worker_id == worker.worker_id for sequence in worker.sequences.values())
        _require(here, f"worker {worker.worker_id} has a sequence of another worker")
    _require(by_worker == admitted, "the workers' sequences are not the admitted ones")
    off_device = {sequence_id: s for worker in workers.values() for sequence_id, s in worker.swapped.items()}
    _require(off_device == swapped, "the workers and the core list different swapped-out sequences")
    _require(len({worker.number for worker in workers.values()}) == len(workers), "two workers have one number")
    if tree is None:
        return
    for sequence in admitted.values():
        _check_sequence(sequence, workers[sequence.worker_id])
    for subscription in waiting.values():
        _check_subscription(subscription, tree)
    _require(tree.stale.keys() <= waiting.keys(), "a subscription is stale, and its sequence does not wait")
    for worker in workers.values():
        _check_device(worker, pins)
        _check_host(worker)
    _check_tree(tree, workers, [*waiting.values(), *admitted.values(), *swapped.values()])


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvariantError(message)


def _check_sequence(sequence: Sequence, worker: WorkerBlocks) -> None:
    name = f"sequence {sequence.sequence_id}"
    tree = worker.tree
    whole_computed = sequence.num_computed_tokens // tree.block_size
    _require(sequence.num_computed_tokens <= sequence.num_tokens, f"{name}: computed more tokens than it has")
    _require(whole_computed <= len(sequence.table), f"{name}: computed more tokens than its blocks hold")
    _require(len(set(sequence.table)) == len(sequence.table), f"{name}: a block stands twice in its table")
    path = _path(sequence.node)
    if worker.prefix_caching:
        _require(sequence.node.end <= whole_computed, f"{name}: its node ends after its last whole computed block")
        _require(_root(sequence.node) is sequence.root, f"{name}: its node is not in the tree of its namespace")
    tokens = b"".join(node.key for node in path)
    _require(sequence.tokens.startswith(tokens), f"{name}: its nodes are not those of its tokens")
    _require(len(tokens) == sequence.node.end * tree.block_bytes, f"{name}: its nodes end at a wrong place")
    _require(all(worker.index in node.residencies for node in path), f"{name}: uses a node that is not held")
    held = [block for node in path for block in node.residencies[worker.index].blocks]
    own = [block for block, shared in zip(sequence.table, held, strict=False) if block != shared]
    _require(list(sequence.duplicates) == own, f"{name}: its duplicates are not its own copies of stored blocks")


def _path(node: PrefixNode) -> list[PrefixNode]:
    """The nodes from the root to this one, without the root."""
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


def _check_subscription(subscription: PrefixSubscription, tree: PrefixTree) -> None:
    name = f"waiting sequence {subscription.sequence_id}"
    if subscription.sequence_id in tree.stale:
        _require(subscription.point is None, f"{name}: is stale and subscribed to a place")
        return
    node, depth = subscription.place()
    _require(
        (node, depth) == tree.walk(subscription.token_ids, subscription.root, 0),
        f"{name}: a walk ends at another place",
    )
    _require(
        (node.points or {}).get(depth) is subscription.point, f"{name}: its node does not know its subscription point"
    )
    assert subscription.point is not None
    group_member = subscription.point.waiting.get(subscription.wanted, {}).get(subscription.sequence_id)
    _require(group_member is subscription, f"{name}: its subscription point does not know it")
    _require(
        subscription.wanted == tree.next_tokens(subscription.token_ids, depth),
        f"{name}: its subscription is for other tokens than the next ones",
    )


def _residencies(worker: WorkerBlocks, index: int) -> list[BlockResidency]:
    """All residencies of one memory of the worker, including those in the private trees of forks."""
    tops = _tops(worker.tree, worker.sequences.values())
    return [node.residencies[index] for node in subtree(*tops) if index in node.residencies]


def _tops(tree: PrefixTree, sequences: Iterable[Sequence]) -> list[PrefixNode]:
    """All roots, each once."""
    return list(dict.fromkeys([*tree.roots.values(), *(_root(sequence.node) for sequence in sequences)]))


def _root(node: PrefixNode) -> PrefixNode:
    while node.parent is not None:
        node = node.parent
    return node


def _check_device(worker: WorkerBlocks, pins: Pins) -> None:
    """Recounts the users of each node."""
    name = f"worker {worker.worker_id}'s device"
    users: Counter[int] = Counter()
    private: list[int] = []
    for sequence in worker.sequences.values():
        users.update(id(node.residencies[worker.index]) for node in _path(sequence.node))
        private += [*sequence.duplicates, *sequence.table[sequence.node.end :]]
    for node in pins.last_nodes(worker):
        users.update(id(node.residencies[worker.index]) for node in _path(node))
    _require(pins.num_blocks(worker) <= pins.max_blocks(worker), f"{name}: more blocks are pinned than allowed")
    residencies = _residencies(worker, worker.index)
    for residency in residencies:
        block = residency.blocks[0]
        _require(
            residency.users == users[id(residency)], f"{name}: wrong number of users of the node with block {block}"
        )
    _check_memory(name, worker.device, residencies, private)


def _check_memory(name: str, memory: Memory, residencies: list[BlockResidency], private: list[int]) -> None:
    """Checks that each block has one state and that each block in `sources` is stored, and recounts the counters."""
    pool = memory.pool
    stored = [block for residency in residencies for block in residency.blocks]
    withheld = list(memory.withheld)
    _require(memory.sources <= set(stored), f"{name}: a block in `sources` is not stored")
    states = [*pool.given_back(), *stored, *private, *withheld]
    handed_out = pool.first_untouched - 1
    _require(sorted(states) == list(range(1, handed_out + 1)), f"{name}: a block is lost, or in two states")
    _require(handed_out <= pool.num_blocks, f"{name}: block {handed_out} is beyond the pool")
    unused = [residency for residency in residencies if not residency.users]
    _require(memory.keeps or not unused, f"{name}: keeps a node without users")
    cached = sum(len(residency.blocks) for residency in unused)
    _require(memory.cached_blocks == cached, f"{name}: cached_blocks is {memory.cached_blocks}, not {cached}")
    used = len(private) + len(stored) - cached + len(withheld)
    _require(memory.used_blocks == used, f"{name}: used_blocks is {memory.used_blocks}, not {used}")
    _check_shares(name, memory, residencies)
    order = memory.queue.upcoming(memory.index)
    _require(
        len(order) == len(unused) and set(order) == set(unused),
        f"{name}: the eviction order is not made of the unused nodes",
    )


def _check_shares(name: str, memory: Memory, residencies: list[BlockResidency]) -> None:
    """Recounts claims: a tenant pays for its retained blocks and for all blocks before them."""
    shares = memory.shares
    owners = {
        residency: residency.owner
        for residency in residencies
        if residency.owner is not None and residency.owner.is_retained(residency)
    }
    for residency in residencies:
        is_retained = residency.retention > DEFAULT_RETENTION
        _require(
            is_retained == (residency in owners), f"{name}: a residency is retained without an owner, or the reverse"
        )
        claims: Counter[RetentionOwner] = Counter()
        if residency in owners:
            claims[owners[residency]] += 1
        for child in residency.node.children.values():
            if (below := child.residencies.get(memory.index)) is not None:
                claims.update((below.claims or {}).keys())
        _require(
            (residency.claims or {}) == claims, f"{name}: wrong claims on the node with block {residency.blocks[0]}"
        )
    for tenant, share in shares.tenants.items():
        paid = sum(len(residency.blocks) for residency in residencies if share in (residency.claims or {}))
        _require(share.num_blocks == paid, f"{name}: tenant {tenant!r} pays for {share.num_blocks} blocks, not {paid}")
        own = {residency for residency, owner in owners.items() if owner is share}
        _require(set(share.retained.values()) == own, f"{name}: tenant {tenant!r}: wrong retained blocks")
        _require(paid <= shares.max_tenant_blocks, f"{name}: tenant {tenant!r} retains more than its share")
    total = sum(share.num_blocks for share in shares.tenants.values())
    _require(shares.num_blocks == total, f"{name}: the shares count {shares.num_blocks} retained blocks, not {total}")
    _require(total <= shares.max_blocks, f"{name}: all tenants together retain {total} blocks of {shares.max_blocks}")


def check_no_copies_due(workers: dict[int, WorkerBlocks]) -> None:
    """All copies of an exchange must be done before the next one."""
    for worker in workers.values():
        for memory in (worker.device, worker.host):
            due = bool(memory.sources or memory.withheld or worker.host.moves)
            _require(not due, f"worker {worker.worker_id}: a copy still has to read a block after the exchange")


def _check_host(worker: WorkerBlocks) -> None:
    """No sequence uses a stored node of the host. A swapped-out sequence has blocks of its own."""
    name = f"worker {worker.worker_id}'s host"
    for swapped in worker.swapped.values():
        num_blocks = -(-swapped.num_computed_tokens // worker.tree.block_size)
        _require(swapped.worker_id == worker.worker_id, f"{name}: holds a swapped sequence of another worker")
        _require(
            len(swapped.host_blocks) == num_blocks, f"{name}: sequence {swapped.sequence_id} has wrong host blocks"
        )
    residencies = _residencies(worker, worker.host.index)
    _require(worker.host_tier or not residencies, f"{name}: holds nodes without a host tier")
    _require(not any(residency.users for residency in residencies), f"{name}: a node there has a user")
    above = Counter(residency.node.parent for residency in residencies)
    orphans = {
        node: n for node, n in above.items() if node and node.parent and worker.host.index not in node.residencies
    }
    _require(worker.host.orphans == orphans, f"{name}: wrong number of children of nodes that are not held there")
    private = [block for swapped in worker.swapped.values() for block in swapped.host_blocks]
    _check_memory(name, worker.host, residencies, private)


def _check_tree(
    tree: PrefixTree,
    workers: dict[int, WorkerBlocks],
    sequences: Iterable[PrefixSubscription | Sequence | SwappedSequence],
) -> None:
    users = Counter(id(sequence.root) for sequence in sequences)
    for namespace, root in tree.roots.items():
        _require(root.namespace == namespace, "a root is not that of its namespace")
        _require(root.users == users.pop(id(root), 0), "wrong number of sequences of a namespace")
        _require(bool(root.users or root.children), "an empty namespace is left")
    _require(not users, "a sequence is of a namespace that the tree does not have")
    indexes = {memory.index for worker in workers.values() for memory in (worker.device, worker.host)}
    running = [sequence for worker in workers.values() for sequence in worker.sequences.values()]
    for top in _tops(tree, running):
        _check_points(top)
        for node in subtree(top):
            _check_points(node)
            _check_node(node, top, tree, indexes)


def _check_points(node: PrefixNode) -> None:
    for point in (node.points or {}).values():
        _require(bool(point.waiting) and all(point.waiting.values()), "a subscription point is empty")


def _check_node(node: PrefixNode, root: PrefixNode, tree: PrefixTree, indexes: set[int]) -> None:
    parent = node.parent
    first = node.key[: tree.block_bytes]
    _require(parent is not None and parent.children.get(first) is node, "a node is not its parent's child")
    _require(parent is not None and node.start == parent.end, "a node does not start where its parent ends")
    num_blocks = node.end - node.start
    num_partial_blocks = sum(isinstance(child, PartialBlock) for child in node.children.values())
    _require(node.num_partial_blocks == num_partial_blocks, "wrong number of partial blocks")
    if isinstance(node, PartialBlock):
        _check_partial_block(node, tree)
    else:
        _require(
            len(node.key) == num_blocks * tree.block_bytes > 0, "a node's tokens do not reach from its start to its end"
        )
    _require(num_blocks <= tree.max_node_blocks, "a node is too long")
    _require(bool(node.residencies), "a node without holders is left in the tree")
    _require(node.residencies.keys() <= indexes, "a node is held by a worker that is gone")
    for index, residency in node.residencies.items():
        _require(residency.node is node and len(residency.blocks) == num_blocks, "a residency is not that of its node")
        children = [child.residencies[index] for child in node.children.values() if index in child.residencies]
        _require(residency.num_children == len(children), "wrong number of children that a memory holds")
        _require(bool(residency.users) or not residency.unwritten, "an unwritten node has no user to write it")
        _require(
            not residency.unwritten or all(child.unwritten for child in children),
            "a written node has an unwritten parent",
        )
        _require(residency.users >= max((child.users for child in children), default=0), "a child has more users")
        if parent is not root:
            assert parent is not None
            by_device = index - index % 2 in parent.residencies
            by_host = index % 2 == 1 and index in parent.residencies
            _require(by_device or by_host, "a node is held, and its parent is not")


def _check_partial_block(partial: PartialBlock, tree: PrefixTree) -> None:
    _require(
        0 < len(partial.key) < tree.block_bytes and partial.end - partial.start == 1,
        "a partial block has the size of a whole one",
    )
    _require(not (partial.children or partial.points), "a partial block has children or subscriptions")
    assert partial.parent is not None
    for index, residency in partial.residencies.items():
        _require(not residency.users, "a partial block is in use")
        for key, other in partial.parent.children.items():
            covers = other is not partial and key.startswith(partial.key) and index in other.residencies
            _require(not covers, "a partial block is kept, though another block has all its tokens")
