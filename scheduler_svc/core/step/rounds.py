"""Rounds of steps, for all workers with credit. A step has three stages, each in a module of this folder:

1. schedule: the policies decide what the step runs (schedule.py, decide.py, placement.py).
2. exchange: the cache grants the blocks, and until it answers the step is pending. A step that needs nothing from it
   goes on at once (exchange.py).
3. emit: the plan goes to the worker (emit.py). Its result comes back to results.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.v1.cache_pb2 import CacheServiceLinkRequest
from scheduler_svc.core.cache.link import CacheLink
from scheduler_svc.core.faults.retry_groups import RetryGroups
from scheduler_svc.core.lifecycle.beam_groups import BeamGroups
from scheduler_svc.core.lifecycle.lifecycle import Lifecycle
from scheduler_svc.core.policy.step import Step
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.step.decide import Decider
from scheduler_svc.core.step.drafting import Drafting
from scheduler_svc.core.step.exchange import StepExchanges
from scheduler_svc.core.step.schedule import REFUSALS, StepScheduler
from scheduler_svc.core.workers.state import PendingSteps, WorkerState
from scheduler_svc.core.workers.steps import Decision, PendingStep


@dataclass(slots=True, eq=False)
class Rounds:
    """Schedules the next step of every worker that has credit."""

    _workers: dict[int, WorkerState]
    _cache: CacheLink
    _step_scheduler: StepScheduler
    _decider: Decider
    _exchanges: StepExchanges
    _life: Lifecycle
    _groups: BeamGroups
    _retry_groups: RetryGroups
    _drafting: Drafting
    _refusals: int = field(default=0, init=False)  # refusals in a row while the system is idle

    def plan(self, now_s: float) -> CacheServiceLinkRequest | None:
        """Schedule a step for every worker with credit. Returns the next exchange for the cache, if there is one."""
        if not self._cache.connected:
            return None
        if self._cache.restoring:  # until the cache has answered, it is not known which sequences keep their blocks
            return self._cache.open(now_s)
        pending_steps: PendingSteps = []
        awaiting_cache: list[WorkerState] = []
        self._step_scheduler.begin()
        for worker in self._workers.values():
            self._plan_worker(worker, pending_steps, awaiting_cache, now_s)
        return self._exchanges.next(pending_steps, awaiting_cache, now_s)

    def _plan_worker(
        self, worker: WorkerState, pending_steps: PendingSteps, awaiting_cache: list[WorkerState], now_s: float
    ) -> None:
        retry_groups, may_retry = self._retry_groups, self._retry_groups.active
        while worker.pending_step is None and worker.has_credit:
            if self._must_ask(worker):
                awaiting_cache.append(worker)
                return
            members = retry_groups.members(worker) if may_retry else []
            if members and worker.in_flight:
                return  # no other step is in flight beside a retry step
            num_offline = len(worker.batch.offline)
            step = self._schedule_step(worker, members, now_s)
            if step is None:
                if len(worker.batch.offline) < num_offline:
                    pass  # offline sequences were preempted; online ones keep what they have
                elif worker.parked:
                    self._groups.give_up_blocks(worker)
                elif not worker.batch.running:  # the sequence ran alone and was preempted itself
                    self._cache.unpins[worker.id] = None
                awaiting_cache.append(worker)  # a sequence was preempted; its blocks come back with the exchange
                return
            if self._accept(worker, step, pending_steps, is_retry=bool(members)):
                continue
            if members:
                retry_groups.pause(worker)
                if not worker.batch.running:
                    self._groups.give_up_blocks(worker)
                may_retry = False
            elif not (may_retry and retry_groups.has_group_for(worker)):
                return

    def _must_ask(self, worker: WorkerState) -> bool:
        """Whether the next step has to wait for the cache."""
        if self._step_scheduler.must_ask(worker, self._cache):
            return True
        return worker.may_draft and self._drafting.must_ask(worker, self._cache)

    def _schedule_step(self, worker: WorkerState, members: list[Request], now_s: float) -> Step | None:
        if members:
            return self._step_scheduler.schedule_retry_step(self._decider, worker, members, now_s)
        self._retry_groups.others_had_their_turn(worker)
        closed = self._retry_groups.active and self._retry_groups.has_group_for(worker)
        return self._step_scheduler.schedule_step(self._decider, worker, self._workers, now_s, closed)

    def _accept(self, worker: WorkerState, step: Step, pending_steps: PendingSteps, is_retry: bool) -> bool:
        """Turn a scheduled step into a plan, or into a pending step for the cache. Returns False in two cases: the step
        is empty and no sequence was preempted for it, or only drafting sequences run and wait for their tokens in
        flight. Otherwise the worker may schedule again."""
        decision = step._decision()
        if worker.may_draft and not is_retry:
            drafted = self._drafting.add(worker, step, decision, self._cache)
            if drafted is None:
                return False
            decision = drafted
        worker.knows_cache = False
        preempted, yielded = bool(worker.preempted), worker.yielded
        worker.preempted.clear()
        worker.yielded = False
        if not is_retry:
            self._step_scheduler.planned(step)
        timeline, now_s = self._life.timeline, self._life.now_s
        if is_retry:
            timeline.decided(worker.id, decision.rejected, decision.closed, now_s)
        else:
            at_limit, without_grammar = self._step_scheduler.at_limit, self._step_scheduler.without_grammar
            timeline.decided(worker.id, decision.rejected, decision.closed, now_s, at_limit, without_grammar)
        if step.is_empty and step._runs_nothing:
            self._life.counters.empty_steps += preempted
            if not (self._ask_for_pins(worker, decision) or is_retry):
                self._watch_progress(decision)
            return preempted or yielded  # then schedule again: perhaps only the preempted sequences can run
        self._refusals, worker.asked_for_pins = 0, False
        pending_step = PendingStep(worker.id, decision, worker.batch.slots.num_releases, now_s)
        if len(decision.growth) or decision.admissions:
            for admission in decision.admissions:
                request, why = admission.request, ""
                if len(self._workers) > 1 and not request.metadata.offline:
                    why = self._step_scheduler.bound(request, worker.id)
                self._life.bind(worker, request, why)
            worker.pending_step = pending_step
            pending_steps.append((worker, pending_step))
        else:
            self._exchanges.finish(worker, pending_step, None)
        return True

    def _ask_for_pins(self, worker: WorkerState, decision: Decision) -> bool:
        """Ask the cache to release the worker's pins if they may be what a request waits for: no sequence runs on the
        worker, some of its blocks are in use all the same, and a request was rejected for want of blocks. Returns
        whether the cache is asked."""
        lacks_blocks = any(reason in REFUSALS for _, reason, _ in decision.rejected)
        blocks_in_use = worker.available_blocks < worker.num_blocks and not worker.parked
        if not (worker.is_idle and lacks_blocks and blocks_in_use) or worker.asked_for_pins:
            return False
        worker.asked_for_pins = True
        self._cache.unpins[worker.id] = None
        return True

    def _watch_progress(self, decision: Decision) -> None:
        """Nothing runs on any worker, and the policies still admit no request. After `stuck_decisions` decisions per
        worker the first request fails, so that it does not block the others for ever."""
        idle = all(worker.is_idle for worker in self._workers.values())
        if not (idle and decision.rejected and len(self._life.queue)):
            return
        if sum(self._groups.give_up_blocks(worker) for worker in self._workers.values()):
            return
        self._refusals += 1
        if self._refusals >= self._life.config.stuck_decisions * len(self._workers):
            self._refusals = 0
            request, reason, detail = decision.rejected[0]
            message = f"{reason}: no progress is possible for this request under the policies in force: {detail}"
            self._life.fail(request, message)
