"""Reads the cache's WatchBlocks while the live view has a viewer."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio

from paceline.v1 import cache_pb2, cache_pb2_grpc
from services.runtime.logs import get_logger
from services.runtime.rpc import open_channel
from services.runtime.tls.files import TlsFiles

_log = get_logger(__name__)

_INTERVAL_MS = 1000
_RETRY_S = 0.5
# A cache without WatchBlocks is asked again after this time: another version may have replaced it.
_RETRY_OLDER_S = 30.0


class CacheWatch:
    """The newest snapshot of one cache. `target`: its host:port; empty: none is read. `tls`: for the connection.

    A gateway asks for an admin key before it shows a snapshot, so the cache asks for none.
    """

    def __init__(self, target: str, tls: TlsFiles | None = None) -> None:
        self.target = target
        self._tls = tls
        self.latest: cache_pb2.WatchBlocksResponse | None = None  # None without a connection
        self._is_older = False  # the cache has answered that it has no WatchBlocks
        self._ask_again_s = 0.0  # of the event loop's clock: not before this time
        self._first = asyncio.Event()

    @property
    def can_watch(self) -> bool:
        """Whether `latest` None means that there is no connection to the cache."""
        return bool(self.target) and not self._is_older

    async def run(self) -> None:
        """Read snapshots until cancelled. Returns at once without a target."""
        self._first.clear()
        loop = asyncio.get_running_loop()
        try:
            while self.target:
                if self._is_older:
                    self._first.set()  # no snapshot will come soon
                await asyncio.sleep(self._ask_again_s - loop.time())
                try:
                    await self._read()
                except grpc.aio.AioRpcError as error:
                    self._note(error)
                finally:
                    self.latest = None
                self._ask_again_s = loop.time() + (_RETRY_OLDER_S if self._is_older else _RETRY_S)
        finally:
            self._first.clear()

    async def wait_first(self, timeout_s: float) -> None:
        """Wait until there is a snapshot or it is known that none will come, for at most `timeout_s`."""
        if not self.target:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._first.wait()
        except TimeoutError:
            _log.debug("the cache has sent no snapshot yet", target=self.target)

    def _note(self, error: grpc.aio.AioRpcError) -> None:
        is_older = error.code() is grpc.StatusCode.UNIMPLEMENTED
        if is_older and not self._is_older:
            _log.warning("the cache is an older one without WatchBlocks: there are no block maps", target=self.target)
        elif not is_older:
            _log.debug("no snapshots of the cache", code=str(error.code()), error=error.details())
        self._is_older = is_older

    async def _read(self) -> None:
        async with open_channel(self.target, tls=self._tls) as channel:  # its own, with the newest certificates
            request = cache_pb2.WatchBlocksRequest(interval_ms=_INTERVAL_MS)
            async for snapshot in cache_pb2_grpc.CacheServiceStub(channel).WatchBlocks(request):
                self.latest, self._is_older = snapshot, False
                self._first.set()


def cache_view(
    snapshot: cache_pb2.WatchBlocksResponse, worker_names: dict[int, str], tenants: dict[str, str]
) -> dict[str, Any]:
    """The JSON of CacheView. `tenants`: by namespace. Plain values: pydantic models would take 5 ms of the gateway's
    event loop for each snapshot, most of what a viewer costs."""
    return {
        "num_workers": len(snapshot.workers),
        "prefix_hit_tokens": snapshot.prefix_hit_tokens,
        "prefix_query_tokens": snapshot.prefix_query_tokens,
        "maps": [
            {
                "worker": one.worker,
                "name": worker_names.get(one.worker, ""),
                "num_blocks": one.num_blocks,
                "blocks_per_cell": one.blocks_per_cell,
                "cells": one.cells,
                "num_host_blocks": one.num_host_blocks,
                "host_blocks_per_cell": one.host_blocks_per_cell,
                "host_cells": one.host_cells,
            }
            for one in snapshot.workers
        ],
        "tree": {
            "nodes": [
                {
                    "id": node.id,
                    "parent": node.parent or None,
                    "tenant": tenants.get(node.namespace, ""),
                    "num_tokens": node.num_tokens,
                    "num_blocks": node.num_blocks,
                    "workers": node.workers[:],
                    "num_users": node.num_users,
                    "num_hits": node.num_hits,
                    "saved_tokens": node.saved_tokens,
                    "age_s": node.age_s,
                    "pinned": node.pinned,
                }
                for node in snapshot.nodes
            ],
            "num_nodes": snapshot.num_nodes,
            "num_tokens": snapshot.num_tokens,
        },
    }
