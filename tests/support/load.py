"""Many streamed completions at once over HTTP, with cancels, and what each of them got."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field

import httpx


@dataclass
class Wanted:
    prompt: list[int]
    max_tokens: int
    cancel_after: int | None = None  # pieces of text


@dataclass
class Got:
    text: str = ""
    finish_reason: str | None = None
    usage: dict | None = None
    cancelled: bool = False
    errors: list[str] = field(default_factory=list)
    longest_pause_s: float = 0.0


def random_prompts(count: int, seed: int, vocab: int, longest: int = 120) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(8, vocab) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


async def stream(client: httpx.AsyncClient, wanted: Wanted, **options: object) -> Got:
    """One streamed completion; greedy unless options say otherwise. Errors are noted, not raised."""
    got = Got()
    loop = asyncio.get_running_loop()
    body = {
        "prompt": wanted.prompt,
        "max_tokens": wanted.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    } | options
    pieces, last_s = 0, loop.time()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                got.errors.append(f"{answer.status_code} {(await answer.aread()).decode()}")
                return got
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                got.longest_pause_s, last_s = max(got.longest_pause_s, loop.time() - last_s), loop.time()
                if "error" in event:
                    got.errors.append(str(event["error"]))
                    continue
                got.usage = event.get("usage") or got.usage
                for choice in event["choices"]:
                    got.text += choice["text"]
                    got.finish_reason = choice["finish_reason"] or got.finish_reason
                    pieces += 1
                if wanted.cancel_after is not None and pieces >= wanted.cancel_after:
                    got.cancelled = True
                    return got
    except httpx.HTTPError as error:
        got.errors.append(repr(error))
    return got


def client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=url, timeout=300, limits=limits, trust_env=False)


async def stream_all(url: str, wanted: list[Wanted], **options: object) -> list[Got]:
    async with client(url) as http:
        return list(await asyncio.gather(*(stream(http, one, **options) for one in wanted)))
