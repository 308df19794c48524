"""Which worker a request belongs to."""

from __future__ import annotations

from collections.abc import Collection

from scheduler_svc.core.request import Request
from scheduler_svc.core.worker import Worker


def best_place(request: Request, workers: Collection[Worker]) -> Worker | None:
    """Where the first token comes soonest: least prefill ahead of it and of its own.

    None if nobody has room. Nothing is bound here: the request stays in the central queue until
    that worker has credit for a step.
    """

    def cost(worker: Worker) -> tuple[int, int]:
        return (worker.load_tokens - request.matched_tokens(worker.id), worker.id)

    roomy = [
        worker
        for worker in workers
        if not worker.draining
        and worker.slots.num_free
        and worker.can_ever_hold(request)
        and worker.has_adapter(request)
        and worker.available_blocks >= worker.need_blocks(request)
    ]
    return min(roomy, key=cost, default=None)
