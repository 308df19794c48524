"""A round of placement: which worker each waiting request should run on."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_svc.core.policy import PlacementPolicy, PolicyError
from scheduler_svc.core.request import Request
from scheduler_svc.core.view import view_of
from scheduler_svc.core.worker import Worker
from scheduler_svc.core.worker_view import FleetView, WorkerView


class Placement:
    """Offers each waiting request, in the order in force, the workers that have room for it; the policy chooses.

    Nothing is bound here. A request stays in the central queue until the worker that it is placed on composes a step,
    and every composition places the requests anew.
    """

    def __init__(
        self, workers: Iterable[Worker], policy: PlacementPolicy, mean_output_tokens: float | None = None
    ) -> None:
        self._policy = policy
        self._views = [WorkerView(worker) for worker in workers if not worker.draining]
        policy.begin(FleetView(self._views, mean_output_tokens))

    def place(self, request: Request) -> Worker | None:
        """The worker that the request is placed on, which may have no room: then the request waits for it. None if no
        worker has room. Raises PolicyError, and whatever the policy raises."""
        fitting: list[WorkerView] = []
        full: list[WorkerView] = []
        need_blocks: dict[int, int] = {}
        for view in self._views:
            worker = view._worker
            if not worker.can_ever_hold(request):
                continue
            match = request.match_on(worker.id)
            need = need_blocks[worker.id] = (
                worker.blocks_for(request.num_tokens) - match.num_live_tokens // worker.block_size
            )
            has_room = view._free_slots > 0 and need <= view._free_blocks
            has_room = has_room and worker.has_adapter(request) and worker.has_grammar(request)
            if has_room and not worker.has_refused(request):
                fitting.append(view)
            elif worker.num_rows:  # else nothing would ever change there
                full.append(view)
        if not fitting:
            return None
        chosen = self._policy.place(view_of(request), fitting, full)
        if not any(chosen is view for view in (*fitting, *full)):
            raise PolicyError(f"placement: place returned {chosen!r}, which is none of the workers offered")
        chosen._add(request, need_blocks[chosen.id])
        return chosen._worker
