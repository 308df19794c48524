"""kill -9 of the scheduler under running streams: they pause, go on token for token, and little is computed again."""

from __future__ import annotations

import asyncio

import pytest

from services.client import AsyncPacelineClient, Result
from tests.chaos.test_cache import PREFILLED, texts
from tests.support import load
from tests.support.stack import Stack

RUNNING = "paceline_scheduler_num_requests_running"
NUM_TOKENS = 1500  # so many that a fast machine still runs all requests after a restart


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
    # After a restart each request recomputes only its last token: 32 tokens in all. Without the KV that the worker has
    # kept it would be 573.
    assert (stack.metric(PREFILLED, "worker-1") or 0) - before <= 4 * len(right) < prefilled
    await asyncio.to_thread(stack.wait_metric, RUNNING, 0)
    await asyncio.to_thread(stack.wait_metric, "paceline_scheduler_kv_cache_usage_ratio", 0)


async def test_streams_go_on_with_several_workers(stack: Stack) -> None:
    """The worker that registers first may get requests that another worker has computed: it computes them again."""
    await asyncio.to_thread(stack.up, 2)
    right = await texts(stack)
    serving = asyncio.create_task(texts(stack))
    await asyncio.to_thread(stack.wait_metric, RUNNING, len(right))
    await asyncio.to_thread(stack.kill, "scheduler")
    await asyncio.to_thread(stack.start, "scheduler")
    assert await serving == right


async def test_streams_of_direct_grpc_clients_go_on(stack: Stack) -> None:
    """The clients themselves resubmit unfinished requests, with the tokens that they have."""
    await asyncio.to_thread(stack.up)
    prompts = load.random_prompts(6, 3, 900)

    async def answers(client: AsyncPacelineClient) -> list[Result]:
        asked = [{"temperature": 0.0}, {"seed": 3}, {"seed": 4, "logprobs": 1, "presence_penalty": 0.5}] * 2
        return await asyncio.gather(
            *(
                client.generate(token_ids=prompt, max_tokens=NUM_TOKENS, ignore_eos=True, **options)  # type: ignore[arg-type]
                for prompt, options in zip(prompts, asked, strict=True)
            )
        )

    async with AsyncPacelineClient(stack.scheduler) as client:
        right = await answers(client)
        serving = asyncio.create_task(answers(client))
        for _ in range(2):
            await asyncio.to_thread(stack.wait_metric, RUNNING, len(right))
            await asyncio.sleep(0.2)
            await asyncio.to_thread(stack.kill, "scheduler")
            assert not serving.done()
            await asyncio.to_thread(stack.start, "scheduler")
        for mine, whole in zip(await serving, right, strict=True):
            assert (mine.token_ids, mine.finish_reason) == (whole.token_ids, whole.finish_reason)
            assert mine.usage.completion_tokens == len(mine.token_ids) == NUM_TOKENS
            told, expected = ([token.logprob for token in answer.logprobs] for answer in (mine, whole))
            # Recomputed KV differs in its last bits, and each token depends on all tokens before it.
            assert told[:300] == pytest.approx(expected[:300], abs=1e-4)
            assert told == pytest.approx(expected, abs=5e-4)
    await asyncio.to_thread(stack.wait_metric, RUNNING, 0)
