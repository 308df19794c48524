"""The common rule of routers in front of replicas: a request's worker is chosen once, and the request waits for that
worker even if another one has room first.

A router chooses when the request arrives. Here the first call of `place` for the request chooses. That call comes when
the request's turn in the queue comes and at least one worker has room.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Sequence

from scheduler_svc.policies.api import PlacementPolicy, RequestView, WorkerView

# Choices that are kept. A request cancelled while it waits leaves its choice behind; the oldest are dropped first.
MAX_CHOICES = 1 << 15


class OnArrival(PlacementPolicy):
    """Subclasses choose among all workers that could hold the request, with or without room now. If the chosen worker
    is no longer offered (it has left or drains), the request is placed again, as by a router that retries."""

    def __init__(self) -> None:
        # Worker id and reason for `paceline explain`, by the request's arrival index.
        self._chosen: OrderedDict[int, tuple[int, str]] = OrderedDict()

    @abstractmethod
    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> tuple[WorkerView, str]:
        """The request's worker among these (by ascending id), and the reason."""

    def place(self, request: RequestView, workers: Sequence[WorkerView], full: Sequence[WorkerView]) -> WorkerView:
        """The worker chosen earlier, if it is still offered; else the worker that `choose` returns."""
        offered = {worker.id: worker for worker in (*workers, *full)}
        worker_id, _ = self._chosen.get(request.arrival_index, (None, ""))
        if worker_id in offered:
            return offered[worker_id]
        chosen, why = self.choose(request, sorted(offered.values(), key=lambda worker: worker.id))
        self._chosen[request.arrival_index] = chosen.id, why
        if len(self._chosen) > MAX_CHOICES:
            self._chosen.popitem(last=False)
        return chosen

    def bound(self, request: RequestView, worker_id: int) -> str:
        """Forget the choice. Returns its reason if the request runs on the chosen worker."""
        chosen_id, why = self._chosen.pop(request.arrival_index, (None, ""))
        return why if chosen_id == worker_id else ""
