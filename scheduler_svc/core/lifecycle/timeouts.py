"""Requests that are late: past their deadline, above a configured time, or without a worker that could hold them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

from sortedcontainers import SortedDict

from scheduler_svc.core.admission.queue import ClassQueues
from scheduler_svc.core.rejection import CODE_DEADLINE_EXCEEDED, CODE_UNAVAILABLE, Rejection
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.types import SchedulerConfig
from scheduler_svc.core.workers.state import WorkerState

# A client that was refused for want of a worker should retry after this time: a worker takes seconds to load.
NO_WORKER_RETRY_S = 5.0


class Timeouts:
    """Finds the requests that are late, once per tick."""

    def __init__(self, config: SchedulerConfig, queue: ClassQueues, workers: Mapping[int, WorkerState]) -> None:
        self._config = config
        self._queue = queue
        self._workers = workers
        self._deadlines: SortedDict[tuple[float, int], Request] = SortedDict()
        self._no_worker_since_s: float | None = None  # the first tick without a worker that takes requests
        self._most_pool_tokens, self._served_loras = 0, False  # of the workers that were ever attached
        self._unservable_since_s: dict[int, float] = {}  # by arrival index: waiting requests that no worker can hold

    def add(self, request: Request) -> None:
        """Watch the request's deadline, if it has one."""
        if request.metadata.deadline_s < math.inf:
            self._deadlines[request.metadata.deadline_s, request.arrival_index] = request

    def remove(self, request: Request) -> None:
        """The request has ended."""
        if request.metadata.deadline_s < math.inf:
            self._deadlines.pop((request.metadata.deadline_s, request.arrival_index), None)

    def worker_attached(self) -> None:
        self._no_worker_since_s = None

    def no_worker(self, now_s: float) -> None:
        """No worker takes requests now."""
        if self._no_worker_since_s is None:
            self._no_worker_since_s = now_s

    def late(self, now_s: float) -> Iterator[tuple[Request, Rejection]]:
        """The requests that are late now, each with the error that it ends with."""
        for request, message in self._too_late(now_s):
            yield request, Rejection(CODE_DEADLINE_EXCEEDED, message)
        if self._config.no_worker_timeout_s > 0:
            for request, message in self._without_worker(now_s, self._config.no_worker_timeout_s):
                yield request, Rejection(CODE_UNAVAILABLE, message, retry_after_s=NO_WORKER_RETRY_S)

    def _without_worker(self, now_s: float, limit_s: float) -> Iterator[tuple[Request, str]]:
        """Waiting requests that no attached worker can hold. Workers that drain do not count. To save time, it looks at
        the queue only if the largest pool is smaller than before, or if no worker serves adapters any more."""
        if (since_s := self._no_worker_since_s) is not None:
            message = f"no worker takes requests: waited {limit_s:g} s for one"
            waiting = self._queue if limit_s <= now_s - since_s else ()
            yield from ((request, message) for request in waiting if now_s - request.arrival_s >= limit_s)
            return
        workers = [worker for worker in self._workers.values() if not worker.draining]
        most = max((worker.pool_tokens for worker in workers), default=0)
        serves_loras = any(worker.registration.max_loras for worker in workers)
        self._most_pool_tokens = max(self._most_pool_tokens, most)
        self._served_loras |= serves_loras
        before, self._unservable_since_s = self._unservable_since_s, {}
        if most == self._most_pool_tokens and serves_loras == self._served_loras:
            return
        for request in self._queue:
            if not any(worker.can_ever_hold(request) for worker in workers):
                since_s = before.get(request.arrival_index, now_s)
                self._unservable_since_s[request.arrival_index] = since_s
                if now_s - since_s >= limit_s:
                    held = f"no attached worker can run this request of {request.max_total_tokens} tokens"
                    yield request, f"{held}, and no suitable worker came within {limit_s:g} s"

    def _too_late(self, now_s: float) -> Iterator[tuple[Request, str]]:
        due = itertools.takewhile(lambda item: item[0][0] <= now_s, self._deadlines.items())
        for (deadline_s, _), request in due:
            yield request, f"deadline_s: {deadline_s - request.arrival_s:g} s are over"
        for request in self._queue.online.hopeless(now_s):
            left_s = request.metadata.deadline_s - now_s
            late = f"deadline_s: {left_s:.1f} s are left, which is too little"
            yield request, late if left_s < math.inf else "queue: the order policy gave up the request"
        if (limit_s := self._config.waiting_timeout_s) > 0:
            # Offline requests wait for as long as online ones keep the workers busy: this limit does not end them.
            oldest = itertools.takewhile(lambda request: now_s - request.arrival_s > limit_s, self._queue.online)
            message = f"queue: waited for more than {limit_s:g} s"
            yield from ((request, message) for request in oldest if request.history.started_s is None)
        if (limit_s := self._config.running_timeout_s) > 0:
            running = [request for worker in self._workers.values() for request in worker.batch.running.values()]
            if self._workers:  # a request that waits because no worker is attached does not fail here
                running += self._queue
            message = f"request: ran for more than {limit_s:g} s"
            for request in running:
                started_s = None if request.metadata.offline else request.history.started_s
                if started_s is not None and now_s - started_s > limit_s:
                    yield request, message
