"""A gateway that is frozen, as its gRPC clients see it: they go on at another one in seconds, token for token.

How long it took is printed (`pytest -s`), not asserted: the machine may have other things to do.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.client import AsyncPacelineClient
from tests.support.stack import Stack

pytestmark = [
    pytest.mark.skipif("PACELINE_CHAOS" not in os.environ, reason="takes minutes: run by make chaos"),
    pytest.mark.timeout(300),
]
NUM_TOKENS = 1500
PING_TIMEOUT_S = 0.5
PROMPT = [9, 10, 11, 12]


@asynccontextmanager
async def frozen(stack: Stack) -> AsyncIterator[float]:
    """Freezes the first of two gateways. Yields the time at which it froze."""
    gateway = stack.processes["gateway"]
    gateway.send_signal(signal.SIGSTOP)
    try:
        yield time.monotonic()
    finally:
        gateway.send_signal(signal.SIGCONT)


async def generated(client: AsyncPacelineClient) -> list[int]:
    async with asyncio.timeout(60):
        result = await client.generate(token_ids=PROMPT, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    return result.token_ids


@pytest.fixture
async def two(stack: Stack) -> Stack:
    await asyncio.to_thread(stack.up)
    await asyncio.to_thread(stack.start_gateway, "gateway-2")
    return stack


async def test_a_stream_goes_on_at_the_other_gateway_and_nothing_is_lost(two: Stack) -> None:
    targets = [gateway.target for gateway in two.gateways]
    async with AsyncPacelineClient(targets[1:]) as client:
        right = await generated(client)
    async with AsyncPacelineClient(targets, ping_timeout_s=PING_TIMEOUT_S, retry_for_s=60) as client:
        tokens: list[int] = []
        pieces = client.stream(token_ids=PROMPT, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
        began_s = time.monotonic()
        async for piece in pieces:
            tokens += piece.token_ids
            if time.monotonic() - began_s > 4 * PING_TIMEOUT_S:
                break
        assert len(tokens) < NUM_TOKENS, "the stream ended before the freeze"
        async with frozen(two) as frozen_s, asyncio.timeout(60):
            seen = len(tokens)
            async for piece in pieces:
                tokens += piece.token_ids
                if len(tokens) > seen + 200 and seen:  # more tokens than were in transit when the gateway froze
                    print(f"past token {seen} after {time.monotonic() - frozen_s:.2f} s")
                    seen = 0
            assert tokens == right
            assert await generated(client) == right, "the next request goes where the last one was answered"
    await asyncio.to_thread(two.wait_metric, "paceline_scheduler_num_requests_running", 0)
    await asyncio.to_thread(two.wait_metric, "paceline_scheduler_kv_cache_usage_ratio", 0)


async def test_a_request_that_has_waited_long_continues_at_the_other_gateway(two: Stack) -> None:
    """The connection has carried no token, and more pings than grpc core's default allows without data. With that
    default, the next ping would come after a minute."""
    targets = [gateway.target for gateway in two.gateways]
    async with AsyncPacelineClient(targets[1:]) as client:
        right = await generated(client)
    await asyncio.to_thread(two.kill, "worker-1")
    async with AsyncPacelineClient(targets, ping_timeout_s=PING_TIMEOUT_S, retry_for_s=60) as client:
        waiting = asyncio.create_task(generated(client))
        await asyncio.sleep(6 * PING_TIMEOUT_S)
        assert not waiting.done()
        async with frozen(two) as frozen_s:
            await asyncio.to_thread(two.start, "worker-1")
            assert await waiting == right
            print(f"served after {time.monotonic() - frozen_s:.2f} s, with the start of a worker")


async def test_a_client_that_connects_to_the_frozen_gateway_is_served_by_the_other(two: Stack) -> None:
    """The kernel takes the connection, and no process answers on it."""
    targets = [gateway.target for gateway in two.gateways]
    async with AsyncPacelineClient(targets[1:]) as client:
        right = await generated(client)
    async with frozen(two) as frozen_s, AsyncPacelineClient(targets, ping_timeout_s=PING_TIMEOUT_S) as client:
        async with asyncio.timeout(60):
            async for _ in client.stream(token_ids=PROMPT, max_tokens=1):
                print(f"first token after {time.monotonic() - frozen_s:.2f} s")
        assert await generated(client) == right
