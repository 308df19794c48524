"""WatchEvents over a real loopback connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from cache_svc import event_stream
from paceline.v1 import cache_pb2 as pb
from paceline.v1 import cache_pb2_grpc
from tests.contract.cache.test_server import TIMEOUT_S, A, Running, ask, drained, ended, running
from tests.unit.cache import driver as d
from tests.unit.cache.follower import Follower, State


@pytest.fixture
async def cache() -> AsyncIterator[Running]:
    async with running(event_tokens=True) as server:  # the tests' follower checks ids against tokens
        yield server


def watch(cache: Running, after: int = 0) -> grpc.aio.UnaryStreamCall:
    request = pb.WatchEventsRequest(after=after)
    return cache_pb2_grpc.CacheServiceStub(cache.channel).WatchEvents(request, timeout=TIMEOUT_S)


async def follow(call: grpc.aio.UnaryStreamCall, follower: Follower, until: State) -> None:
    while follower.non_empty() != until:
        follower.apply(await event_of(call))


async def event_of(call: grpc.aio.UnaryStreamCall) -> pb.WatchEventsResponse:
    event = await asyncio.wait_for(call.read(), TIMEOUT_S)
    assert isinstance(event, pb.WatchEventsResponse)
    return event


def run_ops(sequence: int, tokens: list[int], worker: int = 0) -> list[pb.CacheOp]:
    return [
        d.match_op(sequence, tokens),
        d.admit_op(sequence, worker),
        d.commit_op([(sequence, [], len(tokens))]),
        d.free_op([sequence]),
    ]


async def kinds(call: grpc.aio.UnaryStreamCall, count: int) -> list[tuple[int, str]]:
    events = [await event_of(call) for _ in range(count)]
    return [(event.sequence_number, event.WhichOneof("event") or "") for event in events]


async def test_a_watcher_gets_a_snapshot_and_then_the_changes(cache: Running) -> None:
    link = cache.link()
    await ask(link, 1, d.add_worker_op(0, 8, 4), *run_ops(1, A))
    call = watch(cache)
    (number, first), *others = await kinds(call, 3)
    assert number > 1_600_000_000_000_000  # counts from the start time in microseconds, so no earlier server used it
    assert [first, *others] == ["snapshot", (number, "stored"), (number, "snapshot")]
    await ask(link, 2, *run_ops(2, [7] * 32))
    assert await kinds(call, 2) == [(number + 1, "removed"), (number + 2, "stored")]
    call.cancel()
    link.cancel()


async def test_a_watcher_reads_no_tokens_unless_the_operator_says_so() -> None:
    """Neither the snapshot nor later events have tokens. They have all other fields."""
    async with running() as cache:
        link = cache.link()
        await ask(link, 1, d.add_worker_op(0, 8, 4), *run_ops(1, A))
        call = watch(cache)
        events = [await event_of(call) for _ in range(3)]
        await ask(link, 2, *run_ops(2, [7] * 9))
        events += [await event_of(call)]
        stored = [event.stored for event in events if event.HasField("stored")]
        assert [(len(one.prefix_ids), one.block_size, one.token_ids) for one in stored] == [(4, 4, b""), (2, 4, b"")]
        call.cancel()


async def test_a_watcher_that_comes_back_gets_the_missed_events(cache: Running) -> None:
    link = cache.link()
    await ask(link, 1, d.add_worker_op(0, 8, 4))
    call = watch(cache)
    ((number, _), _) = await kinds(call, 2)
    call.cancel()
    await asyncio.sleep(0.05)
    await ask(link, 2, *run_ops(1, A), d.remove_worker_op(0))
    call = watch(cache, number)
    assert await kinds(call, 2) == [(number + 1, "stored"), (number + 2, "cleared")]
    call.cancel()


async def test_a_link_that_ends_clears_its_workers(cache: Running) -> None:
    link = cache.link()
    call = watch(cache)
    await kinds(call, 2)
    await ask(link, 1, d.add_worker_op(3, 8, 4), *run_ops(1, A, 3))
    follower = Follower()
    link.cancel()
    event = await event_of(call)
    follower.last = event.sequence_number - 1
    follower.apply(event)
    event = await event_of(call)
    assert event.cleared.worker == 3
    follower.apply(event)
    assert follower.non_empty() == {}
    call.cancel()


async def test_a_watcher_that_does_not_read_is_cut_and_delays_no_other() -> None:
    async with running(event_buffer=20) as cache:
        link = cache.link()
        await ask(link, 1, d.add_worker_op(0, 80_000, 4))  # nothing is evicted
        idle, busy = watch(cache), watch(cache)
        await idle.initial_metadata()
        await kinds(busy, 2)
        read = 0
        for exchange in range(2, 50):
            tokens = [exchange * 10_000 + i for i in range(6000)]
            await ask(link, exchange, *run_ops(exchange, tokens))
            if idle.done():
                break
            while read < 3 * (exchange - 1):
                read += len(await kinds(busy, 1))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await drained(idle)
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "is not kept any more; watch again for a snapshot" in (error.value.details() or "")
        await ask(link, exchange + 1)
        assert not busy.done()
        busy.cancel()


async def test_the_number_of_watchers_is_limited(cache: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "MAX_WATCHERS", 2)
    calls = [watch(cache), watch(cache)]
    for call in calls:
        await kinds(call, 2)
    assert await ended(watch(cache)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "there are 2 watchers, which is the limit")
    calls[0].cancel()

    async def admitted() -> bool:
        try:
            await kinds(watch(cache), 2)
        except grpc.aio.AioRpcError:  # the cache has not noticed yet that a watcher left
            return False
        return True

    async with asyncio.timeout(TIMEOUT_S):
        while not await admitted():  # noqa: ASYNC110 - the cache's state, which sends no signal
            await asyncio.sleep(0.02)


async def test_the_server_does_not_wait_for_its_watchers() -> None:
    async with running(drain_s=60.0) as cache:
        call = watch(cache)
        await kinds(call, 2)
        cache.stop.set()
        assert await ended(call) == (grpc.StatusCode.UNAVAILABLE, "the cache is stopping")
        await asyncio.wait_for(cache.task, 20)


async def test_an_early_and_a_late_watcher_reach_the_same_state(cache: Running) -> None:
    link = cache.link()
    await ask(link, 1, d.add_worker_op(0, 6, 4), d.add_worker_op(1, 6, 4))
    call, follower = watch(cache), Follower()
    for exchange in range(2, 12):
        tokens = [exchange % 3] * 9 + [exchange] * 8
        await ask(link, exchange, *run_ops(exchange, tokens, exchange % 2))
    late, other = watch(cache), Follower()
    snapshot: Any = await asyncio.wait_for(late.read(), TIMEOUT_S)
    other.apply(snapshot)
    while not snapshot.snapshot.complete:
        snapshot = await asyncio.wait_for(late.read(), TIMEOUT_S)
        other.apply(snapshot)
    await follow(call, follower, other.non_empty())
    assert len(other.non_empty()) == 2
    call.cancel()
    late.cancel()
