"""Highest response ratio next, in tokens (SGLang `hrrn`): (tokens served since it arrived) / (tokens it has to
compute).

The clock is the work admitted so far, so short requests go first and nobody waits for ever. A request whose whole
prompt is cached goes before all: since a match never has the last token, it is one that has run before. A request
counts on the clock when it first runs, and keeps its age when it has to wait again.

All ratios change with the clock, each at a rate of its own, so a pass looks at everything that waits.
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
    is_computed: bool  # all of its prompt

    @classmethod
    def of(cls, request: RequestView, arrived_at: int) -> Entry:
        matched = request.best_matched_tokens
        uncached, is_computed = request.num_tokens - matched, matched >= request.num_prompt_tokens
        return cls(request, arrived_at, request.place, uncached, is_computed)


class HighestResponseRatioNext(OrderPolicy):
    def __init__(self) -> None:
        self._served_tokens = 0
        self._entries: dict[int, Entry] = {}  # by seniority
        # When they arrived: who was removed last, since it may have been to run; who runs; and who ran until just now.
        self._removed: tuple[int, int] = (0, 0)  # seniority, arrival
        self._running: dict[int, int] = {}
        self._stopped: dict[int, int] = {}

    def add(self, request: RequestView) -> None:
        seniority = request.seniority
        arrived_at = self._stopped.pop(seniority, self._served_tokens)
        self._entries[seniority] = Entry.of(request, arrived_at)

    def remove(self, request: RequestView) -> None:
        self._removed = request.seniority, self._entries.pop(request.seniority).arrived_at

    def rematched(self, request: RequestView) -> None:
        self._entries[request.seniority] = Entry.of(request, self._entries[request.seniority].arrived_at)

    def started(self, request: RequestView) -> None:
        seniority, arrived_at = self._removed
        # One that ran before this order was chosen has never been added.
        self._running[request.seniority] = arrived_at if seniority == request.seniority else self._served_tokens
        if not request.has_run:
            self._served_tokens += max(1, request.num_tokens - request.best_matched_tokens)

    def stopped(self, request: RequestView) -> None:
        self._stopped[request.seniority] = self._running.pop(request.seniority, self._served_tokens)

    def ordered(self, now_s: float) -> Iterator[RequestView]:
        self._stopped.clear()  # who has not been added again has ended
        served = self._served_tokens
        ranked = sorted(
            (not entry.is_computed, (entry.arrived_at - served) / entry.uncached_tokens, entry.place, seniority)
            for seniority, entry in self._entries.items()
        )
        return (self._entries[seniority].request for *_, seniority in ranked)
