"""Numbered events about stored blocks, for watchers. The log keeps the most recent events.

A memory reports each node that it begins to hold or forgets. The log is off until the first watcher connects: it
records no event and computes no prefix id, and a report costs one test. Later the log counts the events that it records
while it has no watcher. When they are more than it keeps, it switches off again until the next watcher connects.

The kept events are the only queue. A watcher is just the number of its next event, so a slow watcher costs no memory.
It fails when that event is no longer kept.

A watcher that cannot continue from a kept event begins with a snapshot of the present state. The snapshot copies no
tokens, ids or blocks, it refers to them. That is safe, because the code never changes them in place: it replaces them.
The watcher turns the snapshot into messages as fast as it reads.

Prefix ids are blake2b chains and the same in all processes. An id stands for the namespace and all tokens up to the end
of its block. The tree's nodes keep their ids, so each block is hashed once. No event is about a partial block.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from hashlib import blake2b

from cache_svc.core.packing import TOKEN_BYTES
from cache_svc.core.tree.nodes import BlockResidency, Namespace, PartialBlock, PrefixNode, Root
from cache_svc.core.tree.tree import PrefixTree
from paceline.v1 import cache_pb2 as pb

ID_BYTES = 8
DEFAULT_KEPT = 10_000


class Behind(Exception):
    """The next event of a watcher is no longer kept."""


class Recorder:
    """Records the events of one memory."""

    __slots__ = ("_log", "tier", "worker_id")

    def __init__(self, log: EventLog, worker_id: int, tier: pb.CacheTier.ValueType) -> None:
        self._log = log
        self.worker_id = worker_id
        self.tier = tier

    def stored(self, residency: BlockResidency) -> None:
        """The memory holds this node from now on. The worker already holds the node's parent, on the device or the
        host."""
        if not self._log.is_on or isinstance(residency.node, PartialBlock):
            return
        node = residency.node
        parent, block_bytes = node.parent, len(node.key) // len(residency.blocks)
        assert parent is not None
        ids = prefix_ids(node, block_bytes)
        assert parent.prefix_ids is not None  # since its child's ids are known
        event = pb.WatchEventsResponse()
        self._fill(event, residency.blocks, ids, parent.prefix_ids[-1], node.start, node.key, _namespace(node))
        self._log.record(event)

    def removed(self, residency: BlockResidency) -> None:
        """The memory is about to forget this node, which is still in the tree."""
        if not self._log.is_on or isinstance(residency.node, PartialBlock):
            return
        ids = prefix_ids(residency.node, len(residency.node.key) // len(residency.blocks))
        removed = pb.BlockRemoved(worker=self.worker_id, block_ids=residency.blocks, prefix_ids=ids, tier=self.tier)
        self._log.record(pb.WatchEventsResponse(removed=removed))

    def _fill(
        self,
        event: pb.WatchEventsResponse,
        blocks: array[int],
        ids: array[int],
        parent_id: int,
        start: int,
        key: bytes,
        namespace: Namespace,
    ) -> None:
        stored = event.stored
        stored.worker, stored.tier, stored.start_block = self.worker_id, self.tier, start
        stored.parent_prefix_id, stored.block_size = parent_id, len(key) // (len(blocks) * TOKEN_BYTES)
        if self._log.with_tokens:
            stored.token_ids = key
        stored.block_ids.extend(blocks)
        stored.prefix_ids.extend(ids)
        stored.namespace.model, stored.namespace.lora = namespace.model, namespace.lora


class EventLog:
    """The last `kept` events, and their watchers. `with_tokens`: events contain the blocks' tokens, which are the
    prompts and answers of users."""

    def __init__(self, kept: int = DEFAULT_KEPT, first_number: int = 1, *, with_tokens: bool = False) -> None:
        self.kept = kept
        self.with_tokens = with_tokens
        self.last = first_number - 1
        self.is_on = False
        self.watchers: list[Watcher] = []
        self._events: dict[int, pb.WatchEventsResponse] = {}  # by number
        self._num_unwatched = 0
        self._recorders: dict[int, Recorder] = {}  # by memory index

    @property
    def oldest(self) -> int:
        """The number of the first kept event, or of the next event if none is kept."""
        return self.last - len(self._events) + 1

    def recorder(self, index: int, worker_id: int, tier: pb.CacheTier.ValueType = pb.CACHE_TIER_DEVICE) -> Recorder:
        """Makes the recorder of one memory of an added worker."""
        recorder = self._recorders[index] = Recorder(self, worker_id, tier)
        return recorder

    def clear_worker(self, worker_id: int) -> None:
        """The worker and its memories are gone."""
        indexes = [index for index, recorder in self._recorders.items() if recorder.worker_id == worker_id]
        for index in indexes:
            del self._recorders[index]
        if indexes and self.is_on:
            self.record(pb.WatchEventsResponse(cleared=pb.WorkerCleared(worker=worker_id)))

    def clear(self) -> None:
        """All workers are gone."""
        for worker_id in sorted({recorder.worker_id for recorder in self._recorders.values()}):
            self.clear_worker(worker_id)

    def record(self, event: pb.WatchEventsResponse) -> None:
        """Numbers an event, keeps it, and wakes the watchers."""
        self.last += 1
        event.sequence_number = self.last
        self._events[self.last] = event
        self._events.pop(self.last - self.kept, None)
        for watcher in self.watchers:
            watcher.wake()
        if not self.watchers:
            self._num_unwatched += 1
            if self._num_unwatched > self.kept:  # a watcher that comes back now needs a snapshot in any case
                self._switch_off()

    def _switch_off(self) -> None:
        self.is_on = False
        self._events.clear()
        self.last += 1  # stands for the events that are not recorded: no watcher can continue across this number

    def watch(self, tree: PrefixTree | None, after: int, wake: Callable[[Watcher], None]) -> Watcher:
        """Adds a watcher. It begins after the event `after`, or with a snapshot of the tree.

        The log calls `wake` whenever there is something to take. `wake` must not fail.
        """
        if after and self.is_on and self.oldest - 1 <= after <= self.last:
            watcher = Watcher(self, after + 1, iter(()), wake)
        else:
            self.is_on = True
            watcher = Watcher(self, self.last + 1, self._snapshot(tree), wake)
        self.watchers.append(watcher)
        self._num_unwatched = 0
        return watcher

    def event(self, number: int) -> pb.WatchEventsResponse:
        """One of the kept events."""
        return self._events[number]

    def _snapshot(self, tree: PrefixTree | None) -> Iterator[pb.WatchEventsResponse]:
        runs: list[_Run] = []
        if tree is None:
            return _messages(runs, 0, {}, self.last, with_tokens=self.with_tokens)
        tops = [(_Run(None, b"", root.prefix_ids, []), root) for root in tree.roots.values()]
        for top, root in tops:
            top.namespace = _namespace(root)
        stack = [(top, node) for top, root in tops for node in root.children.values()]
        while stack:
            parent, node = stack.pop()
            if isinstance(node, PartialBlock):
                continue
            held = [(index, residency.blocks) for index, residency in node.residencies.items()]
            run = _Run(parent, node.key, node.prefix_ids, held)
            runs.append(run)
            stack += [(run, child) for child in node.children.values()]
        return _messages(runs, tree.block_bytes, dict(self._recorders), self.last, with_tokens=self.with_tokens)


class Watcher:
    """Reads the log. `number` is that of the next event to take, after the snapshot."""

    __slots__ = ("_log", "_snapshot", "_wake", "number")

    def __init__(
        self, log: EventLog, number: int, snapshot: Iterator[pb.WatchEventsResponse], wake: Callable[[Watcher], None]
    ) -> None:
        self.number = number
        self._log = log
        self._snapshot = snapshot
        self._wake = wake

    @property
    def is_behind(self) -> bool:
        """Whether the log has dropped the watcher's next event."""
        return self.number < self._log.oldest

    def wake(self) -> None:
        """Tells the stream that it can read a message."""
        self._wake(self)

    def take(self) -> pb.WatchEventsResponse | None:
        """Returns the next message, or None if there is none now. Raises Behind."""
        if self.is_behind:
            raise Behind(f"event {self.number} is not kept any more: the log keeps the last {self._log.kept} events")
        event = next(self._snapshot, None)
        if event is None and self.number <= self._log.last:
            event = self._log.event(self.number)
            self.number += 1
        return event

    def leave(self) -> None:
        """Ends the subscription to the log."""
        self._log.watchers.remove(self)


class _Run:
    """A node at the time of the snapshot. Taking the snapshot blocks everything else, so it stores references only.
    `end` and `namespace` are computed when the node is sent."""

    __slots__ = ("end", "held", "ids", "key", "namespace", "parent")

    namespace: Namespace

    def __init__(
        self, parent: _Run | None, key: bytes, ids: array[int] | None, held: list[tuple[int, array[int]]]
    ) -> None:
        self.parent = parent
        self.key = key
        self.ids = ids
        self.held = held  # blocks by memory index
        self.end = 0


def _messages(
    runs: list[_Run], block_bytes: int, recorders: dict[int, Recorder], number: int, *, with_tokens: bool
) -> Iterator[pb.WatchEventsResponse]:
    yield pb.WatchEventsResponse(sequence_number=number, snapshot=pb.Snapshot(with_tokens=with_tokens))
    for run in runs:  # parents before their children
        parent = run.parent
        assert parent is not None
        if parent.ids is None:  # a root
            parent.ids = array("Q", [namespace_id(parent.namespace)])
        if run.ids is None:
            run.ids = _chain(parent.ids[-1], run.key, block_bytes)
        run.end = parent.end + len(run.key) // block_bytes
        run.namespace = parent.namespace
        for index, blocks in run.held:
            event = pb.WatchEventsResponse(sequence_number=number)
            recorders[index]._fill(event, blocks, run.ids, parent.ids[-1], parent.end, run.key, run.namespace)
            yield event
    yield pb.WatchEventsResponse(sequence_number=number, snapshot=pb.Snapshot(complete=True))


def prefix_ids(node: PrefixNode, block_bytes: int) -> array[int]:
    """Returns the ids of the node's blocks. Computes and stores those that are missing, here and above."""
    above = node
    missing = []
    while above.prefix_ids is None and above.parent is not None:
        missing.append(above)
        above = above.parent
    ids = above.prefix_ids
    if ids is None:
        ids = above.prefix_ids = array("Q", [namespace_id(_namespace(above))])
    for below in reversed(missing):
        ids = below.prefix_ids = _chain(ids[-1], below.key, block_bytes)
    return ids


def namespace_id(namespace: Namespace) -> int:
    """The parent id of the first blocks of the namespace's sequences."""
    named = b"".join(name.encode() + b"\0" for name in namespace)
    return int.from_bytes(blake2b(named, digest_size=ID_BYTES).digest(), "little")


def _chain(parent_id: int, tokens: bytes, block_bytes: int) -> array[int]:
    ids = array("Q")
    digest = parent_id.to_bytes(ID_BYTES, "little")
    for begin in range(0, len(tokens), block_bytes):
        digest = blake2b(digest + tokens[begin : begin + block_bytes], digest_size=ID_BYTES).digest()
        ids.append(int.from_bytes(digest, "little"))
    return ids


def _namespace(node: PrefixNode) -> Namespace:
    while node.parent is not None:
        node = node.parent
    assert isinstance(node, Root)
    assert node.namespace is not None, "no events are recorded about private trees"
    return node.namespace
