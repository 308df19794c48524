"""Real processes with a small KV pool: a request that was swapped to host memory continues with the right tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from tests.support import load
from tests.support.stack import Stack

VOCAB = 1000


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("tiny"))
    stack.worker_flags = ["--threads", "1", "--block-size", "8", "--num-blocks", "40", "--num-host-blocks", "400"]
    stack.scheduler_flags = ["--preset", "vllm-v1", "--policy-options", '{"mode": "swap"}', "--no-prefix-caching"]
    try:
        yield stack.up()
    finally:
        stack.down()


async def test_swapped_streams_give_the_text_of_undisturbed_streams(stack: Stack, tiny: Stack) -> None:
    wanted = [load.Wanted(prompt, 60) for prompt in load.random_prompts(12, 22, VOCAB, longest=60)]
    right = await load.stream_all(stack.url, wanted)
    for before, after in zip(right, await load.stream_all(tiny.url, wanted), strict=True):
        assert not before.errors
        assert not after.errors
        assert after.text == before.text
    assert (tiny.metric("paceline_scheduler_swapped_in_total") or 0) > 0
    assert (tiny.metric("paceline_cache_swapped_in_blocks_total", "cache") or 0) > 0
    # The cache learns of a request's end in the next exchange.
    await asyncio.to_thread(tiny.wait_metric, 'paceline_cache_host_blocks{state="used",worker="1"}', 0, of="cache")
    assert tiny.metric('paceline_cache_host_blocks{state="free",worker="1"}', "cache") == 400


def test_samples_of_one_prompt_are_the_same_in_a_tiny_pool(stack: Stack, tiny: Stack) -> None:
    body = {"prompt": list(range(8, 40)), "max_tokens": 50, "n": 12, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    answers = [httpx.post(f"{each.url}/v1/completions", json=body, timeout=200).json() for each in (stack, tiny)]
    right, swapped = ([choice["text"] for choice in answer["choices"]] for answer in answers)
    assert swapped == right
