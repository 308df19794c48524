"""What a client or a watcher learns of another client's prompts, with real processes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support import load
from tests.support.command import paceline
from tests.support.stack import Stack

BLOCK_SIZE = 16
SECRET = [*range(100, 150)]  # an address and a PIN
WORKERS = "paceline_scheduler_num_workers"


async def cached_tokens(http: httpx.AsyncClient, prompt: list[int], **fields: Any) -> int:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


async def test_guessing_another_tenants_prompt_finds_nothing(stack: Stack) -> None:
    """Each guess begins with more of the secret. `cached_tokens` must not show this: otherwise a client could read the
    prompt token by token."""
    async with load.client(stack.url) as http:
        assert await cached_tokens(http, SECRET, tenant="victim") == 0
        for right in (1, 15, 16, 17, 33, 49):
            guess = [*SECRET[:right], 800 + right]
            # Each guess has a new tenant name: otherwise a guess would find earlier guesses.
            assert await cached_tokens(http, guess, tenant=f"attacker {right}") == 0
            assert await cached_tokens(http, guess, user=f"attacker by user {right}") == 0
            assert await cached_tokens(http, guess, tenant=f"salted {right}", cache_salt="victim") == 0
        assert await cached_tokens(http, SECRET) == 0
        assert await cached_tokens(http, SECRET, tenant="victim", cache_salt="own") == 0
        assert await cached_tokens(http, SECRET, tenant="victim") == len(SECRET) - 1
        assert await cached_tokens(http, SECRET) == len(SECRET) - 1, "requests without a tenant share their cache"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One cache for all tenants."""
    stack = Stack(tmp_path_factory.mktemp("shared"))
    stack.worker_flags = ["--threads", "1", "--block-size", str(BLOCK_SIZE)]
    stack.scheduler_flags = ["--cache-scope", "server"]
    try:
        yield stack.up()
    finally:
        stack.down()


async def test_with_one_cache_for_all_tenants_cached_tokens_count_whole_blocks(shared: Stack) -> None:
    async with load.client(shared.url) as http:
        assert await cached_tokens(http, SECRET, tenant="victim") == 0
        for right in (15, 17, 33, 47):
            found = await cached_tokens(http, [*SECRET[:right], 800 + right], tenant=f"other {right}")
            assert found == right // BLOCK_SIZE * BLOCK_SIZE
    refused = paceline(shared, "cache", "reset", "--tenant", "victim")
    assert refused.returncode == 2
    assert "tenant: all tenants share one cache namespace here (--cache-scope server)" in refused.stderr


def events_until_complete(stack: Stack) -> list[dict[str, Any]]:
    """The snapshot that `paceline cache events` begins with."""
    command = [sys.executable, "-m", "services.cli", "cache", "events", "--cache", f"127.0.0.1:{stack.cache_port}"]
    events: list[dict[str, Any]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            events.append(json.loads(line))
            if events[-1].get("complete"):
                break
        process.kill()
    return events


async def test_cache_events_show_no_tokens_and_an_operator_can_reset_one_tenant(stack: Stack) -> None:
    prompt = [*range(300, 340)]
    async with load.client(stack.url) as http:
        for tenant in ("first", "second"):
            await cached_tokens(http, prompt, tenant=tenant)
        events = await asyncio.to_thread(events_until_complete, stack)
        stored = [event for event in events if event["event"] == "stored"]
        assert stored
        assert not [event for event in stored if "token_ids" in event]
        assert all(event["block_size"] > 0 for event in stored)
        done = await asyncio.to_thread(
            paceline, stack, "cache", "reset", "--tenant", "first", "--cache", f"127.0.0.1:{stack.cache_port}"
        )
        assert done.returncode == 0, done.stderr
        assert await cached_tokens(http, prompt, tenant="first") == 0
        assert await cached_tokens(http, prompt, tenant="second") == len(prompt) - 1


async def test_a_restarted_scheduler_finds_the_kv_that_a_worker_kept_for_a_tenant(own_stack: Stack) -> None:
    """The worker knows only the name of the cache namespace. The next scheduler makes the same name."""
    own_stack.up()
    hits = "paceline_cache_prefix_hit_tokens_total"
    wanted = load.Wanted([*range(100, 200)], 400)
    async with load.client(own_stack.url) as http:
        undisturbed = await load.stream(http, wanted, cache_salt="first")
        stream = asyncio.create_task(load.stream(http, wanted, tenant="acme", cache_salt="pepper"))
        running = "paceline_scheduler_num_requests_running"
        await asyncio.to_thread(own_stack.wait_metric, running, 1)
        before = own_stack.metric(hits, "cache")
        await asyncio.to_thread(own_stack.kill, "scheduler")
        own_stack.start("scheduler")
        got = await stream
    assert not got.errors
    assert got.text == undisturbed.text
    assert before == 0
    assert (own_stack.metric(hits, "cache") or 0) >= len(wanted.prompt) - 1
