"""A round of placement: which worker each waiting request should run on."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from scheduler_svc.core.policy.interfaces import PlacementPolicy
from scheduler_svc.core.policy.order import PolicyError
from scheduler_svc.core.policy.worker_view import FleetView, WorkerView
from scheduler_svc.core.requests.request import PrefixMatch, Request, view_of
from scheduler_svc.core.workers.state import WorkerState


class Placement:
    """Offers each waiting request, in queue order, the workers that have room for it, and full ones to wait for. The
    policy chooses one of them.

    Placement binds nothing. A request stays in the central queue until its worker schedules a step. A round serves all
    workers in turn, and ends when the first worker schedules for the second time. So a request is placed about once,
    however many workers look at it, and a placement is never older than one step.
    """

    def __init__(
        self, workers: Iterable[WorkerState], policy: PlacementPolicy, mean_output_tokens: float | None = None
    ) -> None:
        self.policy = policy
        self._views = {worker.id: WorkerView(worker) for worker in workers if not worker.draining}
        self._ids = list(self._views)
        self._turn = -1  # index of the last worker that _compared() has taken; it takes all in turn
        self._scheduled: set[int] = set()  # workers that have scheduled a step in this round
        # By arrival index: the worker that the request is placed on, and the matches that were known then.
        self._placed: dict[int, tuple[WorkerView, dict[int, PrefixMatch] | None]] = {}
        policy.begin(FleetView(tuple(self._views.values()), mean_output_tokens))

    def turn_of(self, worker: WorkerState) -> bool:
        """The worker schedules a step. False if it has already done so in this round: then the round is over."""
        if worker.id in self._scheduled:
            return False
        self._scheduled.add(worker.id)
        self._views[worker.id]._renew()
        return True

    def knows(self, request: Request) -> bool:
        """Whether the request is placed, with its current matches, and its worker has not refused it since."""
        placed = self._placed.get(request.arrival_index)
        return placed is not None and placed[1] == request.matches and not placed[0]._worker.has_refused(request)

    def place(self, request: Request) -> WorkerState | None:
        """The worker that the request is placed on. If that worker has no room now, the request waits for it. None if
        no worker has room. Raises PolicyError, and whatever the policy raises."""
        placed = self._placed.get(request.arrival_index)
        if placed is not None and self.knows(request):
            return placed[0]._worker
        fitting: list[WorkerView] = []
        full: list[WorkerView] = []
        for view in self._compared(request):
            if view._is_outdated:
                view._renew()
            if not view._worker.can_ever_hold(request):
                continue
            if view._has_room(request):
                fitting.append(view)
            elif view.num_rows:  # a full worker without rows frees nothing, so the request would wait for ever
                full.append(view)
        if not fitting:
            return None
        chosen = self.policy.place(view_of(request), fitting, full)
        if not any(chosen is view for view in (*fitting, *full)):
            raise PolicyError(f"placement: place returned {chosen!r}, which is none of the workers offered")
        if placed is not None:
            placed[0]._waiting.pop(request.arrival_index, None)
        chosen._add(request)
        self._placed[request.arrival_index] = chosen, request.matches
        return chosen._worker

    def _compared(self, request: Request) -> Iterable[WorkerView]:
        """The workers to compare, by ascending id: all, or as many as the policy compares (`max_compared`)."""
        count = self.policy.max_compared
        if not 0 < count < len(self._ids):
            return self._views.values()
        matches = ((match.num_tokens, -id_) for id_, match in (request.matches or {}).items() if id_ in self._views)
        chosen = {-id_ for _, id_ in heapq.nlargest(count // 2, matches)}
        for _ in self._ids:
            if len(chosen) == count:
                break
            self._turn = (self._turn + 1) % len(self._ids)
            if self._views[self._ids[self._turn]].free_slots > 0:
                chosen.add(self._ids[self._turn])
        return [self._views[id_] for id_ in sorted(chosen)]
