"""Invariants of every exchange between scheduler and cache, and of every plan."""

from __future__ import annotations

import numpy as np

from cache_svc.core.cache import CacheCore
from cache_svc.core.errors import Code
from paceline.v1.cache_pb2 import CacheServiceLinkRequest, CacheServiceLinkResponse
from paceline.v1.worker_pb2 import StepPlan


def check_exchange(cache: CacheCore, request: CacheServiceLinkRequest, response: CacheServiceLinkResponse) -> None:
    """Check the cache's invariants, and what the cache has refused. It may refuse an AdmitOp or ExtendOp for any
    reason. It may refuse another operation only with RESOURCE_EXHAUSTED (too few blocks) or ABORTED (after a refused
    ExtendOp of the same exchange).

    Raises AssertionError for a broken invariant and for any other refusal: it is a mistake of the scheduler, and would
    leak sequences or blocks."""
    cache.check_invariants()
    for op, result in zip(request.ops, response.results, strict=True):
        kind, refused = op.WhichOneof("op"), result.HasField("error")
        short = kind in ("admit", "extend") or result.error.code in (Code.RESOURCE_EXHAUSTED, Code.ABORTED)
        assert short or not refused, f"the cache refused {kind}: {result.error.message}"
        assert not result.restore.refused, f"the cache refused to restore {result.restore.refused}"


def check_plan(cache: CacheCore, worker_id: int, plan: StepPlan) -> None:
    """Raises AssertionError if a new plan names a block that the cache has not granted to that worker, or has taken
    back (invariant 3 of docs/design.md). The cache may be ahead of the scheduler, but no exchange frees blocks of
    sequences that are to run."""
    worker = cache.workers.get(worker_id)
    running = [block for sequence in worker.sequences.values() for block in sequence.table] if worker else []
    named = [plan.grow_blocks, plan.copy_to, plan.swap_in_to, *(new.block_table for new in plan.new_sequences)]
    stray = set(np.frombuffer(b"".join(named), np.int32).tolist()).difference(running)
    assert not stray, (
        f"the plan names the blocks {sorted(stray)}, which the cache has not granted to worker {worker_id}"
    )
