"""The worker with the fewest requests (`least request` of Envoy, `least_conn` of nginx)."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_svc.policies.api import RequestView, WorkerView
from scheduler_svc.policies.placement.on_arrival import OnArrival


class LeastLoaded(OnArrival):
    """Chooses the worker with the fewest requests."""

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> tuple[WorkerView, str]:
        """The worker with the fewest requests; of equal ones the smallest id."""
        chosen = min(workers, key=lambda worker: worker.num_rows)
        return chosen, f"it had the fewest requests, {chosen.num_rows}"
