"""The cost of Dynamo's KV router: `overlap_weight` · prefill blocks + decode blocks. The smallest cost is chosen.

Prefill blocks are those that the worker would have to compute: queued prompts, and the request's uncached blocks.
Decode blocks are those in use on the worker, plus the request's own that are not in use there yet. Of equal costs, the
worker with the fewest requests wins.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_svc.policies.api import RequestView, WorkerView
from scheduler_svc.policies.options import Amount
from scheduler_svc.policies.placement.on_arrival import OnArrival


class OverlapCost(OnArrival):
    """Dynamo's KV router at temperature 0: the smallest cost in blocks."""

    def __init__(self, overlap_weight: Amount = 1.0) -> None:
        """`overlap_weight`: Dynamo's default is 1. A larger weight favours the first token over later tokens."""
        super().__init__()
        self.overlap_weight = overlap_weight

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> tuple[WorkerView, str]:
        """The worker with the smallest cost; of equal ones the one with the fewest requests."""
        costs = {worker.id: self._cost_blocks(request, worker) for worker in workers}
        chosen = min(workers, key=lambda worker: (costs[worker.id], worker.num_rows))
        return chosen, f"the smallest cost, {costs[chosen.id]:.1f} blocks"

    def _cost_blocks(self, request: RequestView, worker: WorkerView) -> float:
        size = worker.block_size
        prefill_tokens = worker.queued_prefill_tokens + request.num_tokens - worker.cached_tokens(request)
        own_blocks = -(-request.num_tokens // size) - request.referenced_tokens(worker.id) // size
        decode_blocks = worker.num_blocks - worker.free_blocks + own_blocks
        return self.overlap_weight * prefill_tokens / size + decode_blocks
