"""Highest response ratio next, in tokens (SGLang `hrrn`): (tokens served since it arrived) / (tokens it has to
compute).

The clock is the work admitted so far, so short requests go first and nobody waits for ever. What is cached whole goes
before all.
"""

from __future__ import annotations

from collections.abc import Iterator

from scheduler_svc.core.policy import OrderPolicy
from scheduler_svc.core.view import RequestView


class HighestResponseRatioNext(OrderPolicy):
    def __init__(self) -> None:
        self._served_tokens = 0
        self._arrived_at: dict[int, int] = {}
        self._requests: dict[int, RequestView] = {}

    def add(self, request: RequestView) -> None:
        self._requests[request.seniority] = request
        self._arrived_at[request.seniority] = self._served_tokens

    def remove(self, request: RequestView) -> None:
        del self._requests[request.seniority], self._arrived_at[request.seniority]

    def started(self, request: RequestView) -> None:
        self._served_tokens += max(1, request.num_tokens - request.best_matched_tokens)

    def ordered(self, now_s: float) -> Iterator[RequestView]:
        def key(request: RequestView) -> tuple[float, int, int]:
            uncached = request.num_tokens - request.best_matched_tokens
            ratio = (self._served_tokens - self._arrived_at[request.seniority]) / uncached
            return (-ratio, request.place, request.seniority)

        return iter(sorted(self._requests.values(), key=key))
