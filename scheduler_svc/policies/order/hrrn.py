"""Highest response ratio next (SGLang `hrrn`): tokens served since a request arrived / tokens that it has to compute.

The clock is the work admitted so far, so short requests go first and no request waits for ever. A request with its
whole prompt cached comes before all others. Only a request that already has output can have its whole prompt cached,
because a match never includes the last token. A request advances the clock when it first runs, and keeps its age when
it has to wait again. The ratios grow at different rates, so a pass looks at every waiting request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from scheduler_svc.policies.api import OrderPolicy, RequestView


@dataclass(slots=True)
class HrrnEntry:
    """The attributes of a request that the order depends on. They are copied, because a pass reads all of them."""

    request: RequestView
    arrived_at: int  # on the clock of tokens
    queue_position: int
    uncached_tokens: int
    is_computed: bool  # the whole prompt is cached


class HighestResponseRatioNext(OrderPolicy):
    """Orders by the age of a request, in served tokens, divided by the tokens that it has to compute."""

    def __init__(self) -> None:
        self._served_tokens = 0
        self._entries: dict[int, HrrnEntry] = {}  # by arrival index
        # The token clock at each request's first arrival, as long as the request lives: it ages also while it runs.
        self._arrived_at: WeakKeyDictionary[RequestView, int] = WeakKeyDictionary()

    def add(self, request: RequestView) -> None:
        """Add a request. Its age begins when it is first added."""
        matched = request.best_matched_tokens
        self._entries[request.arrival_index] = HrrnEntry(
            request=request,
            arrived_at=self._arrival(request),
            queue_position=request.queue_position,
            uncached_tokens=request.num_tokens - matched,
            is_computed=matched >= request.num_prompt_tokens,
        )

    def remove(self, request: RequestView) -> None:
        """Remove a request. Raises KeyError if it is not in the index."""
        del self._entries[request.arrival_index]

    def rematched(self, request: RequestView) -> None:
        """Read the tokens to compute again."""
        self.add(request)

    def _arrival(self, request: RequestView) -> int:
        return self._arrived_at.setdefault(request, self._served_tokens)

    def started(self, request: RequestView) -> None:
        """Advance the clock of served tokens, if the request runs for the first time."""
        self._arrival(request)  # a request that ran before this order was set
        if not request.has_run:
            self._served_tokens += max(1, request.num_tokens - request.best_matched_tokens)

    def ordered(self, now_s: float) -> Iterator[RequestView]:
        """Requests with a computed prompt, then by falling ratio. Costs O(n log n) for n waiting requests."""
        served = self._served_tokens
        ranked = sorted(
            (
                not entry.is_computed,
                (entry.arrived_at - served) / entry.uncached_tokens,
                entry.queue_position,
                arrival_index,
            )
            for arrival_index, entry in self._entries.items()
        )
        return (self._entries[arrival_index].request for *_, arrival_index in ranked)
