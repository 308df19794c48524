"""CacheService.WatchEvents: carries the core's events to those who watch."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from cache_svc.core.cache import CacheCore
from cache_svc.core.tree.events import Watcher
from paceline.v1 import cache_pb2 as pb
from services.runtime.logs import get_logger

MAX_WATCHERS = 64
# A long snapshot is not to take the whole loop: so many messages, then others have time.
PAUSE_EVERY = 32
PAUSE_S = 0.001

log = get_logger("cache_svc.event_stream")

Context = grpc.aio.ServicerContext[pb.WatchEventsRequest, pb.WatchEventsResponse]


class _Stream:
    """One watcher's call, and the task that serves it."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        self.woken = asyncio.Event()
        self.end: tuple[grpc.StatusCode, str] | None = None

    def wake(self, watcher: Watcher) -> None:
        self.woken.set()
        if watcher.is_behind:
            # It may be waiting for a reader who never comes.
            self.cut(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"read too slowly: event {watcher.number} is not kept any more; watch again for a snapshot",
            )

    def cut(self, code: grpc.StatusCode, message: str) -> None:
        if self.end is None:
            self.end = code, message
            self._task.cancel()


class EventStreams:
    """Everybody who watches one core. Each is served by its own task, which waits for its reader alone."""

    def __init__(self, core: CacheCore) -> None:
        self._core = core
        self._streams: set[_Stream] = set()
        self._closing = False

    def close(self) -> None:
        """No more events: the server stops, and would wait for its watchers."""
        self._closing = True
        for stream in self._streams:
            stream.cut(grpc.StatusCode.UNAVAILABLE, "the cache is stopping")

    async def serve(self, request: pb.WatchEventsRequest, context: Context) -> None:
        """Until the watcher has gone, is cut, or the server stops."""
        if self._closing:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the cache is stopping")
        if len(self._streams) >= MAX_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_WATCHERS} watchers are here already")
        task = asyncio.current_task()
        assert task is not None  # a handler runs in a task
        stream = _Stream(task)
        watcher = self._core.events.watch(self._core.tree, request.after, stream.wake)
        self._streams.add(stream)
        log.info("events watched", peer=context.peer(), after=request.after, next=watcher.number)
        try:
            await self._send(watcher, stream, context)
        except asyncio.CancelledError:
            if stream.end is None:
                raise
            task.uncancel()
            log.info("watcher cut", peer=context.peer(), reason=stream.end[1])
            await context.abort(*stream.end)
        finally:
            watcher.leave()
            self._streams.discard(stream)

    @staticmethod
    async def _send(watcher: Watcher, stream: _Stream, context: Context) -> None:
        await context.send_initial_metadata(())  # from now on nothing is missed
        num_sent = 0
        while True:
            event = watcher.take()
            if event is None:
                stream.woken.clear()
                await stream.woken.wait()
                continue
            await context.write(event)
            num_sent += 1
            if num_sent % PAUSE_EVERY == 0:
                await asyncio.sleep(PAUSE_S)
