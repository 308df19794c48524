"""Which services are up, and how often each has restarted, as far as a gateway can see."""

from __future__ import annotations

import time
from dataclasses import dataclass

from paceline.v1 import cache_pb2, live_pb2
from services.gateway.live_view.schema import ServiceShown
from services.gateway.openai.gateway import Gateway

# For this long after a new scheduler was first seen, workers of the previous scheduler may still be connecting to the
# new one.
SETTLING_S = 10.0
# A worker that is gone is shown for this long. At most MAX_GONE such workers are shown.
GONE_SHOWN_S = 600.0
MAX_GONE = 64


@dataclass(slots=True)
class _Process:
    """One process under its name. `incarnation`: differs after a restart."""

    incarnation: str
    num_restarts: int = 0
    seen_s: float = 0.0  # when it was up last
    epoch: int = 0  # of the scheduler to which it was linked last
    drained: bool = False  # it said that it would leave

    def is_up(self, incarnation: str, now_s: float) -> None:
        self.num_restarts += incarnation != self.incarnation
        self.incarnation, self.seen_s = incarnation, now_s


class ServiceStates:
    """Follows the services from snapshot to snapshot. Snapshots exist only while there is a viewer: several restarts of
    a service between two snapshots count as one. For the scheduler, the session counts every restart.

    A worker is recognised by its name. A worker that is started without a name has its process id in its name, so after
    a restart it counts as another worker.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._started_s = time.monotonic()
        self._cache: _Process | None = None
        self._workers: dict[str, _Process] = {}
        self._epoch, self._epoch_s = 0, 0.0  # of the last scheduler, and when it was first seen

    def take(
        self,
        scheduler: live_pb2.WatchResponse | None,
        cache: cache_pb2.WatchBlocksResponse | None,
        *,
        watches_cache: bool,
        now_s: float,
        unix_s: float,
    ) -> list[ServiceShown]:
        """The services now. `watches_cache`: whether the gateway watches the cache. If it does, `cache` None means that
        there is no connection to the cache."""
        shown = [self._gateway_shown(now_s), self._scheduler_shown(unix_s)]
        if watches_cache:
            shown.append(self._cache_shown(cache, unix_s))
        elif scheduler is not None:
            state = "ready" if scheduler.cache_connected else "down"
            shown.append(ServiceShown(kind="cache", name="cache", state=state, num_restarts=None, up_s=None))
        return shown + self._workers_shown(scheduler, now_s)

    def _gateway_shown(self, now_s: float) -> ServiceShown:
        gateway = self._gateway
        state = "draining" if gateway.draining else "ready"
        return ServiceShown(
            kind="gateway", name="gateway", state=state, num_restarts=None, up_s=max(now_s - self._started_s, 0.0)
        )

    def _scheduler_shown(self, unix_s: float) -> ServiceShown:
        session = self._gateway.session
        up_s = max(unix_s - session.epoch / 1000, 0.0) if session.connected and session.epoch is not None else None
        state = "ready" if session.connected else "down" if session.num_epochs else "starting"
        restarts = max(session.num_epochs - 1, 0)
        return ServiceShown(kind="scheduler", name="scheduler", state=state, num_restarts=restarts, up_s=up_s)

    def _cache_shown(self, cache: cache_pb2.WatchBlocksResponse | None, unix_s: float) -> ServiceShown:
        known, up_s = self._cache, None
        if cache is not None:
            started = str(cache.started_us)
            known = self._cache = known or _Process(started)
            known.is_up(started, unix_s)
            up_s = max(unix_s - cache.started_us / 1e6, 0.0)
        state = "ready" if cache is not None else "down" if known is not None else "starting"
        restarts = known.num_restarts if known is not None else 0
        return ServiceShown(kind="cache", name="cache", state=state, num_restarts=restarts, up_s=up_s)

    def _workers_shown(self, scheduler: live_pb2.WatchResponse | None, now_s: float) -> list[ServiceShown]:
        found: dict[str, list[live_pb2.LiveWorker]] = {}
        if scheduler is not None:
            if scheduler.epoch != self._epoch:
                self._epoch, self._epoch_s = scheduler.epoch, now_s
            for worker in scheduler.workers:
                found.setdefault(worker.name, []).append(worker)
        shown = [self._worker_shown(worker, now_s, alone=len(same) == 1) for same in found.values() for worker in same]
        settled = scheduler is not None and now_s - self._epoch_s >= SETTLING_S
        gone = sorted(
            (name for name in self._workers if name not in found), key=lambda name: self._workers[name].seen_s
        )
        for place, name in enumerate(reversed(gone), 1):
            process = self._workers[name]
            if process.drained or now_s - process.seen_s > GONE_SHOWN_S or place > MAX_GONE:
                del self._workers[name]
                continue
            left = scheduler is not None and process.epoch == scheduler.epoch
            state = "down" if left or settled else "starting"
            shown.append(
                ServiceShown(kind="worker", name=name, state=state, num_restarts=process.num_restarts, up_s=None)
            )
        return shown

    def _worker_shown(self, worker: live_pb2.LiveWorker, now_s: float, *, alone: bool) -> ServiceShown:
        restarts = None
        if alone:  # workers of one name cannot be told apart
            incarnation = worker.incarnation or str(worker.worker)
            process = self._workers.setdefault(worker.name, _Process(incarnation))
            process.is_up(incarnation, now_s)
            process.epoch, process.drained = self._epoch, worker.draining
            restarts = process.num_restarts
        state = "draining" if worker.draining else "ready"
        return ServiceShown(kind="worker", name=worker.name, state=state, num_restarts=restarts, up_s=worker.linked_s)
