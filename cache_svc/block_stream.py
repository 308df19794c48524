"""CacheService.WatchBlocks: sends snapshots of the core's blocks and prefixes to watchers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from cache_svc.core.cache import CacheCore
from cache_svc.core.live_view import NodeIds, snapshot
from paceline.v1 import cache_pb2 as pb

MAX_WATCHERS = 64
INTERVALS_MS = 100, 10_000
DEFAULT_INTERVAL_MS = 1000
# Snapshots take at most this share of the time. A snapshot of 10,000 nodes takes 15 ms, so at most one runs per 3 s.
# Exception: the next snapshot does not wait if there is no latest one, for example for the first watcher.
MAX_SHARE = 0.005

Context = grpc.aio.ServicerContext[Any, Any]


class BlockStreams:
    """The watchers of one core's blocks. All watchers share the snapshots."""

    def __init__(self, core: CacheCore, exchanged_s: Callable[[], float]) -> None:
        """`exchanged_s`: returns the time of the core's last exchange, on the clock of time.perf_counter()."""
        self._core, self._exchanged_s = core, exchanged_s
        self._ids = NodeIds()
        self._started_us = time.time_ns() // 1000
        self._making = asyncio.Lock()
        self._latest: pb.WatchBlocksResponse | None = None
        self._latest_s = self._next_s = 0.0  # when the latest snapshot was made, and when the next one may be
        self._num_watchers = 0
        self._closed = asyncio.Event()

    def close(self) -> None:
        """Ends all streams: the server is stopping and would otherwise wait for them."""
        self._closed.set()

    async def serve(self, request: pb.WatchBlocksRequest, context: Context) -> AsyncIterator[pb.WatchBlocksResponse]:
        """Runs until the watcher leaves or the server stops."""
        least, most = INTERVALS_MS
        interval_ms = request.interval_ms or DEFAULT_INTERVAL_MS
        if not least <= interval_ms <= most:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"interval_ms: must be between {least} and {most}, or 0"
            )
        if self._num_watchers >= MAX_WATCHERS:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"there are {MAX_WATCHERS} watchers, which is the limit"
            )
        self._num_watchers += 1
        try:
            while not self._closed.is_set():
                if (answer := await self._snapshot(interval_ms / 2000)) is not None:
                    yield answer
                try:
                    async with asyncio.timeout(interval_ms / 1000):
                        await self._closed.wait()
                except TimeoutError:
                    continue
        finally:
            self._num_watchers -= 1
            if not self._num_watchers:
                self._latest = None
                self._ids.by_node.clear()  # nodes that the tree may have forgotten
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the cache is stopping")

    async def _snapshot(self, max_age_s: float) -> pb.WatchBlocksResponse | None:
        """Returns a snapshot of at most this age, or an older one if a new snapshot may not start yet. None if a worker
        came or went meanwhile."""
        async with self._making:
            now_s = time.perf_counter()
            if self._latest is None or (now_s - self._latest_s > max_age_s and now_s >= self._next_s):
                self._latest, self._latest_s = await self._make(now_s), now_s
            return self._latest

    async def _make(self, now_s: float) -> pb.WatchBlocksResponse | None:
        slices, spent_s = snapshot(self._core, self._ids, now_s - self._exchanged_s()), 0.0
        while True:
            began_s = time.perf_counter()
            try:
                next(slices)
            except StopIteration as made:
                answer: pb.WatchBlocksResponse | None = made.value
                break
            spent_s += time.perf_counter() - began_s
            await asyncio.sleep(0)  # exchanges go on between two slices
        spent_s += time.perf_counter() - began_s
        self._next_s = now_s + spent_s / MAX_SHARE
        if answer is not None:
            answer.started_us = self._started_us
        return answer
