"""The cache service over a real loopback connection: links, health, metrics, drain."""

from __future__ import annotations

import asyncio
import itertools
import socket
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cache_svc.server import serve
from cache_svc.settings import CacheSettings
from paceline.v1 import cache_pb2 as pb
from paceline.v1 import cache_pb2_grpc
from services.runtime.rpc import open_channel
from services.runtime.service import Addresses
from services.runtime.settings import load_settings
from tests.support.untyped_grpc import EOF, untyped
from tests.unit.cache import driver as d

A = list(range(100, 116))
TIMEOUT_S = 120.0


@dataclass
class Running:
    addresses: Addresses
    channel: grpc.aio.Channel
    stop: asyncio.Event
    task: asyncio.Task[None]

    def link(self, fence: str = "") -> grpc.aio.StreamStreamCall:
        stub = untyped(cache_pb2_grpc.CacheServiceStub(self.channel))
        metadata = (("paceline-fence", fence),) if fence else None
        call: grpc.aio.StreamStreamCall = stub.Link(timeout=TIMEOUT_S, metadata=metadata)
        return call

    async def metrics(self) -> dict[str, float]:
        text = await asyncio.to_thread(self._get_metrics)
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    def _get_metrics(self) -> str:
        with urllib.request.urlopen(f"http://{self.addresses.metrics}/metrics", timeout=TIMEOUT_S) as reply:
            return reply.read().decode()

    async def health(self, service: str = "") -> int:
        stub = health_pb2_grpc.HealthStub(self.channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S)
        return reply.status


@asynccontextmanager
async def running(
    drain_s: float = 0.0, event_buffer: int = 10_000, event_tokens: bool = False
) -> AsyncIterator[Running]:
    ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    settings = CacheSettings(
        port=0, metrics_port=0, debug=True, drain_s=drain_s, event_buffer=event_buffer, event_tokens=event_tokens
    )
    task = asyncio.create_task(serve(settings, stop, on_ready=ready.set_result))
    await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED, timeout=TIMEOUT_S)
    if task.done():
        task.result()
    addresses = ready.result()
    assert addresses.grpc is not None
    try:
        async with open_channel(addresses.grpc) as channel:
            yield Running(addresses, channel, stop, task)
    finally:
        stop.set()
        await asyncio.wait_for(task, TIMEOUT_S)


@pytest.fixture
async def cache() -> AsyncIterator[Running]:
    async with running() as server:
        yield server


def request(exchange: int, *ops: pb.CacheOp, epoch: int = 3) -> pb.CacheServiceLinkRequest:
    return pb.CacheServiceLinkRequest(epoch=epoch, exchange=exchange, ops=ops)


async def ask(
    call: grpc.aio.StreamStreamCall, exchange: int, *ops: pb.CacheOp, epoch: int = 3
) -> pb.CacheServiceLinkResponse:
    await call.write(request(exchange, *ops, epoch=epoch))
    response = await call.read()
    assert isinstance(response, pb.CacheServiceLinkResponse)
    assert (response.epoch, response.exchange) == (epoch, exchange)
    return response


async def ended(call: grpc.aio.StreamStreamCall | grpc.aio.UnaryStreamCall) -> tuple[grpc.StatusCode, str]:
    """The status that the call ends with; it sends nothing before."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await asyncio.wait_for(call.read(), TIMEOUT_S)
    return error.value.code(), error.value.details() or ""


async def test_a_link_answers_each_exchange_in_order(cache: Running) -> None:
    call = cache.link()
    first = await ask(call, 1, d.add_worker_op(0, 8, 4), d.match_op(1, A), d.admit_op(1, 0))
    assert d.unpack(first.results[2].admit.block_table) == [1, 2, 3, 4]
    assert [(pool.worker, pool.free_blocks, pool.used_blocks) for pool in first.pools] == [(0, 4, 4)]
    for exchange in range(2, 50):  # all are sent before the first answer is read
        await call.write(request(exchange, d.match_op(exchange, A)))
    for exchange in range(2, 50):
        response: Any = await call.read()
        assert (response.exchange, len(response.results)) == (exchange, 1)
    await call.done_writing()
    assert await call.read() is EOF
    assert await call.code() is grpc.StatusCode.OK


async def test_an_operation_that_fails_does_not_end_the_link(cache: Running) -> None:
    call = cache.link()
    response = await ask(call, 1, d.admit_op(1, 0), d.match_op(1, A))
    assert response.results[0].error.code == grpc.StatusCode.NOT_FOUND.value[0]
    await ask(call, 2)
    call.cancel()


@pytest.mark.parametrize("exchange", [0, 1, 3, 2**63])
async def test_a_gap_in_the_numbering_ends_the_link(cache: Running, exchange: int) -> None:
    call = cache.link()
    await ask(call, 1, d.add_worker_op(0, 8, 4))
    await call.write(request(exchange))
    assert await ended(call) == (grpc.StatusCode.FAILED_PRECONDITION, f"exchange {exchange} came where 2 was expected")
    await ask(cache.link(), 1, d.add_worker_op(0, 8, 4))


async def test_a_new_link_ends_the_older_one_and_starts_from_nothing(cache: Running) -> None:
    older = cache.link()
    await ask(older, 1, d.add_worker_op(0, 8, 4), d.match_op(1, A))
    newer = cache.link()
    response = await ask(newer, 1, d.admit_op(1, 0), d.add_worker_op(0, 8, 16), epoch=4)
    assert [result.error.code for result in response.results] == [grpc.StatusCode.NOT_FOUND.value[0], 0]
    assert await ended(older) == (grpc.StatusCode.ABORTED, "a newer link to the cache has begun")
    await ask(newer, 2, d.match_op(1, A), d.admit_op(1, 0), epoch=4)
    newest = cache.link()
    await ask(newest, 1)
    assert (await ended(newer))[0] is grpc.StatusCode.ABORTED
    await ask(newest, 2)


async def drained(call: grpc.aio.StreamStreamCall | grpc.aio.UnaryStreamCall) -> None:
    while await call.read() is not EOF:
        pass


async def test_only_one_of_several_simultaneous_links_survives(cache: Running) -> None:
    """In every state of the links: nothing sent yet, the first answer pending, a heartbeat pending."""

    async def use(link: grpc.aio.StreamStreamCall) -> grpc.StatusCode | None:
        try:
            # A link that the cache ended before the first message learns of it when it writes.
            await link.write(pb.CacheServiceLinkRequest(epoch=1, exchange=1, heartbeats=True))
            await drained(link)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return None

    for _ in range(40):
        links = [cache.link() for _ in range(8)]
        using = [asyncio.create_task(use(link)) for link in links]
        async with asyncio.timeout(10):
            for done in itertools.islice(asyncio.as_completed(using), len(using) - 1):
                assert await done is grpc.StatusCode.ABORTED
        for link in links:
            link.cancel()
        await asyncio.gather(*using, return_exceptions=True)


async def test_an_older_link_is_ended_even_if_its_scheduler_does_not_read(cache: Running) -> None:
    older = cache.link()
    # Small requests with large answers: the requests fit the windows of the stream, the refusals do not.
    for exchange in range(1, 9):
        await older.write(request(exchange, *[pb.CacheOp()] * 5000))
    await asyncio.sleep(0.3)
    assert (await cache.metrics())["paceline_cache_exchanges_total"] < 8  # it waits for its first answers to be read
    newer = cache.link()
    await asyncio.wait_for(ask(newer, 1), TIMEOUT_S)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await asyncio.wait_for(drained(older), TIMEOUT_S)
    assert error.value.code() is grpc.StatusCode.ABORTED
    await ask(newer, 2)


async def test_a_link_that_broke_leaves_an_empty_cache(cache: Running) -> None:
    call = cache.link()
    await ask(call, 1, d.add_worker_op(0, 8, 4))
    assert 'paceline_cache_blocks{state="free",worker="0"}' in str(await cache.metrics())
    call.cancel()
    async with asyncio.timeout(TIMEOUT_S):
        while "paceline_cache_blocks{" in str(await cache.metrics()):  # noqa: ASYNC110 - asked for over HTTP
            await asyncio.sleep(0.02)
    await ask(cache.link(), 1, d.add_worker_op(0, 8, 4))


async def test_metrics_tell_blocks_exchanges_evictions_and_hits(cache: Running) -> None:
    before = await cache.metrics()
    call = cache.link()
    await ask(call, 1, d.add_worker_op(7, 6, 4), d.match_op(1, A), d.admit_op(1, 7), d.commit_op([(1, [], 16)]))
    await ask(call, 2, d.free_op([1]), d.match_op(2, A[:9]), d.admit_op(2, 7), d.extend_op([2, 2]), d.free_op([9]))
    after = await cache.metrics()
    assert after['paceline_cache_blocks{state="free",worker="7"}'] == 0
    assert after['paceline_cache_blocks{state="cached",worker="7"}'] == 1
    assert after['paceline_cache_blocks{state="used",worker="7"}'] == 5
    assert after["paceline_cache_exchanges_total"] == 2
    assert after["paceline_cache_evicted_blocks_total"] == 1
    assert after["paceline_cache_evicted_host_blocks_total"] == 0
    assert (after["paceline_cache_pins"], after["paceline_cache_event_watchers"]) == (0, 0)
    assert after["paceline_cache_prefix_query_tokens_total"] == 25
    assert after["paceline_cache_prefix_hit_tokens_total"] == 8
    assert after["paceline_cache_refused_ops_total"] == 1
    durations = "paceline_cache_exchange_duration_seconds_count"
    assert after[durations] - before[durations] == 2


async def test_health_and_reflection_speak_for_the_cache(cache: Running) -> None:
    assert await cache.health() == health_pb2.HealthCheckResponse.SERVING
    assert await cache.health("paceline.v1.CacheService") == health_pb2.HealthCheckResponse.SERVING
    call = reflection_pb2_grpc.ServerReflectionStub(cache.channel).ServerReflectionInfo(timeout=TIMEOUT_S)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    reply = await call.read()
    assert "paceline.v1.CacheService" in {service.name for service in reply.list_services_response.service}
    await call.done_writing()


async def test_a_core_that_contradicts_itself_ends_the_link_and_not_the_service(
    cache: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = cache.link()
    await ask(call, 1, d.add_worker_op(0, 8, 4), d.match_op(1, A))
    with monkeypatch.context() as patch:
        patch.setattr("cache_svc.core.memory.memory.Memory.take", lambda self, count: [1] * count)
        await call.write(request(2, d.admit_op(1, 0)))
        assert await ended(call) == (grpc.StatusCode.INTERNAL, "exchange 2 failed inside the cache")
    await ask(cache.link(), 1, d.add_worker_op(0, 8, 4), d.match_op(1, A), d.admit_op(1, 0))


async def test_a_cache_that_stops_does_not_wait_for_its_link_to_end() -> None:
    """A link never ends by itself. All requests wait for the next cache, which cannot start before this one stops."""
    async with running(drain_s=60.0) as server:
        call = server.link()
        await ask(call, 1, d.add_worker_op(0, 8, 4))
        server.stop.set()
        assert (await ended(call))[0] is grpc.StatusCode.UNAVAILABLE
        await asyncio.wait_for(server.task, TIMEOUT_S)


@pytest.mark.parametrize("which", ["port", "metrics_port"])
async def test_a_taken_port_is_an_error_and_leaves_no_resources_open(which: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {"port": 0, "metrics_port": 0, which: taken.getsockname()[1]}
        with pytest.raises((RuntimeError, OSError)):
            await serve(CacheSettings(**ports), asyncio.Event())
    async with running() as server:
        await ask(server.link(), 1)


def test_settings_come_from_flags_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings(CacheSettings, [])
    assert (settings.port, settings.metrics_port, settings.debug) == (50052, 9102, False)
    monkeypatch.setenv("PACELINE_CACHE_PORT", "6000")
    settings = load_settings(CacheSettings, ["--metrics-port", "0", "--debug"])
    assert (settings.port, settings.metrics_port, settings.debug) == (6000, 0, True)


async def test_a_scheduler_before_the_newest_leader_cannot_take_over_the_link(cache: Running) -> None:
    old = cache.link("7")
    await ask(old, 1, d.add_worker_op(0, 8, 4))
    new = cache.link("8")
    await ask(new, 1, d.add_worker_op(0, 8, 4))
    assert await ended(old) == (grpc.StatusCode.ABORTED, "a newer link to the cache has begun")
    refusal = "a scheduler of epoch {} is refused: there was a leader of epoch 8"
    assert await ended(cache.link("7")) == (grpc.StatusCode.PERMISSION_DENIED, refusal.format(7))
    assert await ended(cache.link()) == (grpc.StatusCode.PERMISSION_DENIED, refusal.format(0))
    await ask(new, 2, d.match_op(1, A))  # the link of the leader continues
    again = cache.link("8")
    await ask(again, 1, d.add_worker_op(0, 8, 4))
    assert (await ended(new))[0] is grpc.StatusCode.ABORTED


@pytest.mark.parametrize("fence", ["x", "-1", "1.5", "18446744073709551616", "9" * 4000])
async def test_a_fence_that_is_no_number_is_refused(cache: Running, fence: str) -> None:
    reason = "paceline-fence: must be a number of 64 bits"
    assert await ended(cache.link(fence)) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
