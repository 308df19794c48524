"""Overload and hostile clients: other clients get their tokens, and no request or block is left.

These tests assert no time. `python -m bench.run --part overload` measures how fast the server answers under overload.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import Any

import httpx
import psutil

from tests.support import load
from tests.support.stack import Stack

VOCAB = 1000
GROWTH_BYTES = 64 * 2**20  # limit for each service; measured growth: a few MiB


def resident(stack: Stack) -> dict[str, int]:
    return {name: psutil.Process(process.pid).memory_info().rss for name, process in stack.processes.items()}


async def check_at_rest(stack: Stack, before: dict[str, int]) -> None:
    """Nothing runs, no block is used, and no service has grown by much."""
    await asyncio.to_thread(stack.wait_metric, "paceline_scheduler_num_requests_running", 0)
    await asyncio.to_thread(stack.wait_metric, "paceline_scheduler_kv_cache_usage_ratio", 0)
    await asyncio.to_thread(stack.wait_metric, 'paceline_cache_blocks{state="used",worker="1"}', 0, of="cache")
    grown = {name: size - before[name] for name, size in resident(stack).items()}
    assert max(grown.values()) < GROWTH_BYTES, grown


async def test_at_ten_times_the_capacity_each_request_gets_its_tokens_or_a_429(own_stack: Stack) -> None:
    """Two slots and a queue of four. A refused request is told when to come back; an admitted one gets its tokens."""
    own_stack.scheduler_flags = ["--max-queued-requests", "4"]
    own_stack.worker_flags = ["--max-num-seqs", "2", "--threads", "1"]
    stack = await asyncio.to_thread(own_stack.up)
    prompts = load.random_prompts(6, 3, VOCAB, longest=30)
    asked: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "temperature": 0}
    async with load.client(stack.url) as http:

        async def post(prompt: list[int]) -> httpx.Response:
            return await http.post("/v1/completions", json=asked | {"prompt": prompt})

        right = [(await post(prompt)).json()["choices"] for prompt in prompts]
        before, served = resident(stack), 0
        for _ in range(3):
            answers = await asyncio.gather(*(post(prompts[i % 6]) for i in range(60)))
            refused = [answer for answer in answers if answer.status_code == 429]
            assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
            assert {answer.json()["error"]["reason"] for answer in refused} == {"rate_limit_exceeded"}
            for i, answer in enumerate(answers):
                assert answer.status_code in (200, 429), answer.text
                if answer.status_code == 200:
                    assert answer.json()["choices"] == right[i % 6]
                    served += 1
            assert (await http.get("/health")).status_code == 200
            assert (await http.get("/ready")).status_code == 200
    assert served >= 3 * 4, "a full queue each time"
    await check_at_rest(stack, before)


async def test_clients_that_obey_retry_after_are_served(own_stack: Stack) -> None:
    """Forty requests at once, for two slots and a queue of four. Each client waits for its retry-after time."""
    own_stack.scheduler_flags = ["--max-queued-requests", "4"]
    own_stack.worker_flags = ["--max-num-seqs", "2", "--threads", "1"]
    stack = await asyncio.to_thread(own_stack.up)
    prompts = load.random_prompts(40, 5, VOCAB, longest=30)
    asked: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "temperature": 0}
    refusals = 0
    async with load.client(stack.url) as http:

        async def until_served(prompt: list[int]) -> Any:
            nonlocal refusals
            while True:
                answer = await http.post("/v1/completions", json=asked | {"prompt": prompt})
                if answer.status_code == 200:
                    return answer.json()["choices"]
                assert answer.status_code == 429
                refusals += 1
                await asyncio.sleep(int(answer.headers["retry-after"]))

        right = [await until_served(prompt) for prompt in prompts]  # one after the other
        assert not refusals
        before = resident(stack)
        assert await asyncio.gather(*map(until_served, prompts)) == right
    assert refusals, "some requests must be refused"
    await check_at_rest(stack, before)


def connection(stack: Stack, data: bytes = b"") -> socket.socket:
    """A connection that has sent `data` and reads nothing."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", stack.http_port))
    sock.sendall(data)
    return sock


def stream_request(**options: object) -> bytes:
    body = json.dumps({"prompt": [5, 6], "ignore_eos": True, "stream": True} | options).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


async def test_hostile_clients_disturb_no_other_client(stack: Stack) -> None:
    """Clients that read nothing, never end a head, send no request, or disconnect at once."""
    wanted = [load.Wanted(prompt, 60) for prompt in load.random_prompts(12, 9, VOCAB)]
    right = await load.stream_all(stack.url, wanted)
    before = resident(stack)
    # Each stream has a few MB of events. The sockets hold only a part of them.
    stalled = [connection(stack, stream_request(max_tokens=1000, logprobs=20)) for _ in range(6)]
    slow = [connection(stack, b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-slow: ") for _ in range(100)]
    idle = [connection(stack) for _ in range(400)]
    async with load.client(stack.url) as http:
        for _ in range(3):
            serving = asyncio.create_task(load.stream_all(stack.url, wanted))
            for i in range(1000):
                connection(stack, stream_request(max_tokens=500)).close()
                if i % 10 == 0:
                    await asyncio.sleep(0)
            for sock in slow:
                with contextlib.suppress(ConnectionError):  # the gateway cuts a client that is too slow with its head
                    sock.sendall(b"a")
            for one, got in zip(right, await serving, strict=True):
                assert not got.errors
                assert got.text == one.text
            assert (await http.get("/health")).status_code == 200
    for sock in [*stalled, *slow, *idle]:
        sock.close()
    await check_at_rest(stack, before)
