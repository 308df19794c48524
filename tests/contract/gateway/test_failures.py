"""A gateway ends when its own parts fail, so that its supervisor starts it again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from paceline.v1 import inference_pb2
from services.gateway.engine.request_store import RequestStore
from services.gateway.engine.session_core import SessionCore
from tests.contract.gateway.conftest import Running, Start, until

BODY = {"prompt": "one two three", "max_tokens": 5, "ignore_eos": True, "seed": 1}


class BugError(Exception):
    """An error that no code handles."""


def fail(*_: Any, **__: Any) -> Any:
    raise BugError


async def failed(running: Running) -> BaseException | None:
    """The error with which the gateway ended."""
    async with asyncio.timeout(20):
        with pytest.raises(RuntimeError) as caught:
            await running.task
    running.task = asyncio.create_task(asyncio.sleep(0))  # for the fixture
    return caught.value.__cause__


@pytest.mark.parametrize(("owner", "name"), [(SessionCore, "tick"), (SessionCore, "receive"), (RequestStore, "tick")])
async def test_a_gateway_ends_when_a_task_of_its_own_has_failed(
    start: Start, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    running = await start()
    running.scheduler.paused = True
    waiting = asyncio.create_task(running.http.post("/v1/completions", json=BODY))
    await until(lambda: running.scheduler.num_running == 1)
    monkeypatch.setattr(owner, name, fail)
    running.scheduler.paused = False
    assert isinstance(await failed(running), BugError)
    assert (await waiting).status_code in (200, 503)


async def test_a_gateway_ends_when_it_cannot_write_to_its_scheduler(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    running = await start()
    monkeypatch.setattr(SessionCore, "take_request", fail)
    assert await failed(running) is None  # gRPC swallows what its iterators raise
    assert "BugError" in capsys.readouterr().out


async def test_a_gateway_that_drains_ends_when_its_link_has_failed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start()
    running.scheduler.paused = True
    waiting = asyncio.create_task(running.http.post("/v1/completions", json=BODY))
    await until(lambda: running.scheduler.num_running == 1)
    running.stop.set()
    monkeypatch.setattr(SessionCore, "tick", fail)
    assert isinstance(await failed(running), BugError)
    assert (await waiting).status_code == 503


async def test_after_a_malformed_message_a_gateway_connects_anew(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    running = await start()
    running.scheduler.paused = True
    waiting = asyncio.create_task(running.http.post("/v1/completions", json=BODY))
    await until(lambda: running.scheduler.num_running == 1)
    step = running.scheduler._step

    def malformed(stream: Any, handles: list[int], tokens: list[int]) -> None:
        monkeypatch.setattr(running.scheduler, "_step", step)
        step(stream, handles, tokens)
        stream.scores.append(inference_pb2.TokenScore(handle=handles[0], top_token_ids=b"123"))

    monkeypatch.setattr(running.scheduler, "_step", malformed)
    running.scheduler.paused = False
    response = await waiting
    undisturbed = await running.http.post("/v1/completions", json=BODY)
    assert response.json()["choices"] == undisturbed.json()["choices"]
    assert len(running.scheduler.streams) == 2
