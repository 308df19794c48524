"""One stream of snapshots for all viewers: the scheduler's LiveViewService, the cache's WatchBlocks, and the gateway's
figures beside them.

It runs while there is a viewer, and costs nothing otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

import grpc
import grpc.aio
import orjson

from paceline.v1 import live_pb2, live_pb2_grpc
from services.gateway.errors import ApiError
from services.gateway.live_view.cache_watch import CacheWatch, cache_view
from services.gateway.live_view.figures import RecentFigures
from services.gateway.live_view.plain import as_dict
from services.gateway.live_view.schema import LiveSnapshot, SchedulerView
from services.gateway.live_view.services import ServiceStates
from services.gateway.openai.gateway import Gateway
from services.runtime.logs import get_logger

_log = get_logger(__name__)

# With 32 streams running, a snapshot a second costs the services less than 1 % of their CPU time (bench/page_cost.py).
INTERVAL_S = 1.0
MAX_VIEWERS = 64
_RETRY_S = 5
# The first snapshot waits for the cache, at most this long.
_FIRST_CACHE_S = 0.5
# The feed keeps the tenants of at most this many namespaces.
_MAX_TENANTS = 4096
_STOPS = "the server is shutting down"
_FAILED = "the live view has failed; the gateway's log says why"


class LiveFeed:
    """The viewers of one gateway. A viewer that reads too slowly misses snapshots, and delays no other."""

    def __init__(self, gateway: Gateway, cache: CacheWatch) -> None:
        self._gateway = gateway
        self._cache = cache
        self._services = ServiceStates(gateway)
        self._tenants: dict[str, str] = {}  # by namespace, as the scheduler has told
        self._viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def num_viewers(self) -> int:
        """Open streams."""
        return len(self._viewers)

    @property
    def why_ended(self) -> str:
        """Why a stream has ended, for clients."""
        return _STOPS if self._closing else _FAILED

    def join(self) -> Viewer:
        """Takes a slot at once, so that requests of the same instant cannot exceed the limit. Raises ApiError 429 and
        503."""
        if self._closing:
            raise ApiError(503, _STOPS, retry_after_s=1.0)
        if len(self._viewers) >= MAX_VIEWERS:
            message = f"{MAX_VIEWERS} viewers watch this gateway already"
            raise ApiError(429, message, code="too_many_viewers", retry_after_s=_RETRY_S)
        viewer = Viewer(self)
        self._viewers.add(viewer)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """The viewer has left. When the last viewer has left, the stream ends."""
        self._viewers.discard(viewer)
        if not self._viewers and self._task is not None:
            self._task.cancel()
            self._task = None

    def close(self) -> None:
        """End all streams. A drain would otherwise wait for them."""
        self._closing = True
        self._send(None)

    def _send(self, snapshot: bytes | None) -> None:
        for viewer in self._viewers:
            viewer.put(snapshot)

    async def _run(self) -> None:
        watching = asyncio.create_task(self._cache.run())
        try:
            await self._cache.wait_first(_FIRST_CACHE_S)
            await self._publish()
        except Exception:
            _log.exception("the live view has failed")
            self._send(None)
            raise
        finally:
            watching.cancel()

    async def _publish(self) -> None:
        figures = RecentFigures(self._gateway)
        while not self._closing:
            try:
                stub = live_pb2_grpc.LiveViewServiceStub(self._gateway.session.channel)
                call = stub.Watch(live_pb2.WatchRequest(interval_ms=int(INTERVAL_S * 1000)))
                async for snapshot in call:
                    self._send(self._json(figures, snapshot))
            except (ApiError, grpc.aio.AioRpcError) as error:
                _log.debug("no snapshots of the scheduler", error=str(error))
            except asyncio.CancelledError:
                # The session has closed its channel, which cancels the call and not this task.
                if (task := asyncio.current_task()) is None or task.cancelling():
                    raise
            # Without a scheduler, viewers still see the gateway, and see that the scheduler is gone.
            self._send(self._json(figures, None))
            await asyncio.sleep(INTERVAL_S)

    def _json(self, figures: RecentFigures, snapshot: live_pb2.WatchResponse | None) -> bytes:
        cache, now_s, unix_s = self._cache.latest, time.monotonic(), time.time()
        names: dict[int, str] = {}
        if snapshot is not None:
            names = {worker.worker: worker.name for worker in snapshot.workers}
            self._tenants |= {owner.namespace: owner.tenant for owner in snapshot.namespaces}
            for namespace in [*self._tenants][:-_MAX_TENANTS]:
                del self._tenants[namespace]
        answer = LiveSnapshot(
            at_s=unix_s,
            gateway=figures.take(now_s),
            scheduler=None,
            cache=None,
            services=self._services.take(
                snapshot, cache, watches_cache=self._cache.can_watch, now_s=now_s, unix_s=unix_s
            ),
        )
        shown = answer.model_dump()
        if snapshot is not None:
            shown["scheduler"] = as_dict(snapshot, SchedulerView)
        if cache is not None:
            shown["cache"] = cache_view(cache, names, self._tenants)
        return orjson.dumps(shown)


class Viewer:
    """One reader of the stream."""

    def __init__(self, feed: LiveFeed) -> None:
        self._feed = feed
        self._latest: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=1)

    def put(self, snapshot: bytes | None) -> None:
        """The newest snapshot replaces one that was not read. None: the stream ends."""
        with contextlib.suppress(asyncio.QueueEmpty):
            self._latest.get_nowait()
        self._latest.put_nowait(snapshot)

    async def items(self) -> AsyncGenerator[bytes]:
        """Snapshots as JSON, until the gateway stops or the live view fails."""
        while (snapshot := await self._latest.get()) is not None:
            yield snapshot

    async def snapshot(self) -> bytes:
        """One snapshot, as JSON. Raises ApiError 503 if the gateway stops or the live view fails."""
        if (snapshot := await self._latest.get()) is None:
            raise ApiError(503, self._feed.why_ended, retry_after_s=1.0)
        return snapshot

    def close(self) -> None:
        """Gives the slot back."""
        self._feed.leave(self)
