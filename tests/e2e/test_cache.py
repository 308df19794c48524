"""A pool that is too small makes the cache copy, evict, demote and swap. The tokens equal those without a cache."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.support import load
from tests.support.stack import Stack

VOCAB = 1000
BLOCK_SIZE = 8


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A pool that is large enough, without prefix caching."""
    stack = Stack(tmp_path_factory.mktemp("bare"))
    stack.worker_flags = ["--threads", "1"]
    stack.scheduler_flags = ["--no-prefix-caching"]
    try:
        yield stack.up()
    finally:
        stack.down()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("tiny"))
    stack.worker_flags = ["--threads", "1", "--block-size", str(BLOCK_SIZE), "--num-blocks", "48"]
    stack.worker_flags += ["--num-host-blocks", "96"]
    stack.scheduler_flags = ["--preset", "vllm-v1", "--policy-options", '{"mode": "swap"}']
    try:
        yield stack.up()
    finally:
        stack.down()


def prompts(count: int, seed: int) -> list[list[int]]:
    """Beginnings of a few long texts, cut anywhere, followed by random tokens."""
    rng = random.Random(seed)
    texts = [[rng.randrange(8, VOCAB) for _ in range(120)] for _ in range(3)]
    made = []
    for _ in range(count):
        tail = [rng.randrange(8, VOCAB) for _ in range(rng.randrange(1, 20))]
        made.append(rng.choice(texts)[: rng.randrange(4, 120)] + tail)
    return made


async def test_tokens_of_partial_blocks_are_reused_too(bare: Stack, tiny: Stack) -> None:
    """Prompts that share less than a block, or end within a block: the common beginning of a block is copied."""
    rng = random.Random(3)
    texts = [[rng.randrange(8, VOCAB) for _ in range(30)] for _ in range(4)]
    for length in (5, 19):  # prompt and output: 6 and 22 computed tokens
        wanted = [load.Wanted([*text[:length]], 2 if length == 5 else 4) for text in texts]
        right = await load.stream_all(bare.url, wanted)
        for turn in range(2):
            hits_before = tiny.metric("paceline_cache_prefix_hit_tokens_total", "cache") or 0
            for before, after in zip(right, await load.stream_all(tiny.url, wanted), strict=True):
                assert not before.errors + after.errors
                assert after.text == before.text
            hits = (tiny.metric("paceline_cache_prefix_hit_tokens_total", "cache") or 0) - hits_before
            assert not turn or hits == len(wanted) * (length - 1)


async def test_tokens_are_those_that_come_without_a_cache(bare: Stack, tiny: Stack) -> None:
    wanted = [load.Wanted(prompt, 24) for prompt in prompts(40, 5)]
    right = await load.stream_all(bare.url, wanted)
    assert not any(each.errors for each in right)
    for _ in range(2):  # the second time many tokens are cached, some within blocks
        for before, after in zip(right, await load.stream_all(tiny.url, wanted), strict=True):
            assert not after.errors
            assert after.text == before.text
    assert (tiny.metric("paceline_cache_prefix_hit_tokens_total", "cache") or 0) > 0
    for happened in ("copied", "evicted", "demoted", "promoted", "swapped_out", "swapped_in", "evicted_host"):
        assert (tiny.metric(f"paceline_cache_{happened}_blocks_total", "cache") or 0) > 10, happened
    for happened in ("sharing_sequences", "demoted_tails", "copied_host_blocks"):
        assert (tiny.metric(f"paceline_cache_{happened}_total", "cache") or 0) > 0, happened
    assert (bare.metric("paceline_cache_prefix_hit_tokens_total", "cache") or 0) == 0
