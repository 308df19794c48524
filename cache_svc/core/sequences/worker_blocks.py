"""The blocks of one worker's device and host, and the sequences that have them."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from cache_svc.core.errors import Code, OpError
from cache_svc.core.memory.host import HostMemory
from cache_svc.core.memory.memory import Memory
from cache_svc.core.memory.shares import TENANT_SHARE, TOTAL_SHARE
from cache_svc.core.packing import TOKEN_BYTES
from cache_svc.core.sequences.partial_blocks import keep_partial_block
from cache_svc.core.sequences.sequence import KnownSequence, Sequence, SwappedSequence
from cache_svc.core.tree.nodes import PrefixNode, PrefixSubscription, Root
from cache_svc.core.tree.tree import PrefixTree

PoolCounts = tuple[int, int, int, int, int, int, int]


class AdmitGrant(NamedTuple):
    """The result of `WorkerBlocks.admit`, with the copies that it needs.

    The content of device block `copy_from` (0: none) goes into the first new block of the table. The contents of
    `host_blocks` go into as many blocks, from the first new one on. After these copies the cached tokens are in the
    table.
    """

    sequence: Sequence
    copy_from: int
    host_blocks: array[int]
    num_cached_tokens: int


class WorkerBlocks:
    """One worker. `number` is unique among the present workers. With `host_tier`, nodes that the device evicts go to
    the host."""

    __slots__ = (
        "counted_evictions",
        "device",
        "host",
        "host_tier",
        "index",
        "number",
        "partial_reuse",
        "prefix_caching",
        "reported",
        "sequences",
        "shown",
        "swapped",
        "tree",
        "worker_id",
    )

    def __init__(
        self,
        worker_id: int,
        number: int,
        tree: PrefixTree,
        num_blocks: int,
        prefix_caching: bool,
        partial_reuse: bool,
        num_host_blocks: int,
        host_tier: bool,
        eviction: str,
        retained: tuple[float, float] = (TENANT_SHARE, TOTAL_SHARE),
    ) -> None:
        """`retained`: see Memory."""
        self.worker_id = worker_id
        self.number = number
        self.index = index = 2 * number  # memory index of the device; the host has the next one
        self.tree = tree
        self.prefix_caching = prefix_caching
        self.partial_reuse = prefix_caching and partial_reuse
        tree.partial_reuse |= self.partial_reuse
        self.device = Memory(index, tree, num_blocks, prefix_caching, eviction, retained)
        self.sequences: dict[int, Sequence] = {}
        self.host = HostMemory(index + 1, index, tree, num_host_blocks, eviction, retained)
        self.host_tier = host_tier and prefix_caching and num_host_blocks > 0
        if self.host_tier:
            self.device.lower = self.host
        self.swapped: dict[int, SwappedSequence] = {}
        self.counted_evictions = 0, 0  # of the device, and of the host
        self.reported: PoolCounts | None = None  # the counters that the scheduler knows
        self.shown: PoolCounts | None = None  # the counters that the metrics show

    def counters(self) -> PoolCounts:
        """Free, cached, used blocks; evicted blocks since the worker was added; free, cached, used host blocks."""
        device, host = self.device, self.host
        free, cached = device.free_blocks, device.cached_blocks
        used = device.num_blocks - free - cached
        of_host = host.free_blocks, host.cached_blocks, host.used_blocks
        return free, cached, used, device.evicted_blocks_total, *of_host

    @property
    def is_untouched(self) -> bool:
        """Whether no block was ever handed out."""
        pools_are = self.device.pool.first_untouched == self.host.pool.first_untouched == 1
        return pools_are and not (self.sequences or self.swapped)

    def holds(self, node: PrefixNode) -> bool:
        """Whether the device or the host holds the node."""
        return self.index in node.residencies or self.host.index in node.residencies

    def expire(self, now_ms: int) -> None:
        """Sets the time of both memories, in milliseconds, and ends the retentions that are due."""
        self.device.queue.expire(now_ms)
        if self.host_tier:
            self.host.queue.expire(now_ms)

    def end_exchange(self) -> None:
        """Ends the exchange of both memories: the blocks that its copies have read may be granted again."""
        self.device.end_exchange()
        self.host.end_exchange()

    def leave_tree(self) -> None:
        """The worker is gone. The host leaves first, because its nodes may be below those of the device."""
        self.host.leave_tree()
        self.device.leave_tree()

    def admit(
        self, known: KnownSequence, node: PrefixNode, depth: int, num_new_tokens: int, copies: bool
    ) -> AdmitGrant:
        """Makes a table: the longest prefix stored here, then new blocks for `num_new_tokens` tokens (0: for all).

        `node` and `depth` are the end of the tree's walk for the tokens. With `copies`, the prefix includes what has to
        be copied: blocks of the host that follow those of the device, and with partial reuse the beginning of one more
        block, on the device or the host. Without `copies`, it includes only written blocks of the device. Raises
        OpError(RESOURCE_EXHAUSTED), having changed nothing, if there are too few blocks.
        """
        tree, device = self.tree, self.device
        last, end = node, depth
        # Without prefix caching the sequence gets a private tree: no walk may find the blocks that its forks share.
        node, cached, referenced = device.held(node, depth) if self.prefix_caching else (Root(None), 0, 0)
        if not copies:
            node, cached = self._written_part(node, cached)
            referenced = min(referenced, cached)
        reached = cached  # blocks from the root, including those of the host
        if copies and self.host_tier:
            last, reached = self.host.behind(last, end, node)
        # The cached blocks of the match cannot be evicted for the new blocks.
        available = device.available_blocks - (cached - referenced)
        source, num_copied, on_host = 0, 0, False
        if copies and self.partial_reuse:
            source, num_copied, on_host = self.nearest(node, cached, last, reached, known.token_ids)
        num_blocks = self._table_size(known, reached, num_copied, num_new_tokens)
        if source and num_blocks - cached > available - (not on_host):
            source, num_copied = 0, 0
            num_blocks = self._table_size(known, reached, 0, num_new_tokens)
        if num_blocks - cached > available:
            raise OpError(
                Code.RESOURCE_EXHAUSTED,
                f"sequence {known.sequence_id} needs {num_blocks - cached} more blocks, "
                f"worker {self.worker_id} has {available} (of {device.num_blocks})",
            )
        if cached < node.end:
            node = tree.split(node, cached)
        table = device.use_path(node, known.metadata.priority)
        host_blocks = array("i")
        if reached > cached:
            if reached < last.end:
                last = tree.split(last, reached)
            host_blocks = self.host.reuse(last, node, known.metadata.priority)
        num_begun_tokens = cached * tree.block_size
        if source and on_host:
            self.host.sources.add(source)
            host_blocks.append(source)
            source = 0
        elif source:
            device.sources.add(source)
            num_begun_tokens += num_copied
        table += device.take(num_blocks - cached)
        sequence = self._begin(known, table, node, num_begun_tokens)
        return AdmitGrant(sequence, source, host_blocks, reached * tree.block_size + num_copied)

    def nearest(
        self, node: PrefixNode, depth: int, host_node: PrefixNode, host_depth: int, token_ids: bytes
    ) -> tuple[int, int, bool]:
        """Finds the block that has the longest common beginning with the tokens after a match. For partial reuse only.

        The match ends at `node`, `depth` on the device and at `host_node`, `host_depth` with the host's blocks. Returns
        the block (0: none has a token in common), the number of tokens, and whether the block is on the host.
        """
        block, count = (0, 0) if host_depth > depth else self.tree.nearest(node, depth, token_ids, self.index)
        if self.host_tier:
            host_block, host_count = self.tree.nearest(host_node, host_depth, token_ids, self.host.index)
            if host_count > count:
                return host_block, host_count, True
        return block, count, False

    def _table_size(self, known: KnownSequence, cached: int, num_copied: int, num_new_tokens: int) -> int:
        num_blocks = -(-len(known.token_ids) // self.tree.block_bytes)
        if not num_new_tokens:
            return num_blocks
        return min(num_blocks, cached - (-(num_copied + num_new_tokens) // self.tree.block_size))

    def _begin(self, known: KnownSequence, table: array[int], node: PrefixNode, num_computed_tokens: int) -> Sequence:
        sequence = self.sequences[known.sequence_id] = Sequence(known, self.worker_id, table, node, num_computed_tokens)
        if node.parent is not None:
            sequence.unwritten = node.residencies[self.index].unwritten
        if known.metadata.retention:
            self.device.retain(node, known.metadata.retention, known.metadata.tenant)
        return sequence

    def fork(self, subscription: PrefixSubscription, parent: Sequence) -> tuple[Sequence, int]:
        """Makes a table for a fork. The parent must have computed all tokens of the fork except the last token. The
        table has the parent's whole blocks, which are never written again, and one new block. Also returns the block to
        copy into the new one (0: none).

        Raises OpError, having changed nothing: FAILED_PRECONDITION if the parent has not computed these tokens here,
        has planned tokens, or has private blocks because equal blocks were stored first; RESOURCE_EXHAUSTED if no block
        is available.
        """
        token_ids = subscription.token_ids
        num_shared = len(token_ids) // TOKEN_BYTES - 1
        shared_bytes = num_shared * TOKEN_BYTES
        begins = subscription.root is parent.root and parent.tokens[:shared_bytes] == token_ids[:shared_bytes]
        if parent.worker_id != self.worker_id or not begins or parent.num_computed_tokens < num_shared:
            raise OpError(
                Code.FAILED_PRECONDITION,
                f"sequence {subscription.sequence_id} cannot fork sequence {parent.sequence_id}, "
                f"which has not computed the same first {num_shared} tokens on worker {self.worker_id}",
            )
        _check_written(parent)
        num_whole, rest = divmod(num_shared, self.tree.block_size)
        if self.prefix_caching and parent.node.end < num_whole:
            raise OpError(
                Code.FAILED_PRECONDITION,
                f"sequence {parent.sequence_id} cannot be forked: equal blocks are stored instead of its own",
            )
        self.check_room(1)
        if not self.prefix_caching:
            self.store(parent)  # in a private tree of the family, which no walk reaches
        node = self.tree.cut(parent.node, num_whole)
        table = self.device.use_path(node, subscription.metadata.priority) + self.device.take(1)
        return self._begin(subscription, table, node, num_shared), parent.table[num_whole] if rest else 0

    def plan(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """The next step computes the sequence up to this number of tokens. Sequences admitted from now on can share
        them."""
        sequence.num_computed_tokens, sequence.unwritten = num_computed_tokens, True
        if self.prefix_caching and num_computed_tokens // self.tree.block_size > sequence.node.end:
            self.store(sequence)

    def _written_part(self, node: PrefixNode, depth: int) -> tuple[PrefixNode, int]:
        """Shortens a held path so that it ends before the first block that an unsent step writes."""
        while node.parent is not None and node.residencies[self.index].unwritten:
            node = node.parent
            depth = node.end
        return node, depth

    def written(self, sequence: Sequence) -> None:
        """The step that computes the planned tokens is sent. The sequence has planned these tokens itself, or it shares
        those of another sequence."""
        sequence.unwritten = False
        node = sequence.node
        while node.parent is not None and (residency := node.residencies[self.index]).unwritten:
            residency.unwritten = False
            if node.points or node.parent.points:
                self.tree.can_be_copied(node)
            node = node.parent

    def store(self, sequence: Sequence) -> None:
        """Stores the whole computed blocks of the sequence in the tree, up to a block that another sequence is about to
        write. A sequence that is `alone` also stops before a block that is stored already."""
        tree, device, tokens, table = self.tree, self.device, sequence.tokens, sequence.table
        node, block_bytes, metadata = sequence.node, tree.block_bytes, sequence.metadata
        depth, end = node.end, sequence.num_computed_tokens // tree.block_size
        while depth < end:
            begin = depth * block_bytes
            child = node.children.get(tokens[begin : begin + block_bytes])
            if child is None:
                reached = min(end, depth + tree.max_node_blocks)
                child = tree.grow(node, tokens[begin : reached * block_bytes])
                device.hold(child, table[depth:reached], metadata.priority).unwritten = sequence.unwritten
                if node.points and not sequence.unwritten:
                    tree.can_be_copied(child)
            else:
                reached = tree.follow(child, tokens, end)
                if reached < child.end:
                    child = tree.split(child, reached)
                residency = child.residencies.get(self.index)
                if residency is not None and (residency.unwritten or sequence.alone):
                    break  # unwritten: if the other sequence is taken out of the step, the block gets no content
                if residency is None:
                    device.hold(child, table[depth:reached], metadata.priority).unwritten = sequence.unwritten
                    if not sequence.unwritten:
                        tree.can_be_copied(child)
                else:
                    # An equal block is stored already. Ours stays private. We use the other one too, because our next
                    # nodes are below it.
                    device.use(residency, metadata.priority)
                    sequence.duplicates += table[depth:reached]
            node, depth = child, reached
        stored, sequence.node = node is not sequence.node, node
        if stored and metadata.retention:
            device.retain(node, metadata.retention, metadata.tenant)

    def release(self, sequence: Sequence, discard: bool = False) -> None:
        """The sequence leaves the device. It leaves its path from the end to the root, so that eviction meets children
        first.

        With `discard`, the cache forgets the sequence's blocks that have no other user, and the blocks below them.
        """
        private = sequence.duplicates + sequence.table[sequence.node.end :]
        kept = self.partial_reuse and not (discard or sequence.unwritten)
        if kept and keep_partial_block(self.device, sequence):
            del private[len(sequence.duplicates)]
        private.reverse()
        self.device.pool.give_back(private)
        self.device.leave_path(sequence.node)
        del self.sequences[sequence.sequence_id]
        if discard:
            self._discard(sequence.node)

    def _discard(self, node: PrefixNode) -> None:
        """Forgets the unused nodes on the path to the node, and the unused nodes below them."""
        top = None
        while node.parent is not None:
            residency = node.residencies.get(self.index)
            if residency is not None and not residency.users:
                top = node
            node = node.parent
        if top is not None:
            self.host.forget_unused(top)  # first, because its nodes may be below those of the device
            self.device.forget_unused(top)

    def swap_out(self, sequence: Sequence) -> SwappedSequence:
        """Moves the computed tokens of a sequence to host blocks and frees its device blocks.

        It moves all of them, also the tokens in blocks that other sequences share. So a swapped-out sequence uses no
        device block. The caller copies the content of the table's blocks. Raises OpError, having changed nothing:
        FAILED_PRECONDITION if the sequence has planned tokens, RESOURCE_EXHAUSTED if there are too few host blocks.
        """
        _check_written(sequence)
        num_blocks = -(-sequence.num_computed_tokens // self.tree.block_size)
        available = self.host.available_blocks
        if num_blocks > available:
            raise OpError(
                Code.RESOURCE_EXHAUSTED,
                f"worker {self.worker_id}: {num_blocks} host blocks asked for, {available} available "
                f"(of {self.host.num_blocks})",
            )
        swapped = SwappedSequence(
            sequence.sequence_id,
            self.worker_id,
            sequence.tokens,
            sequence.num_computed_tokens,
            self.host.take(num_blocks),
            sequence.root,
            sequence.metadata,
        )
        self.release(sequence)
        self.swapped[swapped.sequence_id] = swapped
        return swapped

    def swap_in(self, swapped: SwappedSequence) -> tuple[Sequence, int]:
        """Admits a swapped-out sequence again. Also returns how many of its blocks the device has cached.

        The other blocks are to be copied from its host blocks, which are freed at the end of the exchange. Raises
        OpError(RESOURCE_EXHAUSTED), having changed nothing, if there are too few blocks.
        """
        node, depth = self.tree.walk(swapped.token_ids, swapped.root, 0)
        sequence = self.admit(swapped, node, depth, 0, copies=False).sequence
        self.host.give_back_later(swapped.host_blocks[::-1])
        del self.swapped[swapped.sequence_id]
        return sequence, sequence.node.end

    def forget_swapped(self, swapped: SwappedSequence) -> None:
        """Frees the host blocks of a swapped-out sequence."""
        self.host.pool.give_back(swapped.host_blocks[::-1])
        del self.swapped[swapped.sequence_id]

    def check_room(self, num_blocks: int) -> None:
        """Raises OpError(RESOURCE_EXHAUSTED) if fewer than `num_blocks` blocks are available."""
        available = self.device.available_blocks
        if num_blocks > available:
            raise OpError(
                Code.RESOURCE_EXHAUSTED,
                f"worker {self.worker_id}: {num_blocks} more blocks asked for, {available} available "
                f"(of {self.device.num_blocks})",
            )


def _check_written(sequence: Sequence) -> None:
    if sequence.unwritten:
        raise OpError(
            Code.FAILED_PRECONDITION, f"sequence {sequence.sequence_id} has planned tokens, not committed yet"
        )
