"""The decisions of a step, as interfaces (DESIGN §4): order, placement, capacity, batch and preemption.

A step of one worker is composed like this:

    batch.compose(step)                  what runs, with how many tokens; it asks, for requests that wait,
      order.ordered(now_s)                 in which order they are offered a place
      placement.place(request, ...)        on which worker, if there are several
      capacity.admit(step, request, ...)   whether they may have one
    preemption.victims(step)             only if what runs needs more blocks than there are
    preemption.for_waiting(step)         only if a request was refused while some request runs several sequences

and before that `capacity.begin(step)` looks at the whole. If somebody has to give way, the composition is dropped, the
victims' blocks go back to the cache, and it starts over with what is there then; `step.preempted` names them.

Policies decide on what they see and on nothing else: no clock, no randomness but a seeded one, no I/O. They may keep
state of their own. One that raises, or asks for what cannot be, costs that step's composition and no request: the step
is composed by the default policies, the error is logged and counted.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from sortedcontainers import SortedList

if TYPE_CHECKING:
    from scheduler_svc.core.policy.step import Step
    from scheduler_svc.core.policy.views import RequestView, Running
    from scheduler_svc.core.policy.worker_view import FleetView, WorkerView


Mode = Literal["recompute", "swap", "auto"]


class PolicyError(Exception):
    """A policy asked for something that cannot be done."""


class Verdict(enum.Enum):
    """What becomes of a waiting request in this step."""

    ADMIT = "admit"
    SKIP = "skip"  # not now; others may pass it
    STOP = "stop"  # not now, and nobody may pass it


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
        return rank is not None and bool((rank, waiting.place) < (self.rank(running), running.place))

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
        self._entries: SortedList[tuple[Any, int, int, RequestView]] = SortedList()  # key, place, seniority
        self._entry_of: dict[int, tuple[Any, int, int, RequestView]] = {}  # by seniority

    @abstractmethod
    def key(self, request: RequestView) -> Any:
        """Smaller goes first; among equals, whoever came first."""

    def rank(self, request: RequestView) -> Any:
        return self.key(request) if self.key_is_constant else None

    def add(self, request: RequestView) -> None:
        seniority = request.seniority
        if seniority in self._entry_of:  # it takes over what it knows already
            self.remove(request)
        entry = (sortable(self.key(request), request), request.place, seniority, request)
        self._entry_of[seniority] = entry
        self._entries.add(entry)

    def remove(self, request: RequestView) -> None:
        self._entries.remove(self._entry_of.pop(request.seniority))

    def rematched(self, request: RequestView) -> None:
        if sortable(self.key(request), request) != self._entry_of[request.seniority][0]:
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


class CapacityPolicy(ABC):
    """Which requests may hold blocks."""

    # Take blocks for all known tokens of a request when it is admitted, not chunk by chunk.
    reserves_prompt: ClassVar[bool] = False
    # A waiting request may push out a running one, so that it is looked at also when every seat is taken.
    preempts_for_waiting: ClassVar[bool] = False

    def begin(self, step: Step) -> None:  # noqa: B027
        """Called once before each composition; may call `step.pause`."""

    def planned(self, step: Step) -> None:  # noqa: B027
        """The composition stands: what is in `step` is what will run."""

    def is_spent(self, step: Step) -> bool:
        """Whether it is known already that nobody else will be admitted in this composition."""
        return False

    @abstractmethod
    def admit(self, step: Step, request: RequestView, need_blocks: int) -> Verdict:
        """Whether a waiting request may have `need_blocks` now, and what that means for those behind it.

        There is a seat for it, and `need_blocks <= step.available_blocks` has not been checked.
        """


class BatchPolicy(ABC):
    """What runs in a step."""

    # What a request is let in for can be shared by those that are let in behind it in the same step, as if it were
    # computed: a worker writes the KV of all rows of a step before any of them attends.
    shares_in_step: bool = True

    @abstractmethod
    def compose(self, step: Step) -> None:
        """Call `step.run`, `step.run_decodes` and `step.admit` for what shall be in the step."""

    def planned(self, step: Step) -> None:  # noqa: B027
        """The composition stands: what is in `step` is what will run."""


class PreemptionPolicy(ABC):
    """Who gives way when what runs needs more blocks than there are."""

    # Where a preempted request stands in the queue: where its arrival puts it, before all others, or behind them.
    requeue: Literal["seniority", "front", "back"] = "seniority"
    # Its tokens are computed anew, or its blocks are kept in host memory (as long as there is room, and if its prompt
    # was computed), or "auto": swapped if it is one of several samples of a prompt, and all of them that run together
    # (vLLM V0).
    mode: Mode = "recompute"

    @abstractmethod
    def victims(self, step: Step) -> Iterable[Running]:
        """Running sequences in the order in which they give way. If that is all of them, the last is never taken, so
        that something always makes progress."""

    def for_waiting(self, step: Step) -> Iterable[Running]:
        """Running sequences that give way to waiting requests; their tokens are computed anew. Asked when a composition
        admits nothing and was refused a slot or blocks for a request, while further sequences of some request run on
        the worker (samples after the first, beams). None by default. Not all that runs can give way."""
        return ()


class PlacementPolicy(ABC):
    """Which worker a waiting request is bound to. Asked only while more than one worker is attached.

    Nothing is bound by `place`. In a round, the workers compose steps in turn. Each composition places the waiting
    requests that it comes to, in the order in force and over all workers, until its step is full; where an earlier one
    of the round has placed them, they stay. Then the requests that are placed on the step's worker are bound to it. The
    round ends when a worker composes again. So what `place` remembers about a request is void at the next `begin`; what
    should last is noted in `bound`.

    The core decides where a request fits (slots, blocks, adapters, refusals); a policy chooses among these workers.
    """

    # Workers that a request is compared on, where there are more: those that have most of it in their caches, up to
    # half of these, and others with a free slot in turn. 0: always all of them.
    max_compared: int = 0

    def begin(self, fleet: FleetView) -> None:  # noqa: B027
        """A round begins. `fleet` counts what it has placed so far, and each worker is as it was when it composed."""

    @abstractmethod
    def place(self, request: RequestView, workers: Sequence[WorkerView], full: Sequence[WorkerView]) -> WorkerView:
        """The worker that the request should run on.

        `workers` have room for the request now: at least one, by ascending id. `full` have no room now, run something,
        and could hold the request later: if one of these is returned, the request waits.
        """

    def bound(self, request: RequestView, worker_id: int) -> str:
        """The request is bound to the worker. Returns why, for `paceline explain`; "" if there is nothing to say.

        Called also for a request that `place` did not put there: one that returns to the worker that swapped it out,
        or one of a step that the default policies composed. Called again if the cache then has no room after all.
        """
        return ""


@dataclass(frozen=True, slots=True)
class Policies:
    """What is in force."""

    order: OrderPolicy
    capacity: CapacityPolicy
    batch: BatchPolicy
    preemption: PreemptionPolicy
    placement: PlacementPolicy
