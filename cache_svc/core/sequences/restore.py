"""Restores the sequences of a worker from the scheduler's records, after the cache has lost its state.

The block tables do not say which of several equal blocks was the stored one. Any choice is right if every sequence
keeps its own table. Two rules make the choice. A block in the tables of several sequences must be the stored one,
because only stored blocks have more than one user. Where no block is shared, the block of the first sequence is stored,
and the other sequences keep theirs as private duplicates (Sequence.duplicates).

    A  [ a b | c ]    A and C have the same tokens. a and b are stored, because A and B share them.
    B  [ a b | d ]    No table shares c or g. c is stored, because A comes first.
    C  [ e f | g ]    C keeps e, f and g as duplicates of a, b and c.

So nothing is stored before all entries are known. The steps are: check each entry against those before it; make the
missing nodes of its path, which no memory holds yet; choose the block of every place on these paths; then hold the
nodes and count their users. Without prefix caching only shared blocks (of forks) are stored, in a private tree for each
family of forks, as WorkerBlocks.fork does.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Iterable
from itertools import chain

from cache_svc.core.errors import Code, OpError
from cache_svc.core.packing import TOKEN_BYTES, check_token_bytes, unpack_int32
from cache_svc.core.request_metadata import read_metadata
from cache_svc.core.sequences.sequence import Sequence, SwappedSequence
from cache_svc.core.sequences.worker_blocks import WorkerBlocks
from cache_svc.core.tree.nodes import Namespace, PrefixNode, Root
from cache_svc.core.tree.tree import PrefixTree
from paceline.v1 import cache_pb2 as pb

Refusals = dict[int, OpError]  # by position among the entries


class RestoreEntry:
    """One sequence to restore, as the scheduler knows it.

    The first `num_whole` blocks of its table are computed and never written again. The first `num_stored` of these are
    to be stored below `top`.
    """

    __slots__ = (
        "host_blocks",
        "metadata",
        "namespace",
        "node",
        "num_computed_tokens",
        "num_stored",
        "num_whole",
        "position",
        "root",
        "sequence_id",
        "table",
        "token_ids",
        "top",
    )

    root: Root  # set when the entry is accepted
    node: PrefixNode

    def __init__(self, position: int, message: pb.RestoredSequence, worker: WorkerBlocks) -> None:
        """Raises OpError if the entry contradicts itself or the worker's size."""
        check_token_bytes(message.token_ids)
        names = message.namespace
        self.position = position
        self.sequence_id = message.sequence
        self.token_ids = message.token_ids
        self.num_computed_tokens = message.num_computed_tokens
        self.namespace = Namespace(names.model, names.lora, names.cache_salt)
        self.metadata = read_metadata(message.priority, message.retention, message.tenant)
        self.table = _blocks("block_table", message.block_table, worker.device.num_blocks)
        self.host_blocks: array[int] | None = None
        if message.HasField("host_blocks"):
            self.host_blocks = _blocks("host_blocks", message.host_blocks, worker.host.num_blocks)
        self._check(worker.tree.block_size)
        self.num_whole = self.num_computed_tokens // worker.tree.block_size
        self.num_stored = self.num_whole if worker.prefix_caching else 0
        self.top: PrefixNode = Root(None)

    def _check(self, block_size: int) -> None:
        num_tokens, computed = len(self.token_ids) // TOKEN_BYTES, self.num_computed_tokens
        if not num_tokens:
            raise OpError(Code.INVALID_ARGUMENT, "token_ids: a sequence has at least one token")
        if computed > num_tokens:
            raise OpError(
                Code.INVALID_ARGUMENT, f"num_computed_tokens: {computed} is more than the {num_tokens} tokens"
            )
        num_blocks = -(-computed // block_size)
        if self.host_blocks is None:
            if len(self.table) < num_blocks:
                raise OpError(
                    Code.INVALID_ARGUMENT,
                    f"block_table: {len(self.table)} blocks of {block_size} tokens cannot hold {computed} tokens",
                )
        elif self.table:
            raise OpError(Code.INVALID_ARGUMENT, "block_table: not empty, though the sequence is swapped out")
        elif len(self.host_blocks) != num_blocks:
            raise OpError(
                Code.INVALID_ARGUMENT,
                f"host_blocks: {len(self.host_blocks)} blocks, but {computed} computed tokens need {num_blocks}",
            )


def _blocks(field: str, packed: bytes, num_blocks: int) -> array[int]:
    """Raises OpError unless these are different blocks of the memory."""
    if len(packed) % 4:
        raise OpError(Code.INVALID_ARGUMENT, f"{field}: {len(packed)} bytes is not a whole number of int32")
    blocks = unpack_int32(packed)
    if blocks and not 1 <= min(blocks) <= max(blocks) <= num_blocks:
        bad = next(block for block in blocks if not 1 <= block <= num_blocks)
        raise OpError(Code.INVALID_ARGUMENT, f"{field}: block {bad} is not within 1..{num_blocks}")
    if len(set(blocks)) != len(blocks):
        twice = next(block for i, block in enumerate(blocks) if block in blocks[:i])
        raise OpError(Code.INVALID_ARGUMENT, f"{field}: block {twice} occurs twice")
    return blocks


def restore(
    worker: WorkerBlocks, restored: list[pb.RestoredSequence], is_known: Callable[[int], bool]
) -> tuple[list[Sequence], list[SwappedSequence], Refusals]:
    """Restores sequences on a worker that has handed out no block. Returns the running ones, the swapped-out ones, and
    the refusals. `is_known` says whether an id is taken."""
    refused: Refusals = {}
    while True:
        entries = _accepted(worker, restored, is_known, refused)
        running = [entry for entry in entries if entry.host_blocks is None]
        for entry in running:
            entry.node = _grow_path(worker.tree, entry)
        chosen, conflicts = _choose(running)
        if not conflicts:
            break
        # The next round runs without them. It has fewer shared blocks, so it finds no new conflict with the rest.
        refused.update(conflicts)
        _prune(worker.tree, entries)
    sequences = [_hold(worker, entry, chosen) for entry in running]
    for sequence in sequences:
        if sequence.metadata.retention:
            worker.device.retain(sequence.node, sequence.metadata.retention, sequence.metadata.tenant)
    worker.device.pool.take_listed(set(chain.from_iterable(entry.table for entry in running)))
    swapped = [_swap(worker, entry, entry.host_blocks) for entry in entries if entry.host_blocks is not None]
    worker.host.pool.take_listed(set(chain.from_iterable(one.host_blocks for one in swapped)))
    return sequences, swapped, refused


# ------------------------------------------------------------------------------------------------------------- checks


def _accepted(
    worker: WorkerBlocks, restored: list[pb.RestoredSequence], is_known: Callable[[int], bool], refused: Refusals
) -> list[RestoreEntry]:
    """Returns the entries that agree with those before them. Adds the others to `refused`."""
    validator = RestoreValidator(worker)
    for position, one in enumerate(restored):
        if position in refused:
            continue
        try:
            if is_known(one.sequence) or one.sequence in validator.sequence_ids:
                raise OpError(Code.ALREADY_EXISTS, f"sequence {one.sequence} is known already")
            validator.accept(RestoreEntry(position, one, worker))
        except OpError as error:
            refused[position] = error
    return validator.entries


class RestoreValidator:
    """Checks each entry against the accepted ones."""

    def __init__(self, worker: WorkerBlocks) -> None:
        self._worker = worker
        self.entries: list[RestoreEntry] = []
        self.sequence_ids: set[int] = set()
        self._owners: dict[int, RestoreEntry] = {}  # by device block: the first entry that lists it
        self._on_host: set[int] = set()
        # without prefix caching: the forks of a family, by the top of their tree
        self._families: dict[PrefixNode, list[RestoreEntry]] = {}

    def accept(self, entry: RestoreEntry) -> None:
        """Accepts an entry. Raises OpError, having changed nothing, if it conflicts with an accepted one."""
        tree = self._worker.tree
        if entry.host_blocks is not None:
            if taken := self._on_host.intersection(entry.host_blocks):
                raise OpError(
                    Code.FAILED_PRECONDITION, f"host_blocks: block {min(taken)} is claimed by another sequence"
                )
            self._on_host.update(entry.host_blocks)
            entry.root = tree.acquire_root(entry.namespace)
        else:
            shared = self._shared(entry)
            entry.root = tree.acquire_root(entry.namespace)
            if self._worker.prefix_caching:
                entry.top = entry.root
            else:
                self._join_families(entry, shared)
            for block in entry.table:
                self._owners.setdefault(block, entry)
        self.entries.append(entry)
        self.sequence_ids.add(entry.sequence_id)

    def _shared(self, entry: RestoreEntry) -> dict[RestoreEntry, int]:
        """Returns the entries with which this one shares blocks, and where the last shared block ends. Raises OpError
        if it cannot share them."""
        shared: dict[RestoreEntry, int] = {}
        for at, block in enumerate(entry.table):
            owner = self._owners.get(block)
            if owner is None:
                continue
            if at >= len(owner.table) or owner.table[at] != block:
                raise _taken(block, owner, "at another place in its table")
            if at >= owner.num_whole:
                raise _taken(block, owner, "which has not computed the whole block, so the block is private")
            if at >= entry.num_whole:
                raise _taken(block, owner, "and the refused sequence has not computed the whole block")
            shared[owner] = at + 1
        block_bytes = self._worker.tree.block_bytes
        for owner, end in shared.items():
            if owner.namespace != entry.namespace:
                raise _taken(owner.table[end - 1], owner, "which has another namespace")
            if owner.token_ids[: end * block_bytes] != entry.token_ids[: end * block_bytes]:
                raise _taken(owner.table[end - 1], owner, "for other tokens")
        return shared

    def _join_families(self, entry: RestoreEntry, shared: dict[RestoreEntry, int]) -> None:
        self._families[entry.top] = [entry]
        for owner, end in shared.items():
            owner.num_stored, entry.num_stored = max(owner.num_stored, end), max(entry.num_stored, end)
            if owner.top is not entry.top:
                family = self._families.pop(owner.top)
                self._families[entry.top] += family
                for member in family:
                    member.top = entry.top


def _taken(block: int, owner: RestoreEntry, how: str) -> OpError:
    message = f"block_table: block {block} is claimed by sequence {owner.sequence_id}, {how}"
    return OpError(Code.FAILED_PRECONDITION, message)


# ------------------------------------------------------------------------------------------------ paths to the blocks


def _grow_path(tree: PrefixTree, entry: RestoreEntry) -> PrefixNode:
    """Returns the node where the stored part of the entry ends. Makes the missing nodes, without residencies."""
    node, depth, tokens, end = entry.top, 0, entry.token_ids, entry.num_stored
    while depth < end:
        begin = depth * tree.block_bytes
        child = node.children.get(tokens[begin : begin + tree.block_bytes])
        if child is None:
            reached = min(end, depth + tree.max_node_blocks)
            child = tree.grow(node, tokens[begin : reached * tree.block_bytes])
        else:
            reached = tree.follow(child, tokens, end)
            if reached < child.end:
                child = tree.split(child, reached)
        node, depth = child, reached
    return node


def _path(node: PrefixNode) -> list[PrefixNode]:
    """The nodes from the root to this one, without the root."""
    nodes = []
    while node.parent is not None:
        nodes.append(node)
        node = node.parent
    return nodes[::-1]


def _choose(entries: list[RestoreEntry]) -> tuple[dict[PrefixNode, array[int]], Refusals]:
    """Chooses the block of every place on these paths. If two shared blocks have the same place,
    one is stored. The first entry with the other block keeps it as a duplicate; later ones are refused."""
    shared = _in_several_tables(entry.table for entry in entries)
    chosen: dict[PrefixNode, array[int]] = {}
    alone: dict[int, RestoreEntry] = {}  # shared blocks that cannot be stored -> the entry that keeps them
    conflicts: Refusals = {}
    for entry in entries:
        for node in _path(entry.node):
            own = entry.table[node.start : node.end]
            blocks = chosen.setdefault(node, own)
            if blocks == own:
                continue
            for at, (stored, block) in enumerate(zip(blocks, own, strict=True)):
                if stored == block or block not in shared:
                    continue
                if stored not in shared:
                    blocks[at] = block
                elif alone.setdefault(block, entry) is not entry:
                    message = f"block_table: block {block} has the same tokens as block {stored}, and both are shared"
                    conflicts[entry.position] = OpError(Code.FAILED_PRECONDITION, message)
    return chosen, conflicts


def _in_several_tables(tables: Iterable[array[int]]) -> Container[int]:
    once: set[int] = set()
    twice: set[int] = set()
    for table in tables:
        twice |= once.intersection(table)
        once.update(table)
    return twice


def _prune(tree: PrefixTree, entries: list[RestoreEntry]) -> None:
    """Removes the nodes of these entries before the next round."""
    nodes = {node for entry in entries if entry.host_blocks is None for node in _path(entry.node)}
    for node in sorted(nodes, key=lambda node: node.end, reverse=True):
        if not node.residencies:  # its children end deeper, so they are removed already
            tree.remove(node)
    for entry in entries:
        tree.release_root(entry.root)


# ------------------------------------------------------------------------------------------------------------ storing


def _hold(worker: WorkerBlocks, entry: RestoreEntry, chosen: dict[PrefixNode, array[int]]) -> Sequence:
    sequence = Sequence(entry, worker.worker_id, entry.table, entry.node, entry.num_computed_tokens)
    for node in _path(entry.node):
        blocks = chosen[node]
        residency = node.residencies.get(worker.index)
        if residency is None:
            worker.device.hold(node, blocks, entry.metadata.priority)
            worker.tree.can_be_copied(node)
        else:
            worker.device.use(residency, entry.metadata.priority)
        own = entry.table[node.start : node.end]
        if own != blocks:
            sequence.duplicates.extend(block for block, stored in zip(own, blocks, strict=True) if block != stored)
    worker.sequences[entry.sequence_id] = sequence
    return sequence


def _swap(worker: WorkerBlocks, entry: RestoreEntry, host_blocks: array[int]) -> SwappedSequence:
    swapped = worker.swapped[entry.sequence_id] = SwappedSequence(
        entry.sequence_id,
        worker.worker_id,
        entry.token_ids,
        entry.num_computed_tokens,
        host_blocks,
        entry.root,
        entry.metadata,
    )
    return swapped
