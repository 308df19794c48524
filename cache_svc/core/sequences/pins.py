"""Prefixes that an operator has pinned: the cache does not evict them.

A pin counts as one more user of each block on a path of the prefix tree, like a sequence that never runs. A pin keeps
the blocks that are cached when the pin is made, on the workers that have them. When a worker leaves, the pin keeps
nothing there. A pin without a worker is removed.

Pins must not stop requests that would run without them. So pins get only a share of a worker's blocks. If too few
blocks are free to admit a request on an idle worker, or to continue the only request of a worker, the scheduler sends a
GiveUpPinsOp and the cache removes all pins of that worker (`give_up`). The cache cannot decide this, because only the
scheduler knows the waiting requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cache_svc.core.errors import Code, OpError
from cache_svc.core.packing import TOKEN_BYTES, check_token_bytes
from cache_svc.core.sequences.worker_blocks import WorkerBlocks
from cache_svc.core.tree.nodes import Namespace, PrefixNode
from cache_svc.core.tree.tree import PrefixTree

DEFAULT_SHARE = 0.5
MAX_PINS = 256
MAX_NAME_CHARS = 128


@dataclass(slots=True)
class Pin:
    """`last_nodes`: by worker, the node where the pinned prefix ends."""

    name: str
    namespace: Namespace
    expires_ms: int  # by the caller's clock; 0: never
    last_nodes: dict[WorkerBlocks, PrefixNode] = field(default_factory=dict)


class Pins:
    """All pins by name, until the scheduler's connection ends. They take at most `share` of each worker's blocks."""

    def __init__(self, share: float) -> None:
        self.by_name: dict[str, Pin] = {}
        self._share = share

    def pin(
        self,
        tree: PrefixTree | None,
        workers: Sequence[WorkerBlocks],
        name: str,
        token_ids: bytes,
        namespace: Namespace,
        expires_ms: int,
    ) -> Pin:
        """Pins the whole cached blocks of the prefix on these workers. If it raises OpError, nothing has changed."""
        self._check_name(name)
        check_token_bytes(token_ids)
        if tree is None:
            raise OpError(Code.NOT_FOUND, "there is no worker, so nothing is cached")
        num_tokens = len(token_ids) // TOKEN_BYTES
        if num_tokens < tree.block_size:
            raise OpError(
                Code.INVALID_ARGUMENT,
                f"token_ids: has {num_tokens} tokens, but only whole blocks of {tree.block_size} tokens can be pinned",
            )
        namespace = _the_only_model(tree, namespace)
        found: dict[WorkerBlocks, tuple[PrefixNode, int]] = {}
        if (root := tree.roots.get(namespace)) is not None:
            # A match excludes the last token. A pin includes it, so the walk gets one more token.
            node, depth = tree.walk(token_ids + bytes(TOKEN_BYTES), root, 0)
            for worker in workers:
                if worker.prefix_caching:
                    last, num_blocks, _ = worker.device.held(node, depth)
                    if num_blocks:
                        found[worker] = last, num_blocks
        if not found:
            raise OpError(Code.NOT_FOUND, f"token_ids: no block of the {num_tokens} tokens is cached on these workers")
        for worker, (node, depth) in found.items():
            self._check_share(worker, node, depth)
        pin = Pin(name, namespace, expires_ms)
        for worker, (node, depth) in found.items():
            pin.last_nodes[worker] = last = tree.cut(node, depth)
            worker.device.use_path(last)
        self.by_name[name] = pin
        return pin

    def _check_name(self, name: str) -> None:
        if not 1 <= len(name) <= MAX_NAME_CHARS:
            raise OpError(
                Code.INVALID_ARGUMENT, f"name: has {len(name)} characters, which is not within 1..{MAX_NAME_CHARS}"
            )
        if name in self.by_name:
            raise OpError(Code.ALREADY_EXISTS, f"name: {name!r} is pinned already; unpin it first")
        if len(self.by_name) >= MAX_PINS:
            raise OpError(Code.RESOURCE_EXHAUSTED, f"there are {MAX_PINS} pins, which is the limit")

    def _check_share(self, worker: WorkerBlocks, node: PrefixNode, depth: int) -> None:
        pinned = self.pinned_nodes(worker)
        more = 0
        while node.parent is not None and node not in pinned:
            more += min(depth, node.end) - node.start
            node = node.parent
        before = _num_blocks(pinned)
        limit = self.max_blocks(worker)
        if before + more > limit:
            raise OpError(
                Code.RESOURCE_EXHAUSTED,
                f"token_ids: would pin {more} more blocks of worker {worker.worker_id}, which has {before} pinned "
                f"blocks; the limit is {limit} (of {worker.device.num_blocks})",
            )

    def unpin(self, name: str) -> Pin:
        """Removes a pin. Raises OpError(NOT_FOUND)."""
        pin = self.by_name.get(name)
        if pin is None:
            raise OpError(Code.NOT_FOUND, f"name: nothing is pinned as {name!r}")
        del self.by_name[name]
        for worker, node in pin.last_nodes.items():
            worker.device.leave_path(node)
        return pin

    def expire(self, now_ms: int) -> list[Pin]:
        """Removes and returns the expired pins."""
        over = [pin.name for pin in self.by_name.values() if pin.expires_ms and pin.expires_ms <= now_ms]
        return [self.unpin(name) for name in over]

    def forget_worker(self, worker: WorkerBlocks) -> None:
        """The worker is gone, with its blocks."""
        for pin in list(self.by_name.values()):
            if pin.last_nodes.pop(worker, None) is not None and not pin.last_nodes:
                del self.by_name[pin.name]

    def give_up(self, worker: WorkerBlocks) -> bool:
        """Removes all pins of the worker, because a request has no room beside them. Returns whether there were any."""
        last_nodes = self.last_nodes(worker)
        for node in last_nodes:
            worker.device.leave_path(node)
        self.forget_worker(worker)
        return bool(last_nodes)

    def max_blocks(self, worker: WorkerBlocks) -> int:
        """How many blocks of the worker may be pinned."""
        return int(worker.device.num_blocks * self._share)

    def num_blocks(self, worker: WorkerBlocks) -> int:
        """How many blocks of the worker are pinned."""
        return _num_blocks(self.pinned_nodes(worker))

    def last_nodes(self, worker: WorkerBlocks) -> list[PrefixNode]:
        """The last node of each pin on the worker."""
        return [pin.last_nodes[worker] for pin in self.by_name.values() if worker in pin.last_nodes]

    def pinned_nodes(self, worker: WorkerBlocks) -> set[PrefixNode]:
        """The nodes on the paths of all pins on the worker."""
        nodes: set[PrefixNode] = set()
        for node in self.last_nodes(worker):
            while node.parent is not None and node not in nodes:
                nodes.add(node)
                node = node.parent
        return nodes


def _num_blocks(nodes: Iterable[PrefixNode]) -> int:
    return sum(node.end - node.start for node in nodes)


def _the_only_model(tree: PrefixTree, namespace: Namespace) -> Namespace:
    """Completes a namespace without a model, if the cache has only one model with the same LoRA and salt."""
    if namespace.model:
        return namespace
    alike = [known for known in tree.roots if known[1:] == namespace[1:]]
    if len(alike) > 1:
        models = ", ".join(sorted(repr(known.model) for known in alike))
        raise OpError(Code.INVALID_ARGUMENT, f"namespace.model: name one of {models}")
    return alike[0] if alike else namespace
