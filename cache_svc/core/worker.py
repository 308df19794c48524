"""One worker's share of the cache: its pool, its places in the prefix tree, the sequences that run on it.

Why eviction never breaks a path. Say node P is the parent of node C, and the worker holds both.

  1. Whoever uses C uses P: a sequence takes a path from the root, extends it one node at a time, and lets it go whole.
  2. So the last user of C that left did use P, and left C before it left P (`release` goes from the tail to the head),
     and nobody has used C since. P's last user left no earlier than that one did.
  3. Hence if neither is in use, C entered the list of unused blocks before P, and eviction takes the oldest first.

So C is evicted before P: what is held, and what is live, stays connected to the root. check_invariants asserts it.
"""

from __future__ import annotations

from cache_svc.core.errors import Code, OpError
from cache_svc.core.pool import BlockPool
from cache_svc.core.table import Sequence, SwappedSequence
from cache_svc.core.tree import TOKEN_BYTES, PrefixNode, PrefixTree, held_depth, live_depth

Counters = tuple[int, int, int, int, int, int]


class Worker:
    """`index` is its bit in the tree's masks, unique among the workers of the moment."""

    __slots__ = (
        "bit",
        "host",
        "index",
        "node_of",
        "pool",
        "prefix_caching",
        "reported",
        "sequences",
        "swapped",
        "tree",
        "worker_id",
    )

    def __init__(
        self,
        worker_id: int,
        index: int,
        tree: PrefixTree,
        num_blocks: int,
        prefix_caching: bool,
        num_host_blocks: int = 0,
    ) -> None:
        self.worker_id = worker_id
        self.index = index
        self.bit = 1 << index
        self.tree = tree
        self.prefix_caching = prefix_caching
        self.pool = BlockPool(num_blocks, self._forget)
        self.node_of: dict[int, PrefixNode] = {}  # by block id: the blocks in the tree
        self.sequences: dict[int, Sequence] = {}
        self.host = BlockPool(num_host_blocks, _never)  # free or used: nothing in host memory is kept for reuse
        self.swapped: dict[int, SwappedSequence] = {}
        self.reported: Counters | None = None  # what the scheduler knows

    def counters(self) -> Counters:
        """Free, cached and used blocks; blocks evicted since the worker was added; free and used host blocks."""
        pool, host = self.pool, self.host
        return (
            pool.free_blocks,
            pool.cached_blocks,
            pool.used_blocks,
            pool.evicted_blocks_total,
            host.free_blocks,
            host.used_blocks,
        )

    def admit(self, sequence_id: int, token_ids: bytes, path: list[PrefixNode], num_new_tokens: int) -> Sequence:
        """A table for the longest prefix that is stored here and so many tokens after it (0: all), in new blocks.

        `path` is the tree's walk for the tokens. Raises OpError(RESOURCE_EXHAUSTED), having changed nothing, if there
        are too few blocks.
        """
        pool = self.pool
        block_size = self.tree.block_size
        nodes = path[: held_depth(path, self.bit)] if self.prefix_caching else []
        num_blocks = -(-len(token_ids) // self.tree.block_bytes)
        if num_new_tokens:
            num_blocks = min(num_blocks, len(nodes) - (-num_new_tokens // block_size))
        num_live = live_depth(nodes, self.bit)
        # What the hit takes out of the unused blocks cannot be evicted for the rest.
        available = pool.available_blocks - (len(nodes) - num_live)
        if num_blocks - len(nodes) > available:
            raise OpError(
                Code.RESOURCE_EXHAUSTED,
                f"sequence {sequence_id} needs {num_blocks - len(nodes)} more blocks, "
                f"worker {self.worker_id} has {available} (of {pool.num_blocks})",
            )
        table = [node.block_of[self.index] for node in nodes]
        pool.share(table[:num_live])
        pool.revive(table[num_live:])
        for node in nodes[num_live:]:
            node.live |= self.bit
        table += pool.take(num_blocks - len(nodes))
        sequence = Sequence(sequence_id, self, token_ids, table, nodes, len(nodes) * block_size)
        self.sequences[sequence_id] = sequence
        return sequence

    def fork(self, sequence_id: int, token_ids: bytes, parent: Sequence) -> tuple[Sequence, int]:
        """A table for tokens of which the parent has computed all but the last: its whole blocks, which nobody writes
        any more, and a new one for the rest. Also the block whose content belongs into that new one (0: none).

        Raises OpError, having changed nothing: FAILED_PRECONDITION if the parent is not such a one, RESOURCE_EXHAUSTED.
        """
        num_shared = len(token_ids) // TOKEN_BYTES - 1
        shared_bytes = num_shared * TOKEN_BYTES
        begins = parent.tokens[:shared_bytes] == token_ids[:shared_bytes]
        if parent.worker is not self or not begins or parent.num_computed_tokens < num_shared:
            raise OpError(
                Code.FAILED_PRECONDITION,
                f"sequence {sequence_id} cannot fork sequence {parent.sequence_id}, which has not computed the first "
                f"{num_shared} tokens of it on worker {self.worker_id}",
            )
        self.check_room(1)
        num_whole, rest = divmod(num_shared, self.tree.block_size)
        nodes = parent.nodes[:num_whole]
        table = [node.block_of[self.index] for node in nodes] if self.prefix_caching else parent.table[:num_whole]
        self.pool.share(table)
        sequence = Sequence(sequence_id, self, token_ids, table + self.pool.take(1), nodes, num_shared)
        self.sequences[sequence_id] = sequence
        return sequence, parent.table[num_whole] if rest else 0

    def store(self, sequence: Sequence) -> None:
        """Put every whole computed block that is not in the tree yet into it."""
        if not self.prefix_caching:
            return
        tree, index, nodes, table = self.tree, self.index, sequence.nodes, sequence.table
        parent = nodes[-1] if nodes else tree.root
        first, end = len(nodes), sequence.num_computed_tokens // tree.block_size
        for block, key in zip(table[first:end], tree.blocks(sequence.tokens, first, end), strict=True):
            node = parent.children.get(key)
            if node is None:
                node = self.node_of[block] = tree.grow(parent, key, index, block)
            elif node.holders & self.bit:
                # An equal block is here already: ours stays private, theirs must not go while we hold what is below.
                if node.live & self.bit:
                    self.pool.share([node.block_of[index]])
                else:
                    self.pool.revive([node.block_of[index]])
                    node.live |= self.bit
            else:
                node.block_of[index] = block
                node.holders |= self.bit
                node.live |= self.bit
                self.node_of[block] = node
            nodes.append(node)
            parent = node

    def release(self, sequence: Sequence) -> None:
        """The sequence ends. From the tail to the head, so that eviction will meet children before their parents."""
        pool, index, table, nodes = self.pool, self.index, sequence.table, sequence.nodes
        held = [node.block_of[index] for node in nodes]
        private = table[len(held) :]
        if table[: len(held)] != held:  # rare: an equal block of another sequence was there first
            private = [block for block, ours in zip(table, held, strict=False) if block != ours] + private
        pool.recycle(private[::-1])
        others = ~self.bit
        # Users get fewer on the way down, so the nodes that lost their last one are the deepest.
        num_cached = len(pool.drop(held[::-1]))
        for node in nodes[len(nodes) - num_cached :]:
            node.live &= others
        del self.sequences[sequence.sequence_id]

    def swap_out(self, sequence: Sequence) -> SwappedSequence:
        """Host blocks for what is computed of it, and none on the device any more: everything moves, also what others
        share, so that a sequence that waits pins nothing. The content of its table's blocks is to be copied.

        Raises OpError(RESOURCE_EXHAUSTED), having changed nothing, if there are too few host blocks.
        """
        num_blocks = -(-sequence.num_computed_tokens // self.tree.block_size)
        if num_blocks > self.host.free_blocks:
            raise OpError(
                Code.RESOURCE_EXHAUSTED,
                f"worker {self.worker_id}: {num_blocks} host blocks asked for, {self.host.free_blocks} are free "
                f"(of {self.host.num_blocks})",
            )
        swapped = SwappedSequence(
            sequence.sequence_id,
            self,
            bytes(sequence.tokens),
            sequence.num_computed_tokens,
            self.host.take(num_blocks),
        )
        self.release(sequence)
        self.swapped[swapped.sequence_id] = swapped
        return swapped

    def swap_in(self, swapped: SwappedSequence) -> Sequence:
        """Admit it again; what of it is not cached here is to be copied from its host blocks, which are free now.

        Raises OpError(RESOURCE_EXHAUSTED), having changed nothing, if there are too few blocks.
        """
        sequence = self.admit(swapped.sequence_id, swapped.token_ids, self.tree.walk(swapped.token_ids), 0)
        self.forget_swapped(swapped)
        return sequence

    def forget_swapped(self, swapped: SwappedSequence) -> None:
        """Its host blocks are free."""
        self.host.recycle(swapped.host_blocks[::-1])
        del self.swapped[swapped.sequence_id]

    def check_room(self, num_blocks: int) -> None:
        """Raises OpError(RESOURCE_EXHAUSTED) if there are not so many blocks to take."""
        available = self.pool.available_blocks
        if num_blocks > available:
            raise OpError(
                Code.RESOURCE_EXHAUSTED,
                f"worker {self.worker_id}: {num_blocks} more blocks asked for, {available} available "
                f"(of {self.pool.num_blocks})",
            )

    def leave_tree(self) -> None:
        """The worker is gone, and all that it holds."""
        for node in self.node_of.values():
            self.tree.release(node, self.index)
        self.node_of.clear()

    def _forget(self, blocks: list[int]) -> None:
        index, release, pop_node = self.index, self.tree.release, self.node_of.pop
        for block in blocks:
            release(pop_node(block), index)


def _never(blocks: list[int]) -> None:
    raise AssertionError(f"host blocks {blocks} are evicted, though none is cached")


def check_token_bytes(token_ids: bytes) -> None:
    """OpError(INVALID_ARGUMENT) unless these are packed int32."""
    if len(token_ids) % TOKEN_BYTES:
        raise OpError(Code.INVALID_ARGUMENT, f"token_ids: {len(token_ids)} bytes is not a whole number of int32")
