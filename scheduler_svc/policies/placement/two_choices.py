"""Of two workers drawn at random, the one with fewer requests (Mitzenmacher 2001; SGLang's router: `power_of_two`)."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from scheduler_svc.policies.api import RequestView, WorkerView
from scheduler_svc.policies.options import Count
from scheduler_svc.policies.placement.on_arrival import OnArrival


class TwoChoices(OnArrival):
    """Draws two workers and chooses the one with fewer requests."""

    def __init__(self, placement_seed: Count = 0) -> None:
        super().__init__()
        self.placement_seed = placement_seed

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> tuple[WorkerView, str]:
        """The worker with fewer requests of the two drawn; of equal ones the smaller id."""
        count = len(workers)
        if count == 1:
            return workers[0], "the only one"
        digest = blake2b(f"{self.placement_seed} {request.arrival_index}".encode(), digest_size=8).digest()
        first, second = divmod(int.from_bytes(digest, "little") % (count * (count - 1)), count - 1)
        second += second >= first  # each ordered pair of different workers is equally likely
        chosen = min((workers[i] for i in sorted((first, second))), key=lambda worker: worker.num_rows)
        return chosen, f"of {workers[first].id} and {workers[second].id} it had fewer requests, {chosen.num_rows}"
