"""WatchBlocks over a real loopback connection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import grpc
import pytest

from cache_svc import block_stream
from cache_svc.core import live_view
from cache_svc.core.live_view import snapshot
from paceline.v1 import cache_pb2 as pb
from paceline.v1 import cache_pb2_grpc
from tests.contract.cache.test_events import run_ops
from tests.contract.cache.test_server import TIMEOUT_S, A, Running, ask, ended, running
from tests.unit.cache import driver as d


@pytest.fixture
async def cache() -> AsyncIterator[Running]:
    async with running() as server:
        yield server


def watch(cache: Running, interval_ms: int = 100) -> grpc.aio.UnaryStreamCall:
    request = pb.WatchBlocksRequest(interval_ms=interval_ms)
    return cache_pb2_grpc.CacheServiceStub(cache.channel).WatchBlocks(request, timeout=TIMEOUT_S)


async def shown(call: grpc.aio.UnaryStreamCall) -> pb.WatchBlocksResponse:
    answer = await asyncio.wait_for(call.read(), TIMEOUT_S)
    assert isinstance(answer, pb.WatchBlocksResponse)
    return answer


async def test_a_watcher_sees_blocks_and_prefixes_change(cache: Running) -> None:
    call = watch(cache)
    first = await shown(call)
    assert (first.linked, len(first.workers)) == (False, 0)
    assert 0 < time.time() - first.started_us / 1e6 < TIMEOUT_S
    link = cache.link()
    await ask(link, 1, d.add_worker_op(3, 8, 4), *run_ops(1, A, 3))
    await ask(link, 2, d.match_op(2, A), d.admit_op(2, 3), d.match_op(3, A[:9]), d.admit_op(3, 3))
    while not (answer := await shown(call)).workers or answer.workers[0].cells != "ssucuu..":
        pass
    assert (answer.linked, answer.started_us, answer.workers[0].worker) == (True, first.started_us, 3)
    assert [(node.num_tokens, node.num_hits, node.num_users) for node in answer.nodes] == [
        (8, 2, 2),
        (4, 1, 1),
        (4, 0, 0),
    ]
    assert (answer.prefix_query_tokens, answer.prefix_hit_tokens) == (16 + 16 + 9, 12 + 8)
    link.cancel()
    while (await shown(call)).linked:
        pass
    call.cancel()


async def test_watchers_share_a_snapshot_and_without_watchers_none_is_made(
    cache: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0

    def counted(*args: object) -> object:
        nonlocal made
        made += 1
        return snapshot(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(block_stream, "snapshot", counted)
    calls = [watch(cache, 10_000) for _ in range(4)]
    for call in calls:
        await shown(call)
    assert made == 1
    for call in calls:
        call.cancel()
    await asyncio.sleep(0.3)
    assert made == 1


async def test_exchanges_go_on_between_the_slices_of_a_snapshot(
    cache: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_view, "SLICE_NODES", 1)
    link = cache.link()
    await ask(link, 1, d.add_worker_op(0, 4096, 4))
    for number in range(2, 12):
        ops = [op for n in range(40) for op in run_ops(number * 100 + n, [number, n, 7, 7], 0)]
        await ask(link, number, *ops)
    call, number = watch(cache), 12
    reading = asyncio.create_task(shown(call))
    while not reading.done():
        await ask(link, number, *run_ops(number, [number] * 8))
        number += 1
    assert number > 13
    assert (await reading).num_nodes >= 400
    call.cancel()
    link.cancel()


async def test_wrong_intervals_and_too_many_watchers_are_refused(
    cache: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, message = await ended(watch(cache, 99))
    assert (code, message) == (grpc.StatusCode.INVALID_ARGUMENT, "interval_ms: must be between 100 and 10000, or 0")
    monkeypatch.setattr(block_stream, "MAX_WATCHERS", 1)
    call = watch(cache)
    await shown(call)
    code, message = await ended(watch(cache))
    assert (code, message) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "there are 1 watchers, which is the limit")
    call.cancel()


async def test_a_watcher_does_not_hold_up_a_stop() -> None:
    async with running() as cache:
        call = watch(cache, 10_000)
        await shown(call)
        cache.stop.set()
        assert (await ended(call))[0] == grpc.StatusCode.UNAVAILABLE
