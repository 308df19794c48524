"""What operators ask of a core, between its exchanges: pins, a reset, how full it is.

Whatever these change of a worker's counters, the scheduler hears of it with its next exchange. Times are by the cache's
own clock, which has nothing to do with the scheduler's that comes with exchanges.
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
    """Keep what is cached now of a prefix on these workers (none named: all) for so long (0: for ever). Raises OpError,
    having changed nothing."""
    unknown = sorted(set(worker_ids) - core.workers.keys())
    if unknown:
        raise OpError(Code.NOT_FOUND, f"workers: {', '.join(map(str, unknown[:8]))} not known")
    workers = [worker for worker in core.workers.values() if not worker_ids or worker.worker_id in worker_ids]
    made = core.pins.pin(core.tree, workers, name, token_ids, namespace, now_ms + ttl_ms if ttl_ms else 0)
    core.touch(made.places)
    return made


def unpin(core: CacheCore, name: str) -> None:
    """Raises OpError(NOT_FOUND)."""
    core.touch(core.pins.unpin(name).places)


def expire_pins(core: CacheCore, now_ms: int) -> None:
    """Time has passed."""
    for over in core.pins.expire(now_ms):
        core.touch(over.places)


def forget_unused(
    core: CacheCore, model: str | None = None, lora: str | None = None, cache_salt: str | None = None
) -> dict[int, int]:
    """Forget what is cached and has no user, of the namespaces that have these names (None: whichever); how many blocks
    by worker."""
    wanted = model, lora, cache_salt
    forgotten = dict.fromkeys(core.workers, 0)
    for namespace, root in list(core.tree.roots.items()) if core.tree is not None else ():
        if all(name is None or name == known for name, known in zip(wanted, namespace, strict=True)):
            for worker in core.workers.values():
                worker.host.forget_unused(root)  # first: what is there may be behind what the device has
                forgotten[worker.worker_id] += worker.device.forget_unused(root)
    core.touch(core.workers.values())
    return forgotten


def pinned_tokens(pin: Pin) -> list[tuple[WorkerBlocks, int]]:
    """By worker, how many tokens of the prefix are pinned there."""
    return [(worker, node.end * worker.tree.block_size) for worker, node in pin.places.items()]
