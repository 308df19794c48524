"""A load client in a process of its own: `python -m bench.client URL CONCURRENCY REQUESTS PROMPT OUTPUT [MOST]` prints
JSON. With MOST, each request has from OUTPUT to MOST tokens.

Its connections are asyncio protocols without tasks, because on two cores the client's CPU time slows the server that it
measures. The streams are greedy, and no end-of-sequence token ends them.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import time
from urllib.parse import urlparse

import uvloop


class _Answer(asyncio.Protocol):
    """The answer of a server that closes the connection behind it."""

    def __init__(self) -> None:
        self.first_s = 0.0  # the time of the first event
        self.parts: list[bytes] = []
        self.ended = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        if not self.first_s and b"data: " in data:
            self.first_s = time.perf_counter()
        self.parts.append(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set_result(None)


async def one(host: str, port: int, body: bytes) -> tuple[float, float, int]:
    """Seconds to the first token and to the end, and how many tokens the usage chunk counts."""
    began = time.perf_counter()
    transport, answer = await asyncio.get_running_loop().create_connection(_Answer, host, port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    transport.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    await answer.ended
    took_s, tail = time.perf_counter() - began, b"".join(answer.parts[-20:])
    counted = re.search(rb'"completion_tokens":(\d+)', tail)
    assert counted, tail
    return answer.first_s - began, took_s, int(counted[1])


async def load(
    url: str, concurrency: int, requests: int, prompt_tokens: int, output_tokens: int, most_output_tokens: int = 0
) -> dict[str, float]:
    target, rng = urlparse(url), random.Random(time.time_ns())
    assert target.hostname
    assert target.port
    host, port = target.hostname, target.port
    left = iter(range(requests))
    results: list[tuple[float, float, int]] = []

    async def user() -> None:
        for _ in left:
            fields = {
                "prompt": [rng.randrange(8, 900) for _ in range(prompt_tokens)],
                "max_tokens": rng.randint(output_tokens, max(output_tokens, most_output_tokens)),
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            results.append(await one(host, port, json.dumps(fields).encode()))

    began = time.perf_counter()
    await asyncio.gather(*(user() for _ in range(concurrency)))
    wall_s = time.perf_counter() - began
    tokens = sum(count for _, _, count in results)
    firsts = sorted(first for first, _, _ in results)
    rests = sorted((end - first) / max(1, count - 1) for first, end, count in results)
    return {
        "wall_s": wall_s,
        "tokens": tokens,
        "tokens_per_s": tokens / wall_s,
        "ttft_p50_ms": 1000 * firsts[len(firsts) // 2],
        "ttft_p99_ms": 1000 * firsts[int(len(firsts) * 0.99)],
        "tpot_p50_ms": 1000 * rests[len(rests) // 2],
    }


if __name__ == "__main__":
    print(json.dumps(uvloop.run(load(sys.argv[1], *map(int, sys.argv[2:7])))))
