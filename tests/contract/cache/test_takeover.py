"""Which link the cache serves when several links begin while an earlier link is delayed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from cache_svc.core.cache import CacheCore
from cache_svc.server import CacheServicer
from paceline.v1 import cache_pb2 as pb


class SlowCall:
    """A call with a transport that takes nothing before `goes_on`."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.goes_on = asyncio.Event()
        self.status: grpc.StatusCode | None = None

    def peer(self) -> str:
        return f"scheduler {self.epoch}"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("paceline-fence", str(self.epoch)),)

    async def send_initial_metadata(self, metadata: object) -> None:
        await self.goes_on.wait()

    async def abort(self, status: grpc.StatusCode, details: str) -> None:
        self.status = status
        raise grpc.aio.AbortError


async def silent() -> AsyncIterator[pb.CacheServiceLinkRequest]:
    await asyncio.Event().wait()
    yield pb.CacheServiceLinkRequest()


async def test_a_link_that_opens_after_a_newer_schedulers_link_is_refused() -> None:
    cache = CacheServicer(CacheCore(), heartbeat_timeout_s=60.0)
    old, new = SlowCall(1), SlowCall(2)
    links = [asyncio.create_task(cache.Link(silent(), call)) for call in (old, new)]  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    new.goes_on.set()
    await asyncio.sleep(0.01)
    old.goes_on.set()
    with pytest.raises(grpc.aio.AbortError):
        await asyncio.wait_for(links[0], 10)
    assert old.status is grpc.StatusCode.PERMISSION_DENIED
    assert not links[1].done()
    links[1].cancel()
    await asyncio.gather(*links, return_exceptions=True)
