"""A server without workers: requests wait until the limit, and then fail with 503."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from services.client import AsyncPacelineClient, Unavailable
from tests.support.stack import Stack

PROMPT = {"prompt": "Once", "max_tokens": 4, "temperature": 0}
# Without max_tokens the gateway has to know what the worker's model can hold, before it submits anything.
CHAT = {"messages": [{"role": "user", "content": "Once"}]}


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path, scheduler_flags=["--no-worker-timeout-s", "2"])
    try:
        for name in ("cache", "scheduler", "gateway"):
            stack.start(name)
        stack.wait_metric("paceline_scheduler_num_workers", 0)
        stack._wait(lambda: stack._get(f"{stack.url}/health")[0] == 200, "/health")
        yield stack
    finally:
        stack.down()


async def test_without_a_worker_requests_fail_after_the_limit(stack: Stack) -> None:
    async with httpx.AsyncClient(base_url=stack.url, timeout=60, trust_env=False) as http:
        answers = await asyncio.gather(
            http.post("/v1/completions", json=PROMPT),
            http.post("/v1/completions", json={**PROMPT, "stream": True}),
            http.post("/v1/chat/completions", json=CHAT),
        )
    for answer in (answers[0], answers[2]):
        assert answer.status_code == 503, answer.text
        assert answer.json()["error"]["message"] == "no worker takes requests: waited 2 s for one"
        assert int(answer.headers["retry-after"]) > 0
    assert "no worker takes requests: waited 2 s for one" in answers[1].text
    for target in (f"127.0.0.1:{stack.grpc_port}", stack.scheduler):  # the gateway, and the scheduler itself
        async with AsyncPacelineClient(target, retry_for_s=0) as client:
            with pytest.raises(Unavailable, match="no worker takes requests"):
                await client.generate(token_ids=[9, 10], max_tokens=4)


async def test_a_worker_that_comes_in_time_serves_the_waiting_requests(tmp_path: Path) -> None:
    """At the default limit."""
    stack = Stack(tmp_path)
    try:
        stack.up()
        async with httpx.AsyncClient(base_url=stack.url, timeout=60, trust_env=False) as http:
            right = (await http.post("/v1/completions", json=PROMPT)).json()["choices"][0]["text"]
            stack.kill("worker-1")
            stack.wait_metric("paceline_scheduler_num_workers", 0)
            asking = asyncio.create_task(http.post("/v1/completions", json=PROMPT))
            await asyncio.to_thread(stack.start, "worker-1")
            assert (await asking).json()["choices"][0]["text"] == right
    finally:
        stack.down()


async def test_a_draining_worker_is_counted_and_takes_no_request(tmp_path: Path) -> None:
    stack = Stack(tmp_path, scheduler_flags=["--no-worker-timeout-s", "2"])
    try:
        stack.up()
        long = {"prompt": "Once", "max_tokens": 1500, "temperature": 0, "ignore_eos": True, "stream": True}
        async with (
            httpx.AsyncClient(base_url=stack.url, timeout=60, trust_env=False) as http,
            http.stream("POST", "/v1/completions", json=long) as running,
        ):
            lines = running.aiter_lines()
            await anext(lines)
            stack.processes["worker-1"].send_signal(signal.SIGTERM)
            await asyncio.to_thread(stack.wait_metric, "paceline_scheduler_num_draining_workers", 1)
            refused = await http.post("/v1/completions", json=PROMPT)
            assert refused.json()["error"]["message"] == "no worker takes requests: waited 2 s for one"
            assert [line async for line in lines if line][-1] == "data: [DONE]"
        await asyncio.to_thread(stack.wait_metric, "paceline_scheduler_num_workers", 0)
        assert stack.metric("paceline_scheduler_num_draining_workers") == 0
    finally:
        stack.down()
