"""A gateway over loopback in front of a fake scheduler: one for the tests of a module, or one of a test's own.

All tests of a module run in one event loop, as the gateway that they share does.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
import structlog
from openai import AsyncOpenAI

from paceline.v1 import common_pb2
from services.gateway.http import server as http_server
from services.gateway.server import serve
from services.gateway.settings import GatewaySettings
from services.runtime.logs import configure_logging
from services.runtime.service import Addresses
from tests.contract.gateway.fake_scheduler import FakeScheduler, hash_token

MODEL = "paceline-demo"
MODEL_INFO = common_pb2.ModelInfo(name="demo", vocab_size=1024, max_model_len=2048, eos_token_ids=[5, 1])


@dataclass
class Running:
    """A running pair. `openai` is the official client and rejects every answer that breaks OpenAI's types.

    `lenient` is for streamed text completions. OpenAI's types require a `finish_reason` in each of their chunks, but no
    server, OpenAI's own included, knows the reason before the last chunk.
    """

    scheduler: FakeScheduler
    addresses: Addresses
    http: httpx.AsyncClient
    openai: AsyncOpenAI
    lenient: AsyncOpenAI
    stop: asyncio.Event
    task: asyncio.Task[None]

    async def until_ready(self, status: int = 200) -> None:
        async with asyncio.timeout(30):
            while (await self.http.get("/ready")).status_code != status:  # noqa: ASYNC110 - another process's state, in effect
                await asyncio.sleep(0.01)


Start = Callable[..., Awaitable[Running]]


Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines() -> Iterator[Lines]:
    """A function that returns the log lines about finished and refused requests so far."""
    root = logging.getLogger()
    before, written = (root.handlers, root.level), io.StringIO()
    configure_logging("gateway", "info", "json", stream=written)

    def read() -> list[dict[str, Any]]:
        told = [json.loads(line) for line in written.getvalue().splitlines()]
        return [line for line in told if line["message"].startswith("request ")]

    yield read
    structlog.reset_defaults()
    root.handlers, level = before
    root.setLevel(level)
    logging.captureWarnings(False)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, 20 s at the most."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - any condition
            await asyncio.sleep(0.002)


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Waits for a condition that is a coroutine, 20 s at the most."""
    async with asyncio.timeout(20):
        while not await condition():  # noqa: ASYNC110 - any condition
            await asyncio.sleep(0.005)


async def until_metrics(running: Running, *lines: str) -> None:
    """Waits until /metrics has all lines, compared without the label model_name (test_metrics.py tests it). A client
    may get its answer before the answer is counted."""

    async def there() -> bool:
        text = re.sub(
            r',model_name="[^"]*"|model_name="[^"]*",?', "", (await running.http.get("/metrics")).text
        ).replace("{}", "")
        return all(line in text for line in lines)

    await eventually(there)


def _scheduler(**options: Any) -> FakeScheduler:
    return FakeScheduler(**{"next_token": hash_token(6, 1000), "model": MODEL_INFO, **options})


async def _start(scheduler: FakeScheduler, scheduler_up: bool, settings: dict[str, Any]) -> Running:
    await scheduler.start()
    if not scheduler_up:
        await scheduler.stop()
    stop = asyncio.Event()
    ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    options = {"port": 0, "grpc_port": 0, "scheduler": scheduler.target, "drain_s": 15.0, **settings}
    task = asyncio.create_task(serve(GatewaySettings(**options), stop, on_ready=ready.set_result))
    await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await scheduler.stop()
        task.result()
    base_url = f"http://{ready.result().http}"
    client_options: dict[str, Any] = {"base_url": base_url + "/v1", "api_key": "none", "max_retries": 0, "timeout": 20}
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)


async def _end(running: Running) -> None:
    await running.http.aclose()
    await running.openai.close()
    await running.lenient.close()
    running.stop.set()
    await running.scheduler.stop()
    async with asyncio.timeout(30):
        await running.task


@pytest_asyncio.fixture(loop_scope="module")
async def start() -> AsyncIterator[Start]:
    """Starts gateways of the test's own; `settings` go to GatewaySettings, the rest to FakeScheduler."""
    started: list[Running] = []

    async def start_one(
        *, settings: dict[str, Any] | None = None, scheduler_up: bool = True, **scheduler: Any
    ) -> Running:
        running = await _start(_scheduler(**scheduler), scheduler_up, settings or {})
        started.append(running)
        return running

    yield start_one
    for running in started:
        await _end(running)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def _shared() -> AsyncIterator[Running]:
    running = await _start(_scheduler(), True, {})
    yield running
    await _end(running)


@pytest_asyncio.fixture(loop_scope="module")
async def running(_shared: Running) -> Running:
    """The module's gateway, with defaults, for tests that neither change it nor count the requests of other tests."""
    await until(lambda: _shared.scheduler.num_running == 0)  # requests of the previous test may still be ending
    _shared.scheduler.submissions.clear()
    return _shared


@pytest.fixture
def small_send_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the kernel's send buffers tiny, so that answers wait in the gateway."""
    bind = http_server._bind

    def small(host: str, port: int) -> socket.socket:
        sock = bind(host, port)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return sock

    monkeypatch.setattr(http_server, "_bind", small)


async def statuses_at_once(running: Running, path: str, number: int) -> list[int]:
    """The statuses of GET requests that arrive in one turn of the gateway's event loop, each on its own connection."""
    assert running.addresses.http is not None
    host, port = running.addresses.http.split(":")
    streams = [await asyncio.open_connection(host, int(port)) for _ in range(number)]
    for _, writer in streams:
        writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    statuses = [int((await reader.readline()).split()[1]) for reader, _ in streams]
    for _, writer in streams:
        writer.close()
    return statuses
