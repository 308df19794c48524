"""Requests go to the workers in turn (the default of Dynamo's frontend, and an option of every router)."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_svc.policies.api import RequestView, WorkerView
from scheduler_svc.policies.placement.on_arrival import OnArrival


class RoundRobin(OnArrival):
    """Chooses the workers in turn, by id."""

    def __init__(self) -> None:
        super().__init__()
        self._last = 0  # worker id

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> tuple[WorkerView, str]:
        """The worker with the next higher id, or the first one."""
        chosen = next((worker for worker in workers if worker.id > self._last), workers[0])
        self._last = chosen.id
        return chosen, "its turn"
