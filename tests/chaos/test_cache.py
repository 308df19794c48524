"""kill -9 of the cache under running streams: they pause, and no running request is prefilled again."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.support import load
from tests.support.stack import Stack

VOCAB = 1000
NUM_TOKENS = 300
PREFILLED = 'paceline_worker_tokens_total{phase="prefill"}'
REQUEUED, RESTORED = "paceline_scheduler_requeued_requests_total", "paceline_scheduler_restored_requests_total"

# A long timeout, so that no service counts as lost on a busy machine: these tests are about the cache alone.
PATIENT = ["--heartbeat-timeout-s", "20"]


async def samples(http: httpx.AsyncClient, prompt: list[int]) -> list[str]:
    """Four samples of one prompt, which share its blocks."""
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "n": 4, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    answer = await http.post("/v1/completions", json=body)
    answer.raise_for_status()
    return [choice["text"] for choice in answer.json()["choices"]]


async def texts(stack: Stack) -> list[str]:
    """The texts that clients get: of greedy requests, of seeded requests, and of one request for several samples."""
    wanted = [load.Wanted(prompt, NUM_TOKENS) for prompt in load.random_prompts(8, 11, VOCAB)]
    async with load.client(stack.url) as http:
        greedy, seeded, forked = await asyncio.gather(
            load.stream_all(stack.url, wanted),
            load.stream_all(stack.url, wanted[:4], temperature=1.0, seed=5),
            samples(http, wanted[0].prompt * 2),
        )
    assert not [got.errors for got in [*greedy, *seeded] if got.errors]
    return [*(got.text for got in [*greedy, *seeded]), *forked]


@pytest.mark.parametrize("caching", ["--prefix-caching", "--no-prefix-caching"])
async def test_running_requests_continue_with_their_kv(stack: Stack, caching: str) -> None:
    stack.scheduler_flags, stack.worker_flags = [caching, *PATIENT], ["--threads", "1", *PATIENT]
    await asyncio.to_thread(stack.up)
    right = await texts(stack)
    prefilled = stack.metric(PREFILLED, "worker-1")
    assert prefilled
    serving = asyncio.create_task(texts(stack))
    await asyncio.to_thread(stack.wait_metric, "paceline_scheduler_num_requests_running", len(right))
    for _ in range(2):
        await asyncio.to_thread(stack.kill, "cache")
        await asyncio.sleep(0.3)
        assert not serving.done()
        await asyncio.to_thread(stack.start, "cache")
        await asyncio.to_thread(stack.wait_metric, "paceline_cache_restored_sequences_total", len(right), of="cache")
    assert await serving == right
    assert stack.metric(REQUEUED) == 0
    assert stack.metric(RESTORED) == 2 * len(right)
    assert stack.metric("paceline_cache_refused_claims_total", "cache") == 0
    # Some prompts may hit the cache the second time, and no running request was prefilled again.
    assert (stack.metric(PREFILLED, "worker-1") or 0) <= 2 * prefilled
    await asyncio.to_thread(stack.wait_metric, "paceline_scheduler_num_requests_running", 0)
    await asyncio.to_thread(stack.wait_metric, "paceline_scheduler_kv_cache_usage_ratio", 0)
