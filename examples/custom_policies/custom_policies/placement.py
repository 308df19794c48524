"""Each request runs on the worker that runs the fewest sequences."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_svc.policies.api import PlacementPolicy, RequestView, WorkerView


class FewestRows(PlacementPolicy):
    def place(self, request: RequestView, workers: Sequence[WorkerView], full: Sequence[WorkerView]) -> WorkerView:
        return min(workers, key=lambda worker: worker.num_rows)
