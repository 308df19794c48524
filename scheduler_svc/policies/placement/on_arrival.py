"""The common rule of routers in front of replicas: a request's worker is chosen once, when the request arrives, and the
request waits for that worker even if another one has room first."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from scheduler_svc.policies.api import PlacementPolicy, RequestView, WorkerView

# Choices that are kept. A request cancelled while it waits leaves its choice behind; the oldest are dropped first.
MAX_CHOICES = 1 << 15


class Chosen(NamedTuple):
    """A request's worker, and the reason for `paceline explain`."""

    worker: int
    why: str


class OnArrival(PlacementPolicy):
    """Subclasses choose among all workers that could hold the request, with or without room now. If the worker is gone,
    the request is placed again, as by a router that retries."""

    def __init__(self) -> None:
        self._chosen: OrderedDict[int, Chosen] = OrderedDict()  # by the request's arrival index

    @abstractmethod
    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> tuple[WorkerView, str]:
        """The request's worker among these (by ascending id), and the reason."""

    def place(self, request: RequestView, workers: Sequence[WorkerView], full: Sequence[WorkerView]) -> WorkerView:
        """The worker chosen earlier, if it is still there; else the one that `choose` names."""
        offered = {worker.id: worker for worker in (*workers, *full)}
        chosen = self._chosen.get(request.arrival_index)
        if chosen is None or chosen.worker not in offered:
            worker, why = self.choose(request, sorted(offered.values(), key=lambda worker: worker.id))
            self._chosen[request.arrival_index] = chosen = Chosen(worker.id, why)
            if len(self._chosen) > MAX_CHOICES:
                self._chosen.popitem(last=False)
        return offered[chosen.worker]

    def bound(self, request: RequestView, worker_id: int) -> str:
        """Forget the choice. Returns its reason if the request runs on the chosen worker."""
        chosen = self._chosen.pop(request.arrival_index, None)
        return chosen.why if chosen is not None and chosen.worker == worker_id else ""


def fewest_requests(workers: Sequence[WorkerView]) -> WorkerView:
    """The worker with the fewest requests, running ones and those that wait for it. Of equal workers the smallest
    id."""
    return min(workers, key=lambda worker: worker.num_rows)


def drawn(seed: int, request: RequestView, count: int) -> int:
    """A number below `count`, drawn for the request by a seed."""
    digest = blake2b(f"{seed} {request.arrival_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % count
