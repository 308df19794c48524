"""kill -9 of the scheduler under running streams: they pause, go on token for token, and little is computed again."""

from __future__ import annotations

import asyncio

from tests.chaos.test_cache import PREFILLED, texts
from tests.support.stack import Stack

RUNNING = "paceline_scheduler_num_requests_running"


async def test_the_next_scheduler_finds_what_the_worker_has_computed(stack: Stack) -> None:
    await asyncio.to_thread(stack.up)
    right = await texts(stack)
    prefilled = stack.metric(PREFILLED, "worker-1") or 0
    serving = asyncio.create_task(texts(stack))
    await asyncio.to_thread(stack.wait_metric, RUNNING, len(right))
    before = stack.metric(PREFILLED, "worker-1") or 0
    for _ in range(2):
        await asyncio.to_thread(stack.kill, "scheduler")
        await asyncio.sleep(0.2)
        assert not serving.done()
        await asyncio.to_thread(stack.start, "scheduler")
        await asyncio.to_thread(stack.wait_metric, RUNNING, len(right))
    assert await serving == right
    # Each computes the token that it got last, and no other: 32 in all, where without it would be 573.
    assert (stack.metric(PREFILLED, "worker-1") or 0) - before <= 4 * len(right) < prefilled
    await asyncio.to_thread(stack.wait_metric, RUNNING, 0)
    await asyncio.to_thread(stack.wait_metric, "paceline_scheduler_kv_cache_usage_ratio", 0)


async def test_streams_go_on_with_several_workers(stack: Stack) -> None:
    """Whoever registers first may get what another one has computed: then it is computed again."""
    await asyncio.to_thread(stack.up, 2)
    right = await texts(stack)
    serving = asyncio.create_task(texts(stack))
    await asyncio.to_thread(stack.wait_metric, RUNNING, len(right))
    await asyncio.to_thread(stack.kill, "scheduler")
    await asyncio.to_thread(stack.start, "scheduler")
    assert await serving == right
