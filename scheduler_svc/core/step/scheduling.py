"""Composes steps under the policies in force, and goes on without those that fail at it."""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from scheduler_svc.core.admission.budgets import Budgets
from scheduler_svc.core.admission.queue import WaitingQueue
from scheduler_svc.core.cache.link import CacheLink
from scheduler_svc.core.faults.retry_groups import RetryBatch, RetryCapacity, retry_candidates
from scheduler_svc.core.policy.interfaces import PlacementPolicy, Policies
from scheduler_svc.core.policy.order import OrderPolicy, PolicyError
from scheduler_svc.core.policy.step import Step
from scheduler_svc.core.requests.request import Request, view_of
from scheduler_svc.core.step.placement import Placement
from scheduler_svc.core.step.planner import Planner
from scheduler_svc.core.step.policy_failures import PolicyFailures
from scheduler_svc.core.types import SchedulerCounters
from scheduler_svc.core.workers.state import WorkerState
from scheduler_svc.core.workers.step_time import FleetStepTimes, OutputLength

# Waiting requests whose matches are asked for anew, at the most.
MAX_CANDIDATES = 16
# Waiting requests that are placed between two events, at the most. One takes 0.1 ms, and nothing is heard meanwhile.
MAX_PLACEMENTS = 512
# Why a step has no room for a request, for which another worker may have some.
REFUSALS = ("capacity", "blocks")
# Characters of a placement policy's reason that `explain` keeps for each request.
MAX_WHY = 500


class StepScheduler:
    """`policies` are in force. They are guests: what one raises costs its turn, is counted, and costs no request."""

    def __init__(
        self,
        policies: Policies,
        fallback: Callable[[], Policies],
        counters: SchedulerCounters,
        on_policy_error: Callable[[Exception], None],
        budgets: Budgets,
        step_times: FleetStepTimes,
        output_length: OutputLength,
    ) -> None:
        """`fallback` makes the policies that compose a step when those in force fail at it."""
        self._step_times = step_times
        self._output_length = output_length
        self.policies = policies
        self._budgets = budgets
        free_tokens = budgets.free_tokens if budgets.limits_tenants else None
        self.queue = WaitingQueue(policies.order, self._order_failed, free_tokens)
        self._make_fallback, self._fallback = fallback, fallback()
        self._counters = counters
        self.failures = PolicyFailures(policies)
        self._on_policy_error = on_policy_error
        # Of the last composition: tenants that it passed over, since too much of them runs; in tokens.
        self.at_limit: dict[str, int] = {}
        # Likewise: requests that it passed over, since the worker has still to prepare their grammar.
        self.without_grammar: list[Request] = []
        self._placement: Placement | None = None  # the round that goes on
        self._placements_left = 0
        # Looked at in a composition, where a tenant's limit holds: whether they are stuck may not be what it was.
        self._doubtful: list[Request] = []

    def set_policies(self, policies: Policies, workers: dict[int, WorkerState]) -> None:
        """Other policies from the next step on. Raises what their order raises; then nothing has changed."""
        self.queue.reorder(policies.order)
        self.failures = PolicyFailures(policies, self._counters.steps)
        self.policies = policies  # before `started`, at which the order may fail and be replaced
        for worker in workers.values():
            for request in worker.bound:
                self.queue.started(request)

    def begin(self) -> None:
        """Compositions follow, for the workers in turn."""
        self._placements_left = MAX_PLACEMENTS

    def must_ask(self, worker: WorkerState, cache: CacheLink) -> bool:
        """Whether the next step has to wait for the cache. Decisions about who runs are made on what is there, so the
        cache first answers for all that has happened; a step in which everything just goes on needs no answer."""
        room = worker.slots.num_free > 0 or self._looks_past_slots
        may_admit = len(self.queue) > 0 and room and not worker.draining
        if not (may_admit or worker.preempted or worker.prefills or worker.may_grow):
            return False
        if not cache.idle:
            return True
        if worker.knows_cache or not cache.has_gathered:
            return False
        # What has just ended leaves blocks that the cache has not told of: nobody gives way for want of them.
        return may_admit or bool(worker.preempted) or worker.may_lack_blocks

    @property
    def _looks_past_slots(self) -> bool:
        """Compared and not asked for its truth, as nobody catches here what that may raise by now."""
        return self.policies.capacity.preempts_for_waiting is True

    def schedule_step(
        self, planner: Planner, worker: WorkerState, workers: dict[int, WorkerState], now_s: float, closed: bool
    ) -> Step | None:
        """The worker's next step; None if somebody gave way, and it has to be composed anew when the cache knows.
        `closed`: nobody is let in."""
        step = self._decide(planner, worker, workers, now_s, closed)
        if step is not None and len(workers) > 1:
            for request, reason, _ in step._rejected:
                if reason in REFUSALS:
                    worker.refuse(request)
        if self._doubtful and self._reconsider(workers) and step is not None and step.is_empty:
            return self._decide(planner, worker, workers, now_s, closed)
        return step

    def _decide(
        self, planner: Planner, worker: WorkerState, workers: dict[int, WorkerState], now_s: float, closed: bool
    ) -> Step | None:
        self.at_limit.clear()
        self.without_grammar.clear()
        waiting = self._waiting(worker, workers, now_s, closed)
        try:
            return planner.decide_step(worker, self.policies, waiting, now_s)
        except Exception as error:
            self._failed(error)
        return planner.decide_step(worker, self._fallback, self._waiting(worker, workers, None, closed), now_s)

    def schedule_retry_step(
        self, planner: Planner, worker: WorkerState, members: list[Request], now_s: float
    ) -> Step | None:
        """As compose(), a step that tries these suspects. The policies in force say who gives way, no more."""
        policies = replace(self.policies, capacity=RetryCapacity(), batch=RetryBatch(members))
        waiting = partial(retry_candidates, members, worker)
        try:
            return planner.decide_retry_step(worker, policies, waiting, now_s)
        except Exception as error:
            self._failed(error)
        policies = replace(policies, preemption=self._fallback.preemption)
        return planner.decide_retry_step(worker, policies, waiting, now_s)

    def planned(self, step: Step) -> None:
        """The composition stands."""
        for policy in (self.policies.capacity, self.policies.batch):
            try:
                policy.planned(step)
            except Exception as error:
                self._failed(error)

    def bound(self, request: Request, worker_id: int) -> str:
        """Tell the placement policy that the request is bound there; returns why, in its words."""
        try:
            why = self.policies.placement.bound(view_of(request), worker_id)
            if not isinstance(why, str):
                raise PolicyError(f"placement: bound returned {reprlib.repr(why)}, which is no text")
            return why[:MAX_WHY]
        except Exception as error:
            self._failed(error)
            return ""

    def candidates(self, workers: dict[int, WorkerState], now_s: float) -> list[Request]:
        """The requests that the next composition looks at first, as many as the workers can begin in a step, after what
        is known to be cached of them."""
        num_slots = sum(max(0, worker.free_slots) for worker in workers.values())
        count = MAX_CANDIDATES if self._looks_past_slots else min(num_slots, MAX_CANDIDATES)
        if not count or not len(self.queue):
            return []
        candidates, budget_tokens = list[Request](), sum(worker.max_batched_tokens for worker in workers.values())
        try:
            for request in itertools.islice(self.queue.ordered(now_s), count):
                candidates.append(request)
                budget_tokens -= request.num_tokens - request.best_matched_tokens
                if budget_tokens <= 0:
                    break
        except Exception:  # the composition, which asks for the same order, meets it too and says so
            return list(itertools.islice(self.queue, count))
        return candidates

    def _waiting(
        self, worker: WorkerState, workers: dict[int, WorkerState], ordered_at_s: float | None, closed: bool
    ) -> Callable[[], Iterator[Request]]:
        """What may be bound to the worker: what it has swapped out, oldest first, then the others in the order in force
        at that time, or (None) oldest first."""
        takes = self._taker(worker, workers, (self.policies if ordered_at_s is not None else self._fallback).placement)

        def waiting() -> Iterator[Request]:
            if worker.draining or closed:
                return
            if worker.swapped and not worker.preempted:  # nobody comes back while somebody else has to go
                back = (request for request in worker.swapped.values() if not request.is_suspect)
                yield from sorted(back, key=lambda request: request.arrival_index)
            queue = self.queue
            limited, tenant_tokens = self._budgets.limits_tenants, self._budgets.tenant_tokens
            for request in iter(queue) if ordered_at_s is None else queue.ordered(ordered_at_s):
                if request.matches is None:
                    continue
                if limited and self._budgets.waits_for_tenant(request):
                    self.at_limit[request.tenant] = tenant_tokens[request.tenant]
                    continue
                passed_over = _waits_for_another(request) or not worker.can_ever_hold(request)
                if not worker.has_grammar(request):
                    worker.want_grammar(request)
                    self.without_grammar.append(request)
                    passed_over = True
                taken = False if passed_over else takes(request)
                if taken is None:
                    return
                if taken:
                    yield request
                if limited and queue.is_aside(request) != (passed_over or not worker.has_adapter(request)):
                    self._doubtful.append(request)

        return waiting

    def _taker(
        self, worker: WorkerState, workers: dict[int, WorkerState], policy: PlacementPolicy
    ) -> Callable[[Request], bool | None]:
        """For a composition: whether a request may be bound to the worker; None: nor any that comes after it, now."""
        placement: Placement | None = None

        def takes(request: Request) -> bool | None:
            nonlocal placement
            if len(workers) == 1:
                return True
            if placement is None:
                placement = self._round_of(worker, workers, policy)
            if not placement.knows(request):
                if not self._placements_left:
                    return None
                self._placements_left -= 1
            if placement.place(request) in (worker, None):
                return True
            return False if worker.free_slots or self._looks_past_slots else None  # the others fill up first

        return takes

    def _round_of(self, worker: WorkerState, workers: dict[int, WorkerState], policy: PlacementPolicy) -> Placement:
        """The round of placement that goes on, or a new one."""
        going = self._placement
        if going is None or going.policy is not policy or not going.turn_of(worker):
            self._step_times.begin([other.step_fit for other in workers.values()])
            going = self._placement = Placement(workers.values(), policy, self._output_length.mean_tokens)
            going.turn_of(worker)
        return going

    def fleet_changed(self) -> None:
        """A worker came, left, or is to leave."""
        self._placement = None

    def _reconsider(self, workers: dict[int, WorkerState]) -> bool:
        """Whether others of their tenants have come into the order for those that were passed over."""
        there = [worker for worker in workers.values() if not worker.draining]
        doubtful, self._doubtful = self._doubtful, []
        return self.queue.reconsider(doubtful, lambda request: _is_stuck(request, there))

    def _failed(self, error: Exception) -> None:
        self._counters.policy_errors += 1
        self.failures.add(error)
        self._on_policy_error(error)

    def _order_failed(self, error: Exception) -> OrderPolicy:
        """The order policy can no longer be trusted to know what waits: the default one takes its place."""
        self._failed(error)
        order = self._make_fallback().order
        self.policies = replace(self.policies, order=order)
        return order


def _waits_for_another(request: Request) -> bool:
    return request.is_suspect or (request.parent is not None and request.waits_for_parent)


def _is_stuck(request: Request, workers: list[WorkerState]) -> bool:
    """Whether nobody could take it, whatever its tenant has left."""
    able = (worker for worker in workers if worker.can_ever_hold(request) and worker.has_adapter(request))
    takers = (worker for worker in able if worker.has_grammar(request))
    return _waits_for_another(request) or next(takers, None) is None
