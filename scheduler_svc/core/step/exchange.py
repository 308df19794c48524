"""Stage two of a step: the cache grants the blocks of pending steps. An exchange asks for all of them at once.

A step that needs nothing from the cache becomes a plan at once. Any other step is pending until the cache answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.v1.cache_pb2 import CacheServiceLinkRequest, CacheServiceLinkResponse
from paceline.v1.worker_pb2 import WorkerServiceLinkResponse
from scheduler_svc.core.cache.link import CacheLink, Sent, admit_result
from scheduler_svc.core.lifecycle.beam_groups import BeamGroups
from scheduler_svc.core.lifecycle.lifecycle import Lifecycle
from scheduler_svc.core.requests.phases import Phase
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.step.emit import Emitter
from scheduler_svc.core.step.schedule import StepScheduler
from scheduler_svc.core.workers.state import PendingSteps, WorkerState
from scheduler_svc.core.workers.steps import PendingStep


@dataclass(slots=True, eq=False)
class StepExchanges:
    """The steps that wait for the cache, and what becomes of them when it answers."""

    _workers: dict[int, WorkerState]
    _cache: CacheLink
    _step_scheduler: StepScheduler
    _emitter: Emitter
    _life: Lifecycle
    _groups: BeamGroups
    _send: Callable[[int, WorkerServiceLinkResponse], None]  # takes the id of a worker and a message to it
    _candidates_due: bool = field(default=False, init=False)

    def next(
        self, pending_steps: PendingSteps, awaiting_cache: list[WorkerState], now_s: float
    ) -> CacheServiceLinkRequest | None:
        """The next exchange, if the cache has answered the last one and there is something to tell or to ask."""
        if not (self._cache.idle and (pending_steps or self._cache.has_gathered)):
            return None
        if not (pending_steps or awaiting_cache) and self._is_about_to_ask():
            return None
        candidates = self._candidates(pending_steps, awaiting_cache, now_s)
        return self._cache.emit_exchange(pending_steps, awaiting_cache, candidates, now_s)

    def _candidates(
        self, pending_steps: PendingSteps, awaiting_cache: list[WorkerState], now_s: float
    ) -> list[Request]:
        """The next waiting requests, for which the exchange asks for fresh matches. If the exchange admits requests and
        no worker waits for the cache, the next exchange asks instead."""
        if not len(self._life.queue):
            return []
        admits = any(pending_step.decision.admissions for _, pending_step in pending_steps)
        asks = bool(awaiting_cache) or self._candidates_due or (bool(pending_steps) and not admits)
        self._candidates_due = admits and not asks
        return self._step_scheduler.candidates(self._workers, now_s) if asks else []

    def _is_about_to_ask(self) -> bool:
        """Whether the exchange would carry only commits, and a question follows soon anyway: the last token of a
        sequence is in flight, and then its slot is free for a waiting request. The commits go with that question."""
        waits = self._cache.has_only_commits and len(self._life.queue) > 0
        return waits and any(worker.batch.finishing and not worker.draining for worker in self._workers.values())

    def answered(self, sent: Sent, response: CacheServiceLinkResponse) -> None:
        """The cache has answered an exchange: its pending steps become plans."""
        for pending_step in sent.pending_steps:
            worker = self._workers.get(pending_step.worker)
            if worker is not None and worker.pending_step is pending_step:
                worker.pending_step = None
                self.finish(worker, pending_step, response)
            else:  # the worker was lost: RemoveWorker frees what was admitted there; what was refused is freed here
                admits = pending_step.admits
                refused = [seq for seq, i in pending_step.orphans if admit_result(response, admits[i]) is None]
                self._cache.frees.extend(refused)

    def finish(self, worker: WorkerState, pending_step: PendingStep, response: CacheServiceLinkResponse | None) -> None:
        """The pending step becomes a plan. `response` is the answer of the cache; None if it was not asked."""
        extend = pending_step.extend
        if extend is not None and response is not None and not response.results[extend].HasField("extend"):
            self._undo_pending_step(pending_step)
            return
        message = self._emitter.emit(worker, pending_step, response, self._life.now_s)
        if message is not None:
            self._life.counters.steps += 1
            self._send(worker.id, message)
        if not pending_step.decision.admissions:
            return
        requests = [admission.request for admission in pending_step.decision.admissions]
        self._groups.release_parents(requests)
        for request, index in zip(requests, pending_step.admits, strict=True):
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
            if admission.request.phase is Phase.ALLOCATING:
                self._life.requeue(admission.request)
