"""The worker with the least prefill: the queued tokens plus the request's own. A running row counts as 16 tokens, so a
cached prefix of P tokens outweighs P / 16 rows. This was Paceline's rule before it measured step times."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_svc.policies.api import PlacementPolicy, RequestView, WorkerView
from scheduler_svc.policies.options import Count


class PrefixFirst(PlacementPolicy):
    """Chooses the worker with the least prefill, its rows counted as tokens."""

    def __init__(self, row_cost_tokens: Count = 16) -> None:
        """`row_cost_tokens`: prefill tokens that cost a step about as much as a decoding row."""
        self.row_cost_tokens = row_cost_tokens

    def place(self, request: RequestView, workers: Sequence[WorkerView], full: Sequence[WorkerView]) -> WorkerView:
        """The worker with the lowest cost in tokens, among those with room now; of equal ones the smallest id."""
        return min(workers, key=lambda worker: self._cost_tokens(request, worker))

    def _cost_tokens(self, request: RequestView, worker: WorkerView) -> int:
        load_tokens = worker.queued_prefill_tokens + self.row_cost_tokens * worker.num_rows
        return load_tokens - worker.matched_tokens(request)
