"""Offline requests: they run on what the online requests of a step leave, and yield to them.

A step is scheduled in two parts. First the policies in force schedule the online requests, and see the worker as if it
ran no offline request: the slots, blocks and adapters of offline sequences count as free. If the online part takes any
of them, offline sequences are preempted (Decider._yield), and the step is scheduled again. Then the default policies
(for capacity: LeftoverCapacity) schedule offline requests with the rest of the step's tokens, slots and blocks. So the
policies in force decide everything about online requests, whether there are offline requests or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from scheduler_svc.core.policy.interfaces import Policies
from scheduler_svc.core.policy.order import OrderPolicy
from scheduler_svc.core.policy.step import CapacityPolicy, Step, Verdict
from scheduler_svc.core.policy.step_view import Waiting
from scheduler_svc.core.requests.request import Request, RequestView
from scheduler_svc.core.step.decide import Decider
from scheduler_svc.core.workers.state import WorkerState

# Share of the pool that stays free when an offline request is admitted beside others. Without it, each block that an
# online sequence grows by would preempt an offline one. The default preset uses the same share for preempted requests.
RESERVE = 0.05
# An online request rejected for one of these reasons is at a limit of its own: offline requests do not take its room.
OWN_LIMITS = ("tenant", "lora")


class LeftoverCapacity(CapacityPolicy):
    """Admits a request if its whole prompt and the reserve fit the blocks that are left."""

    def __init__(self, runs_others: bool) -> None:
        """`runs_others`: whether the worker runs any sequence, so that there is a reserve."""
        self._runs_others = runs_others

    def admit(self, step: Step, request: RequestView, need_blocks: int) -> Verdict:
        """STOP if the prompt does not fit."""
        reserve = int(RESERVE * step.total_blocks) if self._runs_others or step.num_admissions else 0
        whole = step.need_blocks(request, step.uncached_tokens(request))
        return Verdict.ADMIT if whole + reserve <= step.available_blocks else Verdict.STOP


class OfflineScheduler:
    """Schedules the offline part of each step, with policies of its own."""

    def __init__(self, make_policies: Callable[[], Policies]) -> None:
        """`make_policies` makes the default policies. Their order sorts the offline requests."""
        self._make_policies = make_policies
        self.policies = make_policies()

    def new_order(self) -> OrderPolicy:
        """Another instance of the order, after the current one has failed."""
        self.policies = replace(self.policies, order=self._make_policies().order)
        return self.policies.order

    def add(self, decider: Decider, worker: WorkerState, online: Step, waiting: Waiting, now_s: float) -> Step | None:
        """Add the offline part to the online part of a step. None if nothing runs in the step because offline sequences
        were preempted for one another: then it is scheduled again after the next exchange."""
        if online._decodes == [] and online.num_decoding:
            return online  # its decodes are on hold in this step, so the worker runs no decodes at all
        if online.is_empty and worker.preempted:
            return online  # the online part is scheduled again at once
        num_offline = len(worker.batch.offline)
        runs_others = bool(worker.batch.running) or online.num_admissions > 0
        policies = replace(self.policies, capacity=LeftoverCapacity(runs_others))
        admits = not (worker.yielded or _lacks_room(online))
        online._offline_part = decider.apply_policies(
            worker, policies, waiting if admits else _none, now_s, offline=True, beside=online
        )
        if online._offline_part is None and online.is_empty and len(worker.batch.offline) < num_offline:
            return None
        return online


def _lacks_room(online: Step) -> bool:
    """Whether online requests wait for something that an offline request could take."""
    return online._closed is not None or any(reason not in OWN_LIMITS for _, reason, _ in online._rejected)


def _none() -> Iterator[Request]:
    return iter(())
