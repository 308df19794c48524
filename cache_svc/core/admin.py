"""Operator calls on a core, between its exchanges: pin, unpin, and forget the unused blocks (a reset).

If a call changes a worker's counters, the scheduler learns of it in its next exchange. Times are by the cache's own
clock. It has no relation to the scheduler's clock, which comes with exchanges.
"""

from __future__ import annotations

from collections.abc import Sequence

from cache_svc.core.cache import CacheCore
from cache_svc.core.errors import Code, OpError
from cache_svc.core.sequences.pins import Pin
from cache_svc.core.sequences.worker_blocks import WorkerBlocks
from cache_svc.core.tree.nodes import Namespace

UNNAMED = Namespace()


def pin(
    core: CacheCore,
    name: str,
    token_ids: bytes,
    namespace: Namespace = UNNAMED,
    worker_ids: Sequence[int] = (),
    ttl_ms: int = 0,
    now_ms: int = 0,
) -> Pin:
    """Pins the cached part of a prefix on these workers (none named: all workers) for `ttl_ms` (0: for ever).

    Raises OpError, having changed nothing.
    """
    unknown = sorted(set(worker_ids) - core.workers.keys())
    if unknown:
        raise OpError(Code.NOT_FOUND, f"workers: {', '.join(map(str, unknown[:8]))} not known")
    workers = [worker for worker in core.workers.values() if not worker_ids or worker.worker_id in worker_ids]
    made = core.pins.pin(core.tree, workers, name, token_ids, namespace, now_ms + ttl_ms if ttl_ms else 0)
    core.touch(made.last_nodes)
    return made


def unpin(core: CacheCore, name: str) -> None:
    """Raises OpError(NOT_FOUND)."""
    core.touch(core.pins.unpin(name).last_nodes)


def expire_pins(core: CacheCore, now_ms: int) -> None:
    """Removes the expired pins."""
    for over in core.pins.expire(now_ms):
        core.touch(over.last_nodes)


def forget_unused(
    core: CacheCore, model: str | None = None, lora: str | None = None, cache_salt: str | None = None
) -> dict[int, int]:
    """Forgets the unused blocks of the namespaces with these names (None: any name). Also clears the record of evicted
    prefixes. Returns the number of forgotten device blocks by worker."""
    wanted = model, lora, cache_salt
    forgotten = dict.fromkeys(core.workers, 0)
    for namespace, root in list(core.tree.roots.items()) if core.tree is not None else ():
        if all(name is None or name == known for name, known in zip(wanted, namespace, strict=True)):
            for worker in core.workers.values():
                worker.host.forget_unused(root)  # first, because its nodes may be below those of the device
                forgotten[worker.worker_id] += worker.device.forget_unused(root)
    if core.tree is not None:
        core.tree.evicted.clear()
    core.touch(core.workers.values())
    return forgotten


def pinned_tokens(pin: Pin) -> list[tuple[WorkerBlocks, int]]:
    """Returns, for each worker, how many tokens of the prefix are pinned there."""
    return [(worker, node.end * worker.tree.block_size) for worker, node in pin.last_nodes.items()]
