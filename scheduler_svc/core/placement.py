"""Which worker a request belongs to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_svc.core.request import Request
from scheduler_svc.core.worker import ROW_COST_TOKENS, Worker


@dataclass(slots=True)
class Room:
    """What a worker has left when it has taken its share of those that went before."""

    worker: Worker
    load_tokens: int
    seats: int
    blocks: int


class Placement:
    """Shares out the requests that wait, in their order: each to where its first token comes soonest, which is where
    there is least prefill ahead of it and of its own, counting those that were placed before it.

    Nothing is bound here. A request stays in the central queue until the worker that it is placed at has credit for a
    step, and then everything is placed anew; whom a policy has refused there is placed elsewhere, if there is room.
    """

    def __init__(self, workers: Iterable[Worker]) -> None:
        self._rooms = [
            Room(worker, worker.load_tokens, worker.free_seats, worker.free_blocks)
            for worker in workers
            if not worker.draining and worker.free_seats > 0
        ]

    def place(self, request: Request) -> Worker | None:
        """None if nobody has room."""
        best, least, blocks = None, 0, 0
        for room in self._rooms:
            worker = room.worker
            match = request.match_on(worker.id)
            cost = room.load_tokens - match.num_tokens
            if (best is not None and cost >= least) or worker.has_refused(request):
                continue
            need_blocks = worker.blocks_for(request.num_tokens) - match.num_live_tokens // worker.block_size
            if need_blocks <= room.blocks and worker.can_ever_hold(request) and worker.has_adapter(request):
                best, least, blocks = room, cost, need_blocks
        if best is None:
            return None
        best.load_tokens = least + request.num_tokens + ROW_COST_TOKENS
        best.blocks -= blocks
        best.seats -= 1
        if not best.seats:
            self._rooms.remove(best)
        return best.worker
