"""What waits inside a gateway, behind its front doors, has bounds too."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from services.client import AsyncPacelineClient
from services.client.types import PacelineError
from services.gateway.tokenizer import TextTokenizer
from tests.contract.gateway.conftest import Running, Start, eventually, until

LONG = "x" * 5_000  # beyond what is tokenised on the event loop
MAX_TOKENS = 5


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A tokeniser that takes as long as a test wants for a long text."""
    go_on = threading.Event()

    def encode(self: TextTokenizer, text: str, **options: Any) -> list[int]:
        if len(text) >= len(LONG):
            go_on.wait(20)
        return [7, 8, 9]

    monkeypatch.setattr(TextTokenizer, "encode", encode)
    yield go_on
    go_on.set()


def post(running: Running, prompt: str) -> asyncio.Task[int]:
    async def status() -> int:
        body = {"prompt": prompt, "max_tokens": MAX_TOKENS}
        return (await running.http.post("/v1/completions", json=body)).status_code

    return asyncio.create_task(status())


async def generate(client: AsyncPacelineClient, prompt: str) -> grpc.StatusCode:
    try:
        await client.generate(prompt, max_tokens=MAX_TOKENS)
    except PacelineError as error:
        return error.code
    return grpc.StatusCode.OK


async def until_served(running: Running, prompt: str) -> None:
    async def served() -> bool:
        return await post(running, prompt) == 200

    await eventually(served)


async def test_texts_that_wait_to_be_tokenised_count_as_the_bodies_that_they_came_in(
    start: Start, stuck: threading.Event
) -> None:
    running = await start(settings={"max_bodies_bytes": 5 * len(LONG)})
    tasks = [post(running, LONG) for _ in range(12)]
    await until(lambda: sum(task.done() for task in tasks) >= 8)
    assert await post(running, "short") == 200
    stuck.set()
    assert sorted(await asyncio.gather(*tasks)) == [200] * 4 + [429] * 8
    await until_served(running, 4 * LONG)  # all of it was given back


async def test_grpc_messages_count_too(start: Start, stuck: threading.Event) -> None:
    running = await start(settings={"max_bodies_bytes": 5 * len(LONG)})
    async with AsyncPacelineClient(running.addresses.grpc or "") as client:
        tasks = [asyncio.create_task(generate(client, LONG)) for _ in range(12)]
        await until(lambda: sum(task.done() for task in tasks) >= 8)
        assert await post(running, LONG) == 429
        waiting = [task for task in tasks if not task.done()]
        assert [task.result() for task in tasks if task.done()] == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 8
        for task in waiting[:3]:
            task.cancel()
        await until(lambda: all(task.done() for task in waiting[:3]))
        stuck.set()
        assert await waiting[3] == grpc.StatusCode.OK
        await until_served(running, 4 * LONG)


async def test_a_text_that_turns_out_to_be_too_long_gives_back_its_share(start: Start) -> None:
    running = await start(settings={"max_bodies_bytes": 5 * len(LONG)})
    for _ in range(3):
        assert await post(running, 2 * "x " * len(LONG)) == 400
