"""`cache_aware` of SGLang's router (gateway), with its thresholds: affinity while the load is balanced.

The worker with the fewest requests is chosen if the busiest worker has over `balance_abs_threshold` requests more
than that worker, and over `balance_rel_threshold` times as many. Otherwise it is the worker with the longest match, if
that is more than `cache_threshold` of the request; otherwise the worker that was given the fewest uncached tokens (the
smallest tree).

The router's tree is a guess from the prompts that it has sent. Here the match counts the tokens that the worker's cache
really holds, as in the router's event-driven mode. It also counts blocks that earlier requests on the worker will
compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from scheduler_svc.policies.api import RequestView, WorkerView
from scheduler_svc.policies.options import Amount, Count, Share
from scheduler_svc.policies.placement.on_arrival import OnArrival


class CacheAware(OnArrival):
    """SGLang's router: the longest match while the load is even, else the fewest requests."""

    def __init__(
        self, cache_threshold: Share = 0.3, balance_abs_threshold: Count = 64, balance_rel_threshold: Amount = 1.5
    ) -> None:
        """The defaults are those of the SGLang gateway 0.3.1."""
        super().__init__()
        self.cache_threshold = cache_threshold
        self.balance_abs_threshold = balance_abs_threshold
        self.balance_rel_threshold = balance_rel_threshold
        self._given_tokens: Counter[int] = Counter()  # by worker: uncached tokens of its requests

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> tuple[WorkerView, str]:
        """Choose by load, then by match, then by the tokens given so far."""
        cached = {worker.id: worker.cached_tokens(request) for worker in workers}
        chosen, why = self._choose(request, workers, cached)
        self._given_tokens[chosen.id] += request.num_tokens - cached[chosen.id]
        return chosen, why

    def _choose(
        self, request: RequestView, workers: Sequence[WorkerView], cached: dict[int, int]
    ) -> tuple[WorkerView, str]:
        loads = [worker.num_rows for worker in workers]
        most, fewest = max(loads), min(loads)
        if most - fewest > self.balance_abs_threshold and most > self.balance_rel_threshold * fewest:
            idlest = min(workers, key=lambda worker: worker.num_rows)
            return idlest, f"the load was uneven, {fewest} to {most} requests"
        best = max(workers, key=lambda worker: cached[worker.id])
        if cached[best.id] > self.cache_threshold * request.num_tokens:
            return best, f"{cached[best.id]} of {request.num_tokens} tokens are cached"
        smallest = min(workers, key=lambda worker: self._given_tokens[worker.id])
        return smallest, "it had been given the fewest tokens to cache"
