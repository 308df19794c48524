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

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from scheduler_svc.core.policy.order import OrderPolicy
from scheduler_svc.core.policy.step import CapacityPolicy, Step
from scheduler_svc.core.policy.views import Running
from scheduler_svc.core.policy.worker_view import FleetView, WorkerView
from scheduler_svc.core.requests.request import RequestView

Mode = Literal["recompute", "swap", "auto"]


class BatchPolicy(ABC):
    """What runs in a step."""

    # What a request is let in for can be shared by those that are let in behind it in the same step, as if it were
    # computed: a worker writes the KV of all rows of a step before any of them attends.
    shares_in_step: bool = True

    @abstractmethod
    def schedule(self, step: Step) -> None:
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
