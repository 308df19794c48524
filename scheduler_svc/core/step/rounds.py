"""Rounds of steps. A step is scheduled for a worker with credit, the cache grants its blocks, and the plan is sent.

A step that needs nothing from the cache becomes a plan at once. Any other step is pending until the cache answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.v1.cache_pb2 import CacheServiceLinkRequest, CacheServiceLinkResponse
from paceline.v1.worker_pb2 import WorkerServiceLinkResponse
from scheduler_svc.core.cache.link import CacheLink, Sent, admit_result
from scheduler_svc.core.faults.retry_groups import RetryGroups
from scheduler_svc.core.lifecycle.beam_groups import BeamGroups
from scheduler_svc.core.lifecycle.lifecycle import Lifecycle
from scheduler_svc.core.policy.step import Step
from scheduler_svc.core.requests.phases import Phase
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.step.planner import Planner
from scheduler_svc.core.step.scheduling import StepScheduler
from scheduler_svc.core.workers.decision import Decision
from scheduler_svc.core.workers.state import PendingStep, PendingSteps, WorkerState


class Rounds:
    def __init__(
        self,
        workers: dict[int, WorkerState],
        cache: CacheLink,
        step_scheduler: StepScheduler,
        planner: Planner,
        life: Lifecycle,
        groups: BeamGroups,
        retry_groups: RetryGroups,
        send: Callable[[int, WorkerServiceLinkResponse], None],
    ) -> None:
        """`send` takes a worker's id and a message to it."""
        self._workers = workers
        self._cache = cache
        self._step_scheduler = step_scheduler
        self._planner = planner
        self._life = life
        self._groups = groups
        self._retry_groups = retry_groups
        self._send = send
        self._refusals = 0  # refusals in a row while the system is idle
        self._candidates_due = False

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
            if worker.pending_step is None and worker.has_credit:
                self._plan_worker(worker, pending_steps, awaiting_cache, now_s)
        if not (self._cache.idle and (pending_steps or self._cache.has_gathered)):
            return None
        if not (pending_steps or awaiting_cache) and self._is_about_to_ask():
            return None
        return self._cache.emit_exchange(
            pending_steps, awaiting_cache, self._candidates(pending_steps, awaiting_cache, now_s), now_s
        )

    def _candidates(
        self,
        pending_steps: PendingSteps,
        awaiting_cache: list[WorkerState],
        now_s: float,
    ) -> list[Request]:
        """The next waiting requests, for which the exchange asks for fresh matches. An exchange that admits other
        requests first, while no worker waits for its answer, leaves the question to the next exchange."""
        if not len(self._life.queue):
            return []
        lets_in = any(pending_step.decision.admissions for _, pending_step in pending_steps)
        asks = bool(awaiting_cache) or self._candidates_due or (bool(pending_steps) and not lets_in)
        self._candidates_due = lets_in and not asks
        return self._step_scheduler.candidates(self._workers, now_s) if asks else []

    def _is_about_to_ask(self) -> bool:
        """Whether the exchange would carry only commits, and a question follows soon anyway: the last token of a
        sequence is in flight, and then its slot is free for a waiting request. The commits go with that question."""
        waits = self._cache.has_only_commits and len(self._life.queue) > 0
        return waits and any(worker.finishing and not worker.draining for worker in self._workers.values())

    def _plan_worker(
        self,
        worker: WorkerState,
        pending_steps: PendingSteps,
        awaiting_cache: list[WorkerState],
        now_s: float,
    ) -> None:
        retry_groups, may_retry = self._retry_groups, self._retry_groups.active
        while worker.pending_step is None and worker.has_credit:
            if self._step_scheduler.must_ask(worker, self._cache):
                awaiting_cache.append(worker)
                return
            members = retry_groups.members(worker) if may_retry else []
            if members and worker.in_flight:
                return  # no other step is in flight beside a retry step
            step = self._schedule_step(worker, members, now_s)
            if step is None:
                if worker.parked:
                    self._groups.give_up_blocks(worker)
                elif not worker.running:  # the sequence ran alone and was preempted itself
                    self._cache.unpins[worker.id] = None
                awaiting_cache.append(worker)  # a sequence was preempted; its blocks come back with the exchange
                return
            if self._accept(worker, step, pending_steps, is_retry=bool(members)):
                continue
            if members:
                retry_groups.pause(worker)
                if not worker.running:
                    self._groups.give_up_blocks(worker)
                may_retry = False
            elif not (may_retry and retry_groups.has_group_for(worker)):
                return

    def _schedule_step(self, worker: WorkerState, members: list[Request], now_s: float) -> Step | None:
        if members:
            return self._step_scheduler.schedule_retry_step(self._planner, worker, members, now_s)
        self._retry_groups.others_had_their_turn(worker)
        return self._step_scheduler.schedule_step(
            self._planner, worker, self._workers, now_s, self._retry_groups.has_group_for(worker)
        )

    def _accept(self, worker: WorkerState, step: Step, pending_steps: PendingSteps, is_retry: bool) -> bool:
        """Turn a scheduled step into a plan, or into a pending step that waits for the cache. Returns False if the step
        is empty."""
        worker.knows_cache = False
        preempted = bool(worker.preempted)
        worker.preempted.clear()
        if not is_retry:
            self._step_scheduler.planned(step)
        decision = step._decision()
        timeline, now_s = self._life.timeline, self._life.now_s
        if is_retry:
            timeline.decided(worker.id, decision.rejected, decision.closed, now_s)
        else:
            at_limit, without_grammar = self._step_scheduler.at_limit, self._step_scheduler.without_grammar
            timeline.decided(worker.id, decision.rejected, decision.closed, now_s, at_limit, without_grammar)
        if step.is_empty:
            self._life.counters.empty_steps += preempted
            if not (self._ask_for_pins(worker, step) or is_retry):
                self._watch_progress(decision)
            return preempted  # the preempted sequences may be all that there is to run
        self._refusals, worker.asked_for_pins = 0, False
        pending_step = PendingStep(worker.id, decision, worker.slots.num_releases)
        if len(decision.growth) or decision.admissions:
            for admission in decision.admissions:
                why = self._step_scheduler.bound(admission.request, worker.id) if len(self._workers) > 1 else ""
                self._life.bind(worker, admission.request, why)
            worker.pending_step = pending_step
            pending_steps.append((worker, pending_step))
        else:
            self._finish_pending_step(worker, pending_step, None)
        return True

    def _ask_for_pins(self, worker: WorkerState, step: Step) -> bool:
        """Whether pinned blocks are in the way: nothing runs on the worker, some of its blocks are in use all the same,
        and a request waits for blocks. Then the cache gives up the pins, and the next step may admit the request."""
        busy = worker.running or worker.in_flight or worker.pending_step or worker.parked
        lacks_blocks = any(reason in ("capacity", "blocks") for _, reason, _ in step.rejected)
        if busy or not lacks_blocks or worker.asked_for_pins or worker.available_blocks == worker.num_blocks:
            return False
        worker.asked_for_pins = True
        self._cache.unpins[worker.id] = None
        return True

    def _watch_progress(self, decision: Decision) -> None:
        """Nothing runs on any worker, and the policies still admit no request. After `stuck_decisions` decisions per
        worker the first request fails, so that it does not block the others for ever."""
        idle = not any(w.running or w.in_flight or w.pending_step for w in self._workers.values())
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

    def answered(self, sent: Sent, response: CacheServiceLinkResponse) -> None:
        """The cache has answered an exchange: its pending steps become plans."""
        for pending_step, extend, admits in sent.pending_steps:
            worker = self._workers.get(pending_step.worker)
            if worker is not None and worker.pending_step is pending_step:
                worker.pending_step = None
                self._finish_pending_step(worker, pending_step, response, extend, admits)
            else:  # the worker was lost: RemoveWorker frees what was admitted there; what was refused is freed here
                refused = [seq for seq, i in pending_step.orphans if admit_result(response, admits[i]) is None]
                self._cache.frees.extend(refused)

    def _finish_pending_step(
        self,
        worker: WorkerState,
        pending_step: PendingStep,
        response: CacheServiceLinkResponse | None,
        extend: int = -1,
        admits: Sequence[int] = (),
    ) -> None:
        if extend >= 0 and response is not None and not response.results[extend].HasField("extend"):
            self._undo_pending_step(pending_step)
            return
        message = self._planner.emit_plan(worker, pending_step, response, extend, admits)
        if message is not None:
            self._life.counters.steps += 1
            self._send(worker.id, message)
        self._groups.release_parents(admission.request for admission in pending_step.decision.admissions)
        for admission, index in zip(pending_step.decision.admissions, admits, strict=True):
            request = admission.request
            if request.phase is not Phase.ALLOCATING:
                continue
            assert response is not None, "an admission needs an exchange"
            if admit_result(response, index) is None:  # the cache had less room than the step assumed
                self._life.refused(request)
            else:  # it would share tokens that the step no longer computes
                self._life.requeue(request)

    def _undo_pending_step(self, pending_step: PendingStep) -> None:
        """The cache could not extend the running sequences, so this step is dropped. The next one makes room.

        This happens when a commit of the same exchange finds its block stored already. The sequence then holds the
        stored block too, and one block less is available.
        """
        self._workers[pending_step.worker].allocating_tokens = 0
        for admission in pending_step.decision.admissions:
            request = admission.request
            if request.phase is Phase.ALLOCATING:
                self._life.requeue(request)
