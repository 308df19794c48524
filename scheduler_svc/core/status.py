"""What gateways are told of the scheduler: whether it is ready, whether its queue is full, which model is served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.v1.inference_pb2 import SchedulerStatus
from scheduler_svc.core.admission.queue import WaitingQueue
from scheduler_svc.core.admission.validation import Limits, queue_credit
from scheduler_svc.core.cache.link import CacheLink
from scheduler_svc.core.output.sessions import Session
from scheduler_svc.core.types import SchedulerConfig
from scheduler_svc.core.workers.state import WorkerState


@dataclass(slots=True, eq=False)
class StatusReport:
    _config: SchedulerConfig
    _workers: Mapping[int, WorkerState]
    _sessions: Mapping[str, Session]
    _queue: WaitingQueue
    _cache: CacheLink
    _told: SchedulerStatus | None = field(default=None, init=False)
    told_full: bool = field(default=False, init=False)

    @property
    def has_worker(self) -> bool:
        """Whether a worker is attached that takes requests."""
        return not all(worker.draining for worker in self._workers.values())

    def announce(self, limits: Limits | None) -> None:
        """Tell the sessions if the status has changed."""
        status = self.now(limits)
        self.told_full = status.full
        if status != self._told:
            self._told = status
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
        )
        if limits:
            status.model.CopyFrom(limits.model)
            status.model.max_model_len = limits.max_total_tokens
        return status
