"""Reads the cache's WatchBlocks while the live view has a viewer."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio

from paceline.v1 import cache_pb2, cache_pb2_grpc
from services.gateway.live_view.cache_schema import BlockMap, CacheView, PrefixTreeView, TreeNode
from services.runtime.logs import get_logger
from services.runtime.rpc import open_channel
from services.runtime.tls.files import TlsFiles

_log = get_logger(__name__)

_INTERVAL_MS = 1000
_RETRY_S = 0.5


class CacheWatch:
    """The newest snapshot of one cache. `target`: its host:port; empty: none is read. `tls`: shown to the cache.

    A gateway asks for an admin key before it shows a snapshot, so the cache asks for none.
    """

    def __init__(self, target: str, tls: TlsFiles | None = None) -> None:
        self.target = target
        self._tls = tls
        self.latest: cache_pb2.WatchBlocksResponse | None = None  # None without a connection
        self._first = asyncio.Event()

    async def run(self) -> None:
        """Until it is cancelled."""
        self._first.clear()
        try:
            while self.target:
                try:
                    await self._read()
                except grpc.aio.AioRpcError as error:
                    _log.debug("no snapshots of the cache", code=str(error.code()), error=error.details())
                finally:
                    self.latest = None
                await asyncio.sleep(_RETRY_S)
        finally:
            self._first.clear()

    async def wait_first(self, timeout_s: float) -> None:
        """Until there is a snapshot, or no longer than this."""
        if not self.target:
            return
        try:
            await asyncio.wait_for(self._first.wait(), timeout_s)
        except TimeoutError:
            _log.debug("the cache has sent no snapshot yet", target=self.target)

    async def _read(self) -> None:
        async with open_channel(self.target, tls=self._tls) as channel:  # its own, with the newest certificates
            request = cache_pb2.WatchBlocksRequest(interval_ms=_INTERVAL_MS)
            async for snapshot in cache_pb2_grpc.CacheServiceStub(channel).WatchBlocks(request):
                self.latest = snapshot
                self._first.set()


def cache_view(
    snapshot: cache_pb2.WatchBlocksResponse, worker_names: dict[int, str], tenants: dict[str, str]
) -> CacheView:
    """`tenants`: by namespace."""
    return CacheView(
        num_workers=len(snapshot.workers),
        prefix_hit_tokens=snapshot.prefix_hit_tokens,
        prefix_query_tokens=snapshot.prefix_query_tokens,
        maps=[
            BlockMap(
                worker=one.worker,
                name=worker_names.get(one.worker, ""),
                num_blocks=one.num_blocks,
                blocks_per_cell=one.blocks_per_cell,
                cells=one.cells,
                num_host_blocks=one.num_host_blocks,
                host_blocks_per_cell=one.host_blocks_per_cell,
                host_cells=one.host_cells,
            )
            for one in snapshot.workers
        ],
        tree=PrefixTreeView(
            nodes=[
                TreeNode(
                    id=node.id,
                    parent=node.parent or None,
                    tenant=tenants.get(node.namespace, ""),
                    num_tokens=node.num_tokens,
                    num_blocks=node.num_blocks,
                    workers=node.workers[:],
                    num_users=node.num_users,
                    num_hits=node.num_hits,
                    saved_tokens=node.saved_tokens,
                    age_s=node.age_s,
                    pinned=node.pinned,
                )
                for node in snapshot.nodes
            ],
            num_nodes=snapshot.num_nodes,
            num_tokens=snapshot.num_tokens,
        ),
    )
