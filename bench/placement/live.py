"""Measures placement on running services: `python -m bench.placement.live`.

One or two workers of 16 sequences each serve the demo model over HTTP. In four loads, all requests share a system
prompt (842 or 1,500 tokens; 32 requests at a time, or 2.5 a second). One request warms one worker's cache. Then
requests with this prefix and 8 tokens of their own arrive. The fifth load is conversations: each turn's prompt is the
previous prompt and 128 more tokens.

The workers share the machine's cores, so two would not be faster than one. So each worker computes a step and then
sleeps, in place of a device of its own (bench/overload/slow_worker.py). `--real-steps` turns the sleep off.

The results (printed, and in bench/results/placement_live.json if all was measured) are the first worker's share of the
decode tokens, output tokens per second, and the cached share of the prompt tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from bench.machine import load_note
from bench.placement.placement import OURS, POLICIES
from tests.support.ports import free_port
from tests.support.stack import Stack

RESULTS = Path(__file__).parents[1] / "results" / "placement_live.json"
PREFIXES = (842, 1_500)  # tokens; the demo model takes 2,048
OWN_TOKENS, OUTPUT_TOKENS = 8, 48
REQUESTS, CONCURRENCY, PER_S = 64, 32, 2.5
MAX_NUM_SEQS = 16  # per worker; 32 requests at a time are twice as many as one worker runs
CONVERSATIONS, TURNS, TURN_TOKENS, THINK_S = 24, 8, 128, 0.5
TIMEOUT_S = 300.0


def prompt(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(8, 900) for _ in range(count)]


@dataclass
class CountingClient:
    """Sends prompts, and adds up the tokens of all answers."""

    client: httpx.AsyncClient
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    async def ask(self, tokens: list[int]) -> None:
        body = {"prompt": tokens, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0}
        answer = await self.client.post("/v1/completions", json=body)
        answer.raise_for_status()
        usage = answer.json()["usage"]
        assert usage["completion_tokens"] == OUTPUT_TOKENS
        self.prompt_tokens += len(tokens)
        self.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        self.output_tokens += OUTPUT_TOKENS


Load = Callable[[CountingClient, random.Random], Awaitable[float]]  # returns seconds


async def share_prefix(asked: CountingClient, rng: random.Random, prefix_tokens: int, per_s: float) -> float:
    """One request warms a cache; then the others are measured. `per_s` requests arrive a second; with 0, CONCURRENCY
    requests are in flight until the last ones are sent."""
    prefix = prompt(rng, prefix_tokens)
    await CountingClient(asked.client).ask(prefix + prompt(rng, OWN_TOKENS))
    gate, began_s = asyncio.Semaphore(CONCURRENCY if not per_s else REQUESTS), time.perf_counter()

    async def one(after_s: float) -> None:
        await asyncio.sleep(after_s)
        async with gate:
            await asked.ask(prefix + prompt(rng, OWN_TOKENS))

    arrivals_s = [0.0]
    for _ in range(REQUESTS - 1):
        arrivals_s.append(arrivals_s[-1] + (rng.expovariate(per_s) if per_s else 0.0))
    await asyncio.gather(*map(one, arrivals_s))
    return time.perf_counter() - began_s


async def converse(asked: CountingClient, rng: random.Random) -> float:
    began_s = time.perf_counter()

    async def one() -> None:
        past = list[int]()
        for _ in range(TURNS):
            await asyncio.sleep(rng.expovariate(1 / THINK_S))
            past += prompt(rng, TURN_TOKENS)
            await asked.ask(past)

    await asyncio.gather(*(one() for _ in range(CONVERSATIONS)))
    return time.perf_counter() - began_s


LOADS: dict[str, Load] = {
    f"prefix of {length:,} tokens, {f'{per_s:g} requests/s' if per_s else f'{CONCURRENCY} at a time'}": partial(
        share_prefix, prefix_tokens=length, per_s=per_s
    )
    for length in PREFIXES
    for per_s in (0.0, PER_S)
} | {"conversations": converse}


async def play(url: str, load: Load, rng: random.Random) -> tuple[CountingClient, float]:
    """The results of the requests, and their time in seconds."""
    limits = httpx.Limits(max_connections=REQUESTS)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits, trust_env=False) as client:
        asked = CountingClient(client)
        return asked, await load(asked, rng)


def decoded(stack: Stack, workers: int) -> list[float]:
    series = 'paceline_worker_tokens_total{phase="decode"}'
    return [stack.metric(series, of=f"worker-{i + 1}") or 0.0 for i in range(workers)]


def measure(placement: str, workers: int, slow: bool, titles: str) -> list[dict[str, Any]]:
    """Measures the loads with `titles` in their title on the same servers. Each load has its own prefix."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        stack = Stack(Path(folder), worker_module="bench.overload.slow_worker" if slow else "")
        stack.metrics_ports |= {f"worker-{i + 1}": free_port() for i in range(workers)}
        stack.worker_flags = ["--threads", "1", "--log-level", "warning", "--max-num-seqs", str(MAX_NUM_SEQS)]
        stack.scheduler_flags = ["--placement", placement]
        try:
            stack.up(workers)
            for case, (title, load) in enumerate(LOADS.items()):
                if titles not in title:
                    continue
                rng, before = random.Random(case), decoded(stack, workers)
                asked, wall_s = asyncio.run(play(stack.url, load, rng))
                tokens = [now - then for then, now in zip(before, decoded(stack, workers), strict=True)]
                rows.append(
                    {
                        "placement": placement,
                        "workers": workers,
                        "slow": slow,
                        "load": title,
                        "tokens_per_s": round(asked.output_tokens / wall_s, 1),
                        "decode_tokens": tokens,
                        "first_share": round(tokens[0] / sum(tokens), 3),
                        "cached_share": round(asked.cached_tokens / asked.prompt_tokens, 4),
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
        finally:
            stack.down()
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.placement.live", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--placements", nargs="+", choices=POLICIES, default=POLICIES, help="measured on two workers")
    parser.add_argument("--loads", default="", metavar="TEXT", help="measure only loads with this text in their title")
    parser.add_argument("--real-steps", action="store_true", help="do not lengthen the workers' steps")
    options = parser.parse_args(argv)
    note, rows = load_note(os.getloadavg()[0]), list[dict[str, Any]]()
    ways = [(OURS, 1), *((policy, 2) for policy in reversed(options.placements))]
    for _ in range(options.repeats):
        for placement, workers in ways:
            rows += measure(placement, workers, not options.real_steps, options.loads)
    if not options.loads and options.placements == POLICIES:  # a part of the comparison must not replace the whole
        RESULTS.write_text(json.dumps({"note": note, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
