"""Speculation changes no token: 1,000 random requests with and without it, and with kills of services."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import httpx

from tests.support.stack import Stack

NUM_REQUESTS, NUM_QUIET, AT_ONCE = 1000, 100, 6
WORDS = ("fox", "hen", "king", "river", "stone", "door")
KILLED = ("worker-1", "scheduler", "cache")
PAUSE_S = 3.0  # between two kills
SPECULATES = ["--speculative-tokens", "5", "--speculative-max-rows", str(AT_ONCE)]


def questions(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Greedy and seeded requests, with every kind of option that could interfere with drafts."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "ignore_eos": True},
        {"temperature": 0.2},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 20},
        {"temperature": 0, "repetition_penalty": 1.2},
        {"temperature": 0.5, "presence_penalty": 0.6, "frequency_penalty": 0.4},
        {"temperature": 0, "min_tokens": 20},
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0, "stop": ["the hen", ". Th"], "ignore_eos": True},
        {"temperature": 0, "logit_bias": {"60": 2.0}, "ignore_eos": True},
        {"temperature": 0.3, "structured_outputs": {"regex": "([a-z]{1,5} ){4,20}"}},
        {"temperature": 0.4, "n": 2},
    ]
    for number in range(NUM_REQUESTS):
        sentence = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 4)))
        prompt = "Once there was a " + f"{sentence}. " * rng.randint(1, 4)
        yield {"prompt": prompt, "max_tokens": rng.randint(20, 80), "seed": number, **rng.choice(kinds)}


async def answers(stack: Stack, count: int = NUM_REQUESTS) -> list[Any]:
    """The tokens, texts and finish reasons of the first requests."""
    found: dict[int, Any] = {}
    waiting = iter(enumerate(islice(questions(random.Random(1)), count)))

    async def user(client: httpx.AsyncClient) -> None:
        for number, fields in waiting:
            answer = await client.post(f"{stack.url}/v1/completions", json=fields | {"return_token_ids": True})
            assert answer.status_code == 200, answer.text
            choices = answer.json()["choices"]
            found[number] = [(one["token_ids"], one["text"], one["finish_reason"]) for one in choices]

    async with httpx.AsyncClient(timeout=120) as client:
        await asyncio.gather(*(user(client) for _ in range(AT_ONCE)))
    return [found[number] for number in range(count)]


async def killing(stack: Stack) -> None:
    """Kills one service after the other, until it is cancelled."""
    while True:
        for name in KILLED:
            await asyncio.sleep(PAUSE_S)
            await asyncio.to_thread(stack.kill, name)
            await asyncio.to_thread(stack.start, name)


def counted(stack: Stack, name: str) -> float:
    lines = httpx.get(f"http://127.0.0.1:{stack.metrics_ports['scheduler']}/metrics", timeout=60).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"paceline_scheduler_{name}_total"))


async def test_speculation_changes_no_token_through_kills(stack: Stack) -> None:
    # Requests must not be blamed for what kills do to workers.
    stack.scheduler_flags = ["--poison-failures", "1000"]
    await asyncio.to_thread(stack.up)
    expected = await answers(stack)
    await asyncio.to_thread(stack.down)
    stack.scheduler_flags += SPECULATES
    await asyncio.to_thread(stack.up)
    assert await answers(stack, NUM_QUIET) == expected[:NUM_QUIET]
    assert counted(stack, "spec_decode_num_accepted_tokens") > NUM_QUIET, "drafts were accepted"
    kills = asyncio.create_task(killing(stack))
    try:
        assert await answers(stack) == expected
    finally:
        kills.cancel()
        await asyncio.gather(kills, return_exceptions=True)
