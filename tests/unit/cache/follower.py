"""Rebuilds the stored blocks from events alone, and checks each event against them."""

from __future__ import annotations

from hashlib import blake2b

from cache_svc.core.cache import CacheCore
from cache_svc.core.tree.events import EventLog, Watcher
from cache_svc.core.tree.nodes import PartialBlock, PrefixNode
from cache_svc.core.tree.tree import PrefixTree
from paceline.v1 import cache_pb2 as pb

State = dict[tuple[int, int], dict[int, int]]  # worker and tier: prefix id -> block


def digest(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def chained(parent: int, tokens: bytes) -> int:
    return digest(parent.to_bytes(8, "little") + tokens)


def namespace_id(model: str = "", lora: str = "", salt: str = "") -> int:
    return digest(b"".join(name.encode() + b"\0" for name in (model, lora, salt)))


def stored_in(core: CacheCore) -> State:
    """The state of the tree. Computes the prefix ids anew, and does not read those that the nodes keep."""
    tree, state = core.tree, State()
    memories = {}
    for worker in core.workers.values():
        memories[worker.index] = worker.worker_id, pb.CACHE_TIER_DEVICE
        memories[worker.host.index] = worker.worker_id, pb.CACHE_TIER_HOST

    def go_down(node: PrefixNode, parent: int) -> None:
        assert tree is not None
        ids = []
        for begin in range(0, len(node.key), tree.block_bytes):
            parent = chained(parent, node.key[begin : begin + tree.block_bytes])
            ids.append(parent)
        for index, residency in node.residencies.items():
            state.setdefault(memories[index], {}).update(zip(ids, residency.blocks, strict=True))
        for child in node.children.values():
            if not isinstance(child, PartialBlock):
                go_down(child, parent)

    for namespace, root in tree.roots.items() if tree else ():
        for child in root.children.values():
            if not isinstance(child, PartialBlock):
                go_down(child, namespace_id(*namespace))
    return state


class Follower:
    def __init__(self) -> None:
        self.stored: State = {}
        self.last = 0
        self.num_snapshots = 0
        self.watcher: Watcher | None = None
        self._in_snapshot = False

    def join(self, log: EventLog, tree: PrefixTree | None) -> None:
        """Joins for the first time, or after the last event seen."""
        log.with_tokens = True
        self.watcher = log.watch(tree, self.last, lambda watcher: None)

    def leave(self) -> None:
        assert self.watcher is not None
        self.watcher.leave()
        self.watcher = None
        if self._in_snapshot:
            self._in_snapshot, self.last = False, 0

    def read(self, at_most: int = 1_000_000) -> None:
        """Raises Behind."""
        assert self.watcher is not None
        for _ in range(at_most):
            event = self.watcher.take()
            if event is None:
                return
            self.apply(pb.WatchEventsResponse.FromString(event.SerializeToString()))

    def apply(self, event: pb.WatchEventsResponse) -> None:
        number, kind = event.sequence_number, event.WhichOneof("event")
        if kind == "snapshot":
            assert self._in_snapshot == event.snapshot.complete
            self._in_snapshot = not event.snapshot.complete
            if self._in_snapshot:
                self.stored = {}
                self.num_snapshots += 1
            assert number == self.last or not event.snapshot.complete
        elif self._in_snapshot:
            assert (kind, number) == ("stored", self.last)
        else:
            assert number == self.last + 1, "an event is missing or repeated"
        self.last = number
        if kind == "stored":
            self._store(event.stored)
        elif kind == "removed":
            removed = event.removed
            there = self.stored[removed.worker, removed.tier]
            assert len(removed.prefix_ids) == len(removed.block_ids) > 0
            for prefix, block in zip(removed.prefix_ids, removed.block_ids, strict=True):
                assert there.pop(prefix) == block
        elif kind == "cleared":
            self.stored = {key: held for key, held in self.stored.items() if key[0] != event.cleared.worker}

    def _store(self, stored: pb.BlockStored) -> None:
        there = self.stored.setdefault((stored.worker, stored.tier), {})
        parent, num_blocks = stored.parent_prefix_id, len(stored.block_ids)
        above = [held for (worker, _), held in self.stored.items() if worker == stored.worker and parent in held]
        assert bool(above) == (stored.start_block > 0), "the parent of a stored run is not stored"
        size, rest = divmod(len(stored.token_ids), num_blocks)
        assert (rest, size) == (0, 4 * stored.block_size)
        assert len(stored.prefix_ids) == num_blocks > 0
        for i, (prefix, block) in enumerate(zip(stored.prefix_ids, stored.block_ids, strict=True)):
            parent = chained(parent, stored.token_ids[i * size : (i + 1) * size])
            assert parent == prefix
            assert prefix not in there
            assert block not in there.values()
            there[prefix] = block
        assert not stored.namespace.cache_salt

    def non_empty(self) -> State:
        return {key: held for key, held in self.stored.items() if held}
