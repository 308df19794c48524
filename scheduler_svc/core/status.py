"""The status that the scheduler sends to gateways: whether it is ready, whether its queue is full, and its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.v1.inference_pb2 import SchedulerLoad, SchedulerStatus, StepTokens
from scheduler_svc.core.admission.budgets import Budgets
from scheduler_svc.core.admission.queue import WaitingQueue
from scheduler_svc.core.admission.validation import Limits, limit_reached, queue_credit
from scheduler_svc.core.cache.link import CacheLink
from scheduler_svc.core.output.sessions import Session
from scheduler_svc.core.types import STEP_TOKENS, SchedulerConfig, SchedulerCounters
from scheduler_svc.core.workers.state import WorkerState


@dataclass(slots=True, eq=False)
class StatusReport:
    """The status of the scheduler, which the sessions get when it has changed."""

    _config: SchedulerConfig
    _workers: Mapping[int, WorkerState]
    _sessions: Mapping[str, Session]
    _queue: WaitingQueue  # of online requests: when it is full, gateways refuse new ones
    _cache: CacheLink
    _announced: SchedulerStatus | None = field(default=None, init=False)
    announced_full: bool = field(default=False, init=False)

    @property
    def has_worker(self) -> bool:
        """Whether a worker is attached that takes requests."""
        return not all(worker.draining for worker in self._workers.values())

    def announce(self, limits: Limits | None) -> None:
        """Tell the sessions if the status has changed."""
        status = self.now(limits)
        self.announced_full = status.full
        if status != self._announced:
            self._announced = status
            for session in self._sessions.values():
                session.status = status

    def now(self, limits: Limits | None) -> SchedulerStatus:
        """`limits`: of the last workers seen."""
        active = [worker for worker in self._workers.values() if not worker.draining]
        full = not queue_credit(self._queue, self._config)
        status = SchedulerStatus(
            num_workers=len(active),
            ready=bool(active) and self._cache.connected and not full,
            full=full,
            no_worker_timeout_s=self._config.no_worker_timeout_s,
            queue_limit=limit_reached(self._queue, self._config),
        )
        if limits:
            status.model.CopyFrom(limits.model)
            status.model.max_model_len = limits.max_total_tokens
        return status

    def load(self, budgets: Budgets, counters: SchedulerCounters, now_s: float) -> SchedulerLoad:
        """The load of all workers. Running and waiting requests are online ones; blocks and counters include offline
        requests. `waiting_s` is the time until the present queue is empty, by the rate at which tokens have left the
        queue; before a rate was measured, the time that the oldest request has waited."""
        workers = self._workers.values()
        num_blocks = sum(worker.num_blocks for worker in workers)
        return SchedulerLoad(
            num_running=sum(len(worker.batch.running) - len(worker.batch.offline) for worker in workers),
            num_waiting=len(self._queue),
            num_waiting_tokens=self._queue.num_tokens,
            waiting_s=self._waiting_s(budgets, now_s),
            num_blocks=num_blocks,
            num_used_blocks=num_blocks - sum(worker.available_blocks for worker in workers),
            block_size=next((worker.block_size for worker in workers), 0),
            num_slots=sum(worker.registration.max_num_seqs for worker in workers),
            num_preemptions=counters.preempted,
            prefix_query_tokens=counters.prefix_query_tokens,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            step_tokens=StepTokens(
                bounds=STEP_TOKENS, counts=counters.step_tokens.counts, total=counters.step_tokens.total
            ),
            num_drafts=counters.num_drafts,
            num_draft_tokens=counters.num_draft_tokens,
            num_accepted_tokens=counters.num_accepted_tokens,
        )

    def _waiting_s(self, budgets: Budgets, now_s: float) -> float:
        if not self._queue:
            return 0.0
        if (tokens_per_s := budgets.tokens_per_s) is not None:
            return self._queue.num_tokens / tokens_per_s
        return max(now_s - self._queue.oldest_arrival_s, 0.0)
