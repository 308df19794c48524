"""A round of placement: which worker each waiting request should run on."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_svc.core.policy import PlacementPolicy, PolicyError
from scheduler_svc.core.request import Match, Request
from scheduler_svc.core.view import view_of
from scheduler_svc.core.worker import Worker
from scheduler_svc.core.worker_view import FleetView, WorkerView


class Placement:
    """Offers each waiting request, in the order in force, the workers that have room for it; the policy chooses.

    Nothing is bound here. A request stays in the central queue until the worker that it is placed on composes a step.
    A round serves all workers that compose in turn, and ends with the first of them that composes again: so a request
    is placed about once, however many workers look at it, and a placement is never older than a step.
    """

    def __init__(
        self, workers: Iterable[Worker], policy: PlacementPolicy, mean_output_tokens: float | None = None
    ) -> None:
        self.policy = policy
        self._views = {worker.id: WorkerView(worker) for worker in workers if not worker.draining}
        self._composing: set[int] = set()  # workers that have composed in this round
        # By arrival index: where the request is placed, and what was known of its matches.
        self._placed: dict[int, tuple[WorkerView, dict[int, Match] | None]] = {}
        policy.begin(FleetView(tuple(self._views.values()), mean_output_tokens))

    def turn_of(self, worker: Worker) -> bool:
        """The worker composes; False if it has done so in this round, which is over then."""
        if worker.id in self._composing:
            return False
        self._composing.add(worker.id)
        self._views[worker.id]._renew()
        return True

    def place(self, request: Request) -> Worker | None:
        """The worker that the request is placed on, which may have no room: then the request waits for it. None if no
        worker has room. Raises PolicyError, and whatever the policy raises."""
        placed = self._placed.get(request.seniority)
        if placed is not None and placed[1] == request.matches and not placed[0]._worker.has_refused(request):
            return placed[0]._worker
        fitting: list[WorkerView] = []
        full: list[WorkerView] = []
        for view in self._views.values():
            worker = view._worker
            if not worker.can_ever_hold(request):
                continue
            if view._has_room(request):
                fitting.append(view)
            elif view.num_rows:  # else nothing would ever change there
                full.append(view)
        if not fitting:
            return None
        chosen = self.policy.place(view_of(request), fitting, full)
        if not any(chosen is view for view in (*fitting, *full)):
            raise PolicyError(f"placement: place returned {chosen!r}, which is none of the workers offered")
        if placed is not None:
            placed[0]._waiting.pop(request.seniority, None)
        chosen._add(request)
        self._placed[request.seniority] = chosen, request.matches
        return chosen._worker
