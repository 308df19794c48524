"""The order policy: which waiting request is offered a slot first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any, ClassVar

from sortedcontainers import SortedList

from scheduler_svc.core.requests.request import RequestView


class PolicyError(Exception):
    """A policy asked for something that cannot be done."""


class OrderPolicy(ABC):
    """An index of the waiting requests: told what comes, goes and changes, asked for the order.

    A request stands in it from `add` to `remove`, at most once. Nothing changes while `ordered` is iterated.
    """

    @abstractmethod
    def add(self, request: RequestView) -> None: ...

    @abstractmethod
    def remove(self, request: RequestView) -> None: ...

    @abstractmethod
    def ordered(self, now_s: float) -> Iterator[RequestView]:
        """Every request of the index, most deserving first. Lazily: mostly a few of the first are looked at."""

    def rank(self, request: RequestView) -> Any:
        """What any two requests can be compared by, whether they wait or run: smaller first, of equals the one with the
        smaller place. It stays as it is. None if the order is not of that kind: then what runs stands before what
        waits."""
        return None

    def goes_before(self, waiting: RequestView, running: RequestView, now_s: float) -> bool:
        """Whether the waiting request would be offered a slot before the running one, if the running one had to wait
        as well. By `rank`; without ranks, no."""
        rank = self.rank(waiting)
        return rank is not None and bool((rank, waiting.queue_position) < (self.rank(running), running.queue_position))

    def hopeless(self, now_s: float) -> Iterable[RequestView]:
        """Requests that it makes no sense to let wait on: they are failed at once. Asked a few times a second."""
        return ()

    def rematched(self, request: RequestView) -> None:  # noqa: B027 - most orders do not care
        """What the cache holds of the request's tokens has changed."""

    def started(self, request: RequestView) -> None:  # noqa: B027
        """It was removed because it runs now. Its `has_run` is False if that is for the first time."""

    def stopped(self, request: RequestView) -> None:  # noqa: B027
        """It runs no more: it has ended, or `add` follows before `ordered` is asked again."""


class KeyedOrder(OrderPolicy):
    """An order by a key that changes with nothing but the request's match. Everything costs O(log waiting)."""

    # Not even with that, so that the key of what runs says where it would stand.
    key_is_constant: ClassVar[bool] = False

    def __init__(self) -> None:
        self._entries: SortedList[tuple[Any, int, int, RequestView]] = SortedList()  # key, place, arrival_index
        self._entry_of: dict[int, tuple[Any, int, int, RequestView]] = {}  # by arrival_index

    @abstractmethod
    def key(self, request: RequestView) -> Any:
        """Smaller goes first; among equals, whoever came first."""

    def rank(self, request: RequestView) -> Any:
        return self.key(request) if self.key_is_constant else None

    def add(self, request: RequestView) -> None:
        arrival_index = request.arrival_index
        if arrival_index in self._entry_of:  # it takes over what it knows already
            self.remove(request)
        entry = (sortable(self.key(request), request), request.queue_position, arrival_index, request)
        self._entry_of[arrival_index] = entry
        self._entries.add(entry)

    def remove(self, request: RequestView) -> None:
        self._entries.remove(self._entry_of.pop(request.arrival_index))

    def rematched(self, request: RequestView) -> None:
        if sortable(self.key(request), request) != self._entry_of[request.arrival_index][0]:
            self.remove(request)
            self.add(request)

    def ordered(self, now_s: float) -> Iterator[RequestView]:
        return map(itemgetter(3), self._entries)


def sortable(key: Any, request: RequestView) -> Any:
    """The sort key. Raises PolicyError if it is NaN, or has NaN in it: nothing is smaller or larger than that, so that
    a sorted index would lose requests."""
    if _has_nan(key):
        raise PolicyError(f"order: the key of {request!r} is {key!r}, which cannot be sorted")
    return key


def _has_nan(key: Any) -> bool:
    # Python takes two tuples for equal if they have the same NaN object in them.
    return any(map(_has_nan, key)) if isinstance(key, tuple) else bool(key != key)
