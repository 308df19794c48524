"""A gateway over loopback in front of a fake scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from paceline.v1 import common_pb2
from services.gateway.server import serve
from services.gateway.settings import GatewaySettings
from services.runtime.service import Addresses
from tests.contract.gateway.fake_scheduler import FakeScheduler, hash_token

MODEL = "paceline-demo"
MODEL_INFO = common_pb2.ModelInfo(name="demo", vocab_size=1024, max_model_len=2048, eos_token_ids=[5, 1])


@dataclass
class Running:
    """A running pair. `openai` is the official client and accepts no answer that is not exactly as it must be.

    `lenient` is for streamed text completions: OpenAI's types describe their chunks as whole answers, whose
    `finish_reason` is never null, and no server (OpenAI's own neither) can tell a reason before the end.
    """

    scheduler: FakeScheduler
    addresses: Addresses
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI
    lenient: openai.AsyncOpenAI
    stop: asyncio.Event
    task: asyncio.Task[None]

    async def until_ready(self, status: int = 200) -> None:
        async with asyncio.timeout(10):
            while (await self.http.get("/ready")).status_code != status:  # noqa: ASYNC110 - another process's state, in effect
                await asyncio.sleep(0.01)


Start = Callable[..., Awaitable[Running]]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, 5 s at the most."""
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - any condition
            await asyncio.sleep(0.002)


async def _start(scheduler: FakeScheduler, scheduler_up: bool, settings: dict[str, Any]) -> Running:
    await scheduler.start()
    if not scheduler_up:
        await scheduler.stop()
    stop = asyncio.Event()
    ready: asyncio.Future[Addresses] = asyncio.get_running_loop().create_future()
    options = {"port": 0, "grpc_port": 0, "scheduler": scheduler.target, "drain_s": 5.0, **settings}
    task = asyncio.create_task(serve(GatewaySettings(**options), stop, on_ready=ready.set_result))
    await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await scheduler.stop()
        task.result()
    base_url = f"http://{ready.result().http}"
    client_options: dict[str, Any] = {
        "base_url": base_url + "/v1",
        "api_key": "none",
        "max_retries": 0,
        "timeout": 20,
    }
    running = Running(
        scheduler,
        ready.result(),
        httpx.AsyncClient(base_url=base_url, timeout=20),
        openai.AsyncOpenAI(_strict_response_validation=True, **client_options),
        openai.AsyncOpenAI(**client_options),
        stop,
        task,
    )
    if scheduler_up:
        await running.until_ready()
    return running


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts gateways; `settings` go to GatewaySettings, the rest to FakeScheduler."""
    started: list[Running] = []

    async def start_one(
        *, settings: dict[str, Any] | None = None, scheduler_up: bool = True, **scheduler: Any
    ) -> Running:
        fake = FakeScheduler(**{"next_token": hash_token(6, 1000), "model": MODEL_INFO, **scheduler})
        running = await _start(fake, scheduler_up, settings or {})
        started.append(running)
        return running

    yield start_one
    for running in started:
        await running.http.aclose()
        await running.openai.close()
        await running.lenient.close()
        running.stop.set()
        await running.scheduler.stop()
        async with asyncio.timeout(15):
            await running.task


@pytest.fixture
async def running(start: Start) -> Running:
    """One gateway with defaults."""
    return await start()
