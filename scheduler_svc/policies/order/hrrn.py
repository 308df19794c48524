"""Highest response ratio next, in tokens (SGLang `hrrn`): (tokens served since it arrived) / (tokens it has to
compute).

The clock is the work admitted so far, so short requests go first and nobody waits for ever. What is cached whole goes
before all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scheduler_svc.core.policy import OrderPolicy
from scheduler_svc.core.view import RequestView


@dataclass(slots=True)
class Entry:
    """What of a request the order depends on, at hand: a pass looks at all of them."""

    request: RequestView
    arrived_at: int  # on the clock of tokens
    place: int
    uncached_tokens: int


class HighestResponseRatioNext(OrderPolicy):
    def __init__(self) -> None:
        self._served_tokens = 0
        self._entries: dict[int, Entry] = {}  # by seniority

    def add(self, request: RequestView) -> None:
        self._entries[request.seniority] = Entry(request, self._served_tokens, request.place, _uncached(request))

    def remove(self, request: RequestView) -> None:
        del self._entries[request.seniority]

    def rematched(self, request: RequestView) -> None:
        self._entries[request.seniority].uncached_tokens = _uncached(request)

    def started(self, request: RequestView) -> None:
        self._served_tokens += max(1, _uncached(request))

    def ordered(self, now_s: float) -> Iterator[RequestView]:
        served = self._served_tokens
        ranked = sorted(
            ((entry.arrived_at - served) / entry.uncached_tokens, entry.place, seniority)
            for seniority, entry in self._entries.items()
        )
        return (self._entries[seniority].request for _, _, seniority in ranked)


def _uncached(request: RequestView) -> int:
    return request.num_tokens - request.best_matched_tokens
