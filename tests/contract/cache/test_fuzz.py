"""The server under streams that make no sense: each goes on or ends with a definite status, and the next is served."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from cache_svc.core.cache import CacheCore
from paceline.v1 import cache_pb2 as pb
from services.runtime.rpc import MAX_MESSAGE_BYTES, open_channel
from tests.contract.cache.test_server import TIMEOUT_S, A, Running, ask, ended, request, running
from tests.support.untyped_grpc import EOF
from tests.unit.cache import driver as d
from tests.unit.cache.garbage import UINT64, Garbage

LINK = "/paceline.v1.CacheService/Link"
EPOCH = 3


@pytest.fixture
async def cache() -> AsyncIterator[Running]:
    async with running() as server:
        yield server


def raw_link(channel: Any) -> Any:
    """A link that takes raw bytes."""
    return channel.stream_stream(LINK, response_deserializer=pb.CacheServiceLinkResponse.FromString)(timeout=TIMEOUT_S)


async def serve_honestly(cache: Running) -> None:
    link = cache.link()
    response = await ask(link, 1, d.add_worker_op(0, 8, 4), d.match_op(1, A), d.admit_op(1, 0))
    assert d.unpack(response.results[2].admit.block_table) == [1, 2, 3, 4]
    response = await ask(link, 2, d.commit_op([(1, [], 16)]), d.free_op([1]), d.match_op(2, [*A, 7]))
    assert d.tiers(response.results[2].match.matches) == {0: (16, 0, 0)}
    assert [(pool.free_blocks, pool.cached_blocks, pool.used_blocks) for pool in response.pools] == [(4, 4, 0)]
    assert await cache.health() == health_pb2.HealthCheckResponse.SERVING


class Stranger:
    """A link that sends garbage. A core of its own gets the same and says what the answers must be."""

    def __init__(self, cache: Running, rng: Random) -> None:
        self.rng = rng
        self.call = cache.link()
        self.core = CacheCore(debug=True)
        self.garbage = Garbage(rng, self.core)

    def next_request(self) -> pb.CacheServiceLinkRequest:
        number = self.core.last_exchange + 1
        ops = self.garbage.ops() if number > 1 else [d.add_worker_op(0, 12, 2, True, 8, True, True)]
        return pb.CacheServiceLinkRequest(epoch=EPOCH, exchange=number, ops=ops, now_ms=self.rng.choice([0, 9, UINT64]))

    async def ask(self, count: int) -> None:
        """Sends this many exchanges before it reads an answer."""
        requests = [self.next_request() for _ in range(count)]
        expected = []
        for each in requests:
            each.exchange = self.core.last_exchange + 1
            expected.append(self.core.exchange(each))
        for each in requests:
            await self.call.write(each)
        for response in expected:
            assert await self.call.read() == response

    async def end(self, cache: Running) -> None:
        """Ends the link in a random way."""
        number = self.core.last_exchange
        match self.rng.randrange(6):
            case 0:
                await self.call.write(request(self.rng.choice([0, number, number + 2, UINT64])))
                assert (await ended(self.call))[0] is grpc.StatusCode.FAILED_PRECONDITION
            case 1:
                await self.call.write(request(number + 1, epoch=self.rng.choice([0, 2, UINT64])))
                assert (await ended(self.call))[0] is grpc.StatusCode.FAILED_PRECONDITION
            case 2:
                newer = cache.link()
                await ask(newer, 1)
                assert (await ended(self.call))[0] is grpc.StatusCode.ABORTED
                await ask(newer, 2)  # the end of the older one does not reset the newer one
                newer.cancel()
            case 3:
                await self.call.done_writing()
                assert await self.call.read() is EOF
                assert await self.call.code() is grpc.StatusCode.OK
            case 4:
                for _ in range(3):  # cut while these are on their way, or half done
                    await self.call.write(self.next_request())
                self.call.cancel()
            case 5:
                self.call.cancel()


async def failures(cache: Running) -> float:
    """How many links of this process have ended with INTERNAL or UNKNOWN."""
    handled = "grpc_server_handled_total"
    names = [f'{handled}{{grpc_code="{code}",grpc_method="{LINK}"}}' for code in ("INTERNAL", "UNKNOWN")]
    metrics = await cache.metrics()
    return sum(metrics.get(name, 0.0) for name in names)


@pytest.mark.parametrize("seed", range(4))
async def test_random_requests_fail_no_valid_client(cache: Running, seed: int) -> None:
    rng = Random(seed)
    failures_before = await failures(cache)
    for _ in range(25):
        stranger = Stranger(cache, rng)
        for _ in range(rng.choice([1, 5, 20])):
            await stranger.ask(rng.choice([1, 1, 2, 5]))
        await stranger.end(cache)
        if not rng.randrange(3):
            await serve_honestly(cache)
    await serve_honestly(cache)
    assert await failures(cache) == failures_before


WELL = request(1, d.add_worker_op(0, 8, 4)).SerializeToString()
BAD_TEXT = pb.CacheOp(match=pb.MatchOp(sequence=1, token_ids=b"0000", namespace=pb.CacheNamespace(lora="xy")))


@pytest.mark.parametrize(
    "noise",
    [
        b"\xff\xff\xff",
        b"garbage",
        WELL[:-3],
        WELL + b"\x0a",
        request(2, BAD_TEXT).SerializeToString().replace(b"xy", b"\xff\xfe"),
    ],
)
async def test_bytes_that_are_no_message_end_the_stream_and_nothing_else(cache: Running, noise: bytes) -> None:
    link = raw_link(cache.channel)
    await link.write(WELL)
    assert (await link.read()).exchange == 1
    await link.write(noise)
    code, words = await ended(link)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "CacheServiceLinkRequest" in words
    await serve_honestly(cache)


async def test_a_message_that_is_too_large_ends_the_stream_and_nothing_else(cache: Running) -> None:
    assert cache.addresses.grpc is not None
    async with open_channel(cache.addresses.grpc, [("grpc.max_send_message_length", -1)]) as channel:
        link = raw_link(channel)
        await link.write(WELL)
        await link.read()
        with contextlib.suppress(grpc.aio.AioRpcError):  # it may be refused before all of it is sent
            await link.write(bytes(MAX_MESSAGE_BYTES + 1))
        assert (await ended(link))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    await serve_honestly(cache)


async def test_the_cost_of_a_pool_of_2_billion_blocks_follows_the_used_blocks(cache: Running) -> None:
    link = cache.link()
    large = 2**31 - 1
    response = await ask(link, 1, *[d.add_worker_op(i, large, 4, True, large, True, True) for i in range(50)])
    assert not any(result.HasField("error") for result in response.results)
    response = await ask(link, 2, d.match_op(1, A), d.admit_op(1, 7), d.extend_op([1] * 1000))
    assert len(d.unpack(response.results[2].extend.block_ids)) == 1000
    assert [(pool.worker, pool.free_blocks, pool.used_blocks) for pool in response.pools] == [(7, large - 1004, 1004)]
