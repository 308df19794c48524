"""The one central queue."""

from __future__ import annotations

from collections.abc import Iterator

from sortedcontainers import SortedDict

from scheduler_svc.core.request import Request


class WaitingQueue:
    """Waiting requests by seniority, oldest first, with their tokens counted.

    Entering, leaving and cancelling cost O(log n) wherever in the queue the request stands, so that an abort at ten
    thousand waiting costs what it does at ten.
    """

    def __init__(self) -> None:
        self._by_seniority: SortedDict[int, Request] = SortedDict()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._by_seniority)

    def __contains__(self, request: Request) -> bool:
        return self._by_seniority.get(request.seniority) is request

    def __iter__(self) -> Iterator[Request]:
        """Oldest first. Not to be changed while iterated."""
        return iter(self._by_seniority.values())

    def add(self, request: Request) -> None:
        assert request.seniority not in self._by_seniority, "a request stands in the queue once"
        self._by_seniority[request.seniority] = request
        self.num_tokens += request.num_tokens

    def remove(self, request: Request) -> None:
        del self._by_seniority[request.seniority]
        self.num_tokens -= request.num_tokens
