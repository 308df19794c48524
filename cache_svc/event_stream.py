"""CacheService.WatchEvents: sends the core's events to watchers."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from cache_svc.core.cache import CacheCore
from cache_svc.core.tree.events import Watcher
from paceline.v1 import cache_pb2 as pb
from services.runtime.logs import get_logger

MAX_WATCHERS = 64
# After each PAUSE_EVERY messages, other tasks of the event loop get time: a snapshot may have many messages.
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
            # The task may be blocked on a client that does not read.
            self.cut(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"read too slowly: event {watcher.number} is not kept any more; watch again for a snapshot",
            )

    def cut(self, code: grpc.StatusCode, message: str) -> None:
        if self.end is None:
            self.end = code, message
            self._task.cancel()


class EventStreams:
    """The watchers of one core. Each has its own task, so a slow client delays no other watcher."""

    def __init__(self, core: CacheCore) -> None:
        self._core = core
        self._streams: set[_Stream] = set()
        self._closing = False

    def close(self) -> None:
        """Ends all streams: the server is stopping and would otherwise wait for them."""
        self._closing = True
        for stream in self._streams:
            stream.cut(grpc.StatusCode.UNAVAILABLE, "the cache is stopping")

    async def serve(self, request: pb.WatchEventsRequest, context: Context) -> None:
        """Runs until the watcher leaves, is cut, or the server stops."""
        if self._closing:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the cache is stopping")
        if len(self._streams) >= MAX_WATCHERS:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"there are {MAX_WATCHERS} watchers, which is the limit"
            )
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
        await context.send_initial_metadata(())  # no event is missed from now on
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
