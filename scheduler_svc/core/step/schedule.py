"""Schedules steps with the current policies, and falls back to the default policies when one of them fails."""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from scheduler_svc.core.admission.budgets import Budgets, ClassBudgets
from scheduler_svc.core.admission.queue import ClassQueues, WaitingQueue
from scheduler_svc.core.cache.link import CacheLink
from scheduler_svc.core.faults.retry_groups import RetryBatch, RetryCapacity, retry_candidates
from scheduler_svc.core.policy.interfaces import PlacementPolicy, Policies
from scheduler_svc.core.policy.order import OrderPolicy, PolicyError
from scheduler_svc.core.policy.step import Step
from scheduler_svc.core.policy.step_view import Waiting
from scheduler_svc.core.requests.request import Request, view_of
from scheduler_svc.core.step.decide import Decider
from scheduler_svc.core.step.offline import OfflineScheduler
from scheduler_svc.core.step.placement import Placement
from scheduler_svc.core.step.policy_failures import PolicyFailures
from scheduler_svc.core.types import SchedulerCounters
from scheduler_svc.core.workers.state import WorkerState
from scheduler_svc.core.workers.step_time import FleetStepTimes, OutputLength

# Waiting requests for which one exchange asks for fresh matches, at most.
MAX_CANDIDATES = 16
# Waiting requests that are placed between two events, at most. Placing one delays the next event by 0.1 ms.
MAX_PLACEMENTS = 512
# Reasons for which one worker rejects a request that another worker may have room for.
REFUSALS = ("capacity", "blocks")
# Characters of a placement policy's reason that `explain` keeps for each request.
MAX_WHY = 500


class StepScheduler:
    """`policies` are the current policies. If one raises while a step is scheduled, the error is counted, and the
    default policies schedule that step, with the waiting requests oldest first."""

    def __init__(
        self,
        policies: Policies,
        fallback: Callable[[], Policies],
        counters: SchedulerCounters,
        on_policy_error: Callable[[Exception], None],
        budgets: ClassBudgets,
        step_times: FleetStepTimes,
        output_length: OutputLength,
    ) -> None:
        """`fallback` makes the policies that schedule a step when the current ones fail."""
        self._step_times = step_times
        self._output_length = output_length
        self.policies = policies
        self._budgets = budgets
        self._make_fallback, self._fallback = fallback, fallback()
        self._offline = OfflineScheduler(fallback)
        self.queue = ClassQueues(
            WaitingQueue(policies.order, self._order_failed, _free_tokens(budgets.online)),
            WaitingQueue(self._offline.policies.order, self._offline_order_failed, _free_tokens(budgets.offline)),
        )
        self._counters = counters
        self.failures = PolicyFailures(policies)
        self._on_policy_error = on_policy_error
        # Of the last step scheduled: tenants at their limit, with their running tokens.
        self.at_limit: dict[str, int] = {}
        # Of the last step scheduled: requests that were skipped because the worker still prepares their grammar.
        self.without_grammar: list[Request] = []
        self._placement: Placement | None = None  # of the current round
        self._placements_left = 0
        # With tenant limits: requests that a pass looked at and that may be newly stuck, or stuck no more (_is_stuck).
        self._doubtful: list[Request] = []

    def set_policies(self, policies: Policies, workers: dict[int, WorkerState]) -> None:
        """Set other policies from the next step on. Raises what their order raises; then nothing has changed."""
        self.queue.online.reorder(policies.order)
        self.failures = PolicyFailures(policies, self._counters.steps)
        self.policies = policies  # before `started`: the order may fail there and be replaced
        for worker in workers.values():
            for request in worker.bound:
                if not request.metadata.offline:
                    self.queue.online.started(request)

    def begin(self) -> None:
        """A scheduling pass over all workers begins."""
        self._placements_left = MAX_PLACEMENTS

    def must_ask(self, worker: WorkerState, cache: CacheLink) -> bool:
        """Whether the next step has to wait for the cache. A step that admits, grows or preempts needs the cache's
        answer to everything that happened before. A step in which every sequence just goes on needs no answer."""
        room = worker.batch.slots.num_free > 0 or self._looks_past_slots or bool(worker.batch.offline)
        may_admit = len(self.queue.online) > 0 and room and not worker.draining
        if self.queue.offline.num_requests and not may_admit:
            may_admit = worker.batch.slots.num_free > 0 and not worker.draining
        if not (may_admit or worker.preempted or worker.batch.prefills or worker.batch.paused or worker.batch.may_grow):
            return False
        if not cache.idle:
            return True
        if worker.knows_cache or not cache.has_gathered:
            return False
        # Operations have gathered for the cache, and some may free the blocks of ended sequences. Wait for the cache's
        # report before admitting or preempting.
        return may_admit or bool(worker.preempted) or worker.may_lack_blocks

    @property
    def _looks_past_slots(self) -> bool:
        """Whether waiting requests are considered even without a free slot, because the capacity policy may preempt for
        them. `is True`, because the truth value of a policy's attribute could raise, and no code here catches that."""
        return self.policies.capacity.preempts_for_waiting is True

    def schedule_step(
        self, decider: Decider, worker: WorkerState, workers: dict[int, WorkerState], now_s: float, closed: bool
    ) -> Step | None:
        """Schedule the worker's next step. None if a sequence was preempted: then the step is scheduled again after the
        next exchange. `closed`: no request is admitted."""
        step = self._decide(decider, worker, workers, now_s, closed)
        if step is not None and len(workers) > 1:
            for request, reason, _ in step._rejected:
                if reason in REFUSALS:
                    worker.refuse(request)
        if self._doubtful and self._reconsider(workers) and step is not None and step.is_empty:
            step = self._decide(decider, worker, workers, now_s, closed)
        if step is not None and (worker.batch.offline or self.queue.offline.num_requests):
            waiting = self._offline_waiting(worker, now_s, closed)
            return self._offline.add(decider, worker, step, waiting, now_s)
        return step

    def _decide(
        self, decider: Decider, worker: WorkerState, workers: dict[int, WorkerState], now_s: float, closed: bool
    ) -> Step | None:
        self.at_limit.clear()
        self.without_grammar.clear()
        waiting = self._waiting(worker, workers, now_s, closed)
        try:
            return decider.decide(worker, self.policies, waiting, now_s)
        except Exception as error:
            self._failed(error)
        return decider.decide(worker, self._fallback, self._waiting(worker, workers, None, closed), now_s)

    def schedule_retry_step(
        self, decider: Decider, worker: WorkerState, members: list[Request], now_s: float
    ) -> Step | None:
        """Schedule a step that retries these suspects. Of the current policies, only preemption decides."""
        # While a group has online suspects, only these are retried. They may preempt offline sequences, but offline
        # suspects may not preempt online sequences.
        online = [request for request in members if not request.metadata.offline]
        members, offline = online or members, not online
        policies = replace(self.policies, capacity=RetryCapacity(), batch=RetryBatch(members))
        waiting = partial(retry_candidates, members, worker)
        try:
            return decider.decide_retry(worker, policies, waiting, now_s, offline)
        except Exception as error:
            self._failed(error)
        policies = replace(policies, preemption=self._fallback.preemption)
        return decider.decide_retry(worker, policies, waiting, now_s, offline)

    def planned(self, step: Step) -> None:
        """Tell the capacity and batch policies that the step is accepted."""
        for policy in (self.policies.capacity, self.policies.batch):
            try:
                policy.planned(step)
            except Exception as error:
                self._failed(error)

    def bound(self, request: Request, worker_id: int) -> str:
        """Tell the placement policy that the request is bound to the worker. Returns the policy's reason."""
        try:
            why = self.policies.placement.bound(view_of(request), worker_id)
            if not isinstance(why, str):
                raise PolicyError(f"placement: bound returned {reprlib.repr(why)}, which is no text")
            return why[:MAX_WHY]
        except Exception as error:
            self._failed(error)
            return ""

    def candidates(self, workers: dict[int, WorkerState], now_s: float) -> list[Request]:
        """The requests that the next pass looks at first: at most MAX_CANDIDATES, and no more than the workers have
        free slots for. Slots do not matter if the capacity policy preempts for waiting requests. The list ends with the
        request that uses up the tokens of one step of all workers."""
        num_slots = sum(max(0, worker.free_slots) for worker in workers.values())
        count = MAX_CANDIDATES if self._looks_past_slots else min(num_slots, MAX_CANDIDATES)
        if not count or not len(self.queue):
            return []
        candidates, budget_tokens = list[Request](), sum(worker.max_batched_tokens for worker in workers.values())
        try:
            ordered = itertools.chain(self.queue.online.ordered(now_s), self.queue.offline.ordered(now_s))
            for request in itertools.islice(ordered, count):
                candidates.append(request)
                budget_tokens -= request.num_tokens - request.best_matched_tokens
                if budget_tokens <= 0:
                    break
        except Exception:  # the pass asks for the same order, meets the same error and reports it
            return list(itertools.islice(self.queue, count))
        return candidates

    def _waiting(
        self, worker: WorkerState, workers: dict[int, WorkerState], ordered_at_s: float | None, closed: bool
    ) -> Waiting:
        """The requests that the worker may admit: first the requests that it swapped out, oldest first; then the queue
        in the order policy's order at that time, or oldest first if the time is None."""
        takes = self._taker(worker, workers, (self.policies if ordered_at_s is not None else self._fallback).placement)

        def waiting() -> Iterator[Request]:
            if worker.draining or closed:
                return
            if worker.host.swapped and not worker.preempted:  # no request resumes while a sequence is being preempted
                back = (request for request in worker.host.swapped.values() if not request.is_suspect)
                yield from sorted(back, key=lambda request: request.arrival_index)
            queue = self.queue.online
            ordered = iter(queue) if ordered_at_s is None else queue.ordered(ordered_at_s)
            yield from self._eligible(worker, ordered, takes, self.at_limit)

        return waiting

    def _offline_waiting(self, worker: WorkerState, now_s: float, closed: bool) -> Waiting:
        """The offline requests that the worker may admit, in their order. Placement does not choose their worker: a
        worker with slots, blocks and tokens left takes the next request."""

        def waiting() -> Iterator[Request]:
            if not (worker.draining or closed):
                ordered = self.queue.offline.ordered(now_s)
                yield from self._eligible(worker, ordered, lambda request: True, {})

        return waiting

    def _eligible(
        self,
        worker: WorkerState,
        ordered: Iterator[Request],
        takes: Callable[[Request], bool | None],
        at_limit: dict[str, int],
    ) -> Iterator[Request]:
        """The requests that the worker could run now. `takes`: a function that _taker() made, or one like it.
        Fills `at_limit`."""
        limited = self._budgets.online.limits_tenants
        for request in ordered:
            if request.matches is None:
                continue
            budgets = self._budgets.of(request)
            if limited and budgets.waits_for_tenant(request):
                at_limit[request.metadata.tenant] = budgets.tenant_tokens[request.metadata.tenant]
                continue
            skipped = _waits_for_another(request) or not worker.can_ever_hold(request)
            if not worker.has_grammar(request):
                worker.want_grammar(request)
                self.without_grammar.append(request)
                skipped = True
            taken = False if skipped else takes(request)
            if taken is None:
                return
            if taken:
                yield request
            if limited and self.queue.of(request).is_stuck(request) != (skipped or not worker.fits_adapter(request)):
                self._doubtful.append(request)

    def _taker(
        self, worker: WorkerState, workers: dict[int, WorkerState], policy: PlacementPolicy
    ) -> Callable[[Request], bool | None]:
        """A function for one step. It tells whether the worker may admit a request. None: not this request, and no
        later one, for now."""
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
            return False if worker.free_slots or self._looks_past_slots else None  # no slot here for any later request

        return takes

    def _round_of(self, worker: WorkerState, workers: dict[int, WorkerState], policy: PlacementPolicy) -> Placement:
        """The current placement round, or a new one."""
        going = self._placement
        if going is None or going.policy is not policy or not going.turn_of(worker):
            self._step_times.begin([other.step_fit for other in workers.values()])
            going = self._placement = Placement(workers.values(), policy, self._output_length.mean_tokens)
            going.turn_of(worker)
        return going

    def fleet_changed(self) -> None:
        """A worker was added, has left, or drains."""
        self._placement = None

    def _reconsider(self, workers: dict[int, WorkerState]) -> bool:
        """Check again which of the doubtful requests are stuck. Returns whether the online order policy now sees more
        requests than before, because stuck requests no longer count for their tenant."""
        there = [worker for worker in workers.values() if not worker.draining]
        doubtful, self._doubtful = self._doubtful, []
        seen = [
            queue.reconsider(
                (one for one in doubtful if self.queue.of(one) is queue), lambda request: _is_stuck(request, there)
            )
            for queue in (self.queue.online, self.queue.offline)
        ]
        return seen[0]

    def _failed(self, error: Exception) -> None:
        self._counters.policy_errors += 1
        self.failures.add(error)
        self._on_policy_error(error)

    def _order_failed(self, error: Exception) -> OrderPolicy:
        """The order policy's index may be wrong after an error: the default order replaces it."""
        self._failed(error)
        order = self._make_fallback().order
        self.policies = replace(self.policies, order=order)
        return order

    def _offline_order_failed(self, error: Exception) -> OrderPolicy:
        self._failed(error)
        return self._offline.new_order()


def _free_tokens(budgets: Budgets) -> Callable[[str], int] | None:
    return budgets.free_tokens if budgets.limits_tenants else None


def _waits_for_another(request: Request) -> bool:
    return request.is_suspect or (request.family.parent is not None and request.waits_for_parent)


def _is_stuck(request: Request, workers: list[WorkerState]) -> bool:
    """Whether no worker could take the request, even if its tenant were not at its limit."""
    able = (worker for worker in workers if worker.can_ever_hold(request) and worker.fits_adapter(request))
    takers = (worker for worker in able if worker.has_grammar(request))
    return _waits_for_another(request) or next(takers, None) is None
