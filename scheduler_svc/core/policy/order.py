"""The order policy: which waiting request is offered a slot first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any, ClassVar

from sortedcontainers import SortedList

from scheduler_svc.core.requests.request import RequestView


class PolicyError(Exception):
    """A policy asked for something impossible."""


class OrderPolicy(ABC):
    """An index of the waiting requests. It is told of every change, and asked for the order.

    A request is in the index from `add` to `remove`, at most once. Nothing changes while `ordered` is iterated.
    """

    @abstractmethod
    def add(self, request: RequestView) -> None:
        """Add a waiting request: a new one, one that ran before and waits again, or one that its tenant's limit of
        running tokens no longer hides."""

    @abstractmethod
    def remove(self, request: RequestView) -> None:
        """Remove a request that runs now, has ended or was cancelled, or that its tenant's limit hides from now on."""

    @abstractmethod
    def ordered(self, now_s: float) -> Iterator[RequestView]:
        """Every request of the index, in the order in which they are offered slots. Lazy: mostly few are looked at."""

    def rank(self, request: RequestView) -> Any:
        """A constant value that orders any two requests, waiting or running: smaller first, equal values by queue
        position. None if the order has no such value: then running requests rank before waiting ones."""
        return None

    def goes_before(self, waiting: RequestView, running: RequestView, now_s: float) -> bool:
        """Whether the waiting request would be offered a slot before the running one, by `rank`. Without ranks, no."""
        rank = self.rank(waiting)
        return rank is not None and bool((rank, waiting.queue_position) < (self.rank(running), running.queue_position))

    def hopeless(self, now_s: float) -> Iterable[RequestView]:
        """Waiting requests that the order gives up: they fail at once. Called a few times a second."""
        return ()

    def rematched(self, request: RequestView) -> None:  # noqa: B027 - most orders ignore it
        """The cache holds more or fewer of the request's tokens than before."""

    def started(self, request: RequestView) -> None:  # noqa: B027
        """The request runs now: it has just been removed, or it ran already when this order was set. `has_run` is False
        if it runs for the first time."""

    def stopped(self, request: RequestView) -> None:  # noqa: B027
        """The request runs no more. It has ended, it is a parked beam, or `add` follows before `ordered` is called
        again."""


class KeyedOrder(OrderPolicy):
    """An order by a key that changes only with the request's match. Every operation costs O(log waiting)."""

    # Whether the key does not change with the match either. Such a key also ranks running requests.
    key_is_constant: ClassVar[bool] = False

    def __init__(self) -> None:
        # key, queue position, arrival index
        self._entries: SortedList[tuple[Any, int, int, RequestView]] = SortedList()
        self._entry_of: dict[int, tuple[Any, int, int, RequestView]] = {}  # by arrival index

    @abstractmethod
    def key(self, request: RequestView) -> Any:
        """Smaller first; equal keys by queue position."""

    def rank(self, request: RequestView) -> Any:
        """The key if it is constant, else None."""
        return self.key(request) if self.key_is_constant else None

    def add(self, request: RequestView) -> None:
        """Add a request with its current key, or renew the entry that it has. Raises PolicyError for a NaN."""
        arrival_index = request.arrival_index
        if arrival_index in self._entry_of:  # a fallback order may know the request already
            self.remove(request)
        entry = (sortable(self.key(request), request), request.queue_position, arrival_index, request)
        self._entry_of[arrival_index] = entry
        self._entries.add(entry)

    def remove(self, request: RequestView) -> None:
        """Remove a request. Raises KeyError if it is not in the index."""
        self._entries.remove(self._entry_of.pop(request.arrival_index))

    def rematched(self, request: RequestView) -> None:
        """Compute the key again, and move the request if the key has changed."""
        if sortable(self.key(request), request) != self._entry_of[request.arrival_index][0]:
            self.remove(request)
            self.add(request)

    def ordered(self, now_s: float) -> Iterator[RequestView]:
        """Requests by key, then by queue position, then by arrival index."""
        return map(itemgetter(3), self._entries)


def sortable(key: Any, request: RequestView) -> Any:
    """The sort key. Raises PolicyError if it is or contains NaN, which has no order: the index would lose requests."""
    if _has_nan(key):
        raise PolicyError(f"order: the key of {request!r} is {key!r}, which cannot be sorted")
    return key


def _has_nan(key: Any) -> bool:
    # Python takes two tuples for equal if they contain the same NaN object.
    return any(map(_has_nan, key)) if isinstance(key, tuple) else bool(key != key)
