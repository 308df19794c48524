"""The decisions of a step, as interfaces (docs/policies.md): order, placement, capacity, batch and preemption.

A step of one worker is scheduled like this:

    batch.schedule(step)                 which requests run, with how many tokens; for waiting requests:
      order.ordered(now_s)                 in which order they are offered a slot
      placement.place(request, ...)        on which worker, if there are several
      capacity.admit(step, request, ...)   whether they may have blocks
    preemption.victims(step)             only if running sequences need more blocks than there are
    preemption.for_waiting(step)         only if a request was rejected while some request runs several sequences

Before `batch.schedule`, the core calls `capacity.begin(step)`. This call may preempt running sequences (`step.pause`).
If a sequence has to be preempted, the schedule is dropped, the victims' blocks go back to the cache, and scheduling
starts again with the blocks that are available then. `step.preempted` names the victims.

A policy decides on what it sees and on nothing else: no clock, no randomness but a seeded one, no I/O. It may keep
state of its own. If a policy raises while a step is scheduled, or asks for something impossible, that schedule is
dropped: the default policies schedule the step, with the waiting requests oldest first. An order that raises while its
index is updated is replaced by the default order until other policies are set. Every error is counted; the same error
is logged at most once in 10 s. No request fails because of it.
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
    """Decides which requests run in a step, and with how many tokens."""

    # Tokens that a step computes for one request can be shared by requests admitted behind it in the same step, as if
    # they were computed already: a worker writes the KV of all rows of a step before any row attends.
    shares_in_step: bool = True

    @abstractmethod
    def schedule(self, step: Step) -> None:
        """Call `step.run`, `step.run_decodes` and `step.admit` for everything that the step should run."""

    def planned(self, step: Step) -> None:  # noqa: B027
        """The step is accepted. What is in `step` will run, unless the cache has too few blocks for it after all."""


class PreemptionPolicy(ABC):
    """Decides which sequences are preempted when running sequences need more blocks than there are."""

    # The queue position of a preempted request: by its arrival, before all others, or behind all others.
    requeue: Literal["arrival", "front", "back"] = "arrival"
    # Whether a preempted request computes its tokens again, or keeps its blocks in host memory (if there is room and
    # its prompt was computed). "auto": if the request is one of several samples of a prompt, all running samples of
    # that prompt are preempted together and swapped (a sequence group of vLLM V0); otherwise it is recomputed.
    mode: Mode = "recompute"

    @abstractmethod
    def victims(self, step: Step) -> Iterable[Running]:
        """The candidates, in the order in which they are preempted. The scheduler preempts only as many as the missing
        blocks require. If the candidates are all running sequences, the last one keeps running, so that the worker
        makes progress. A sequence that runs alone is preempted only if no step is in flight."""

    def for_waiting(self, step: Step) -> Iterable[Running]:
        """Running sequences to preempt for waiting requests; their tokens are computed again. Called when a schedule
        admits no request and rejected one for want of a slot or blocks, while further sequences of some request run on
        the worker (samples after the first, beams). Empty by default. If it names every running sequence, the last one
        keeps running."""
        return ()


class PlacementPolicy(ABC):
    """Decides which worker a waiting request is bound to. Called only while more than one worker is attached.

    `place` binds nothing. In a round, the workers schedule steps in turn. While a worker schedules its step, `place` is
    called for the waiting requests in queue order, until the step is full. It may choose any of the workers offered. A
    request that was placed earlier in the round stays placed, unless its matches have changed or the worker has refused
    it. When the step is scheduled, the requests that it admits are bound to its worker. The round ends when a worker
    schedules a second step. So what `place` remembers about a request is void at the next `begin`. Note lasting facts
    in `bound`.

    The core decides where a request fits (slots, blocks, adapters, refusals). A policy chooses among these workers.
    """

    # If there are more workers than this, `place` gets at most this many for a request: up to half of them are the
    # workers with most of the request in their caches, the others are workers with a free slot, in turn. 0: all
    # workers.
    max_compared: int = 0

    def begin(self, fleet: FleetView) -> None:  # noqa: B027
        """A round begins. `fleet` stays valid for the round: its counters grow with each request that the round places.
        A worker's view is also read again when the worker schedules its step, and before `place` gets it if the worker
        has changed."""

    @abstractmethod
    def place(self, request: RequestView, workers: Sequence[WorkerView], full: Sequence[WorkerView]) -> WorkerView:
        """The worker that the request should run on.

        `workers` have room for the request now: at least one worker, by ascending id. `full` have no room now, run
        something, and could hold the request later: if one of these is returned, the request waits.
        """

    def bound(self, request: RequestView, worker_id: int) -> str:
        """The request is bound to the worker. Returns the reason for `paceline explain`; "" if there is nothing to say.

        Also called for a request that `place` did not put there: a request that resumes on the worker that swapped it
        out, a suspect that is retried, or a request of a step that the default policies scheduled. If the cache then
        has no room, the request waits again, and this method is called again when it is bound the next time.
        """
        return ""


@dataclass(frozen=True, slots=True)
class Policies:
    """The current policies, one of each kind."""

    order: OrderPolicy
    capacity: CapacityPolicy
    batch: BatchPolicy
    preemption: PreemptionPolicy
    placement: PlacementPolicy
