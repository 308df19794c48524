"""Stored responses that are long, cancelled while they grow, or left in the wrong moment."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from services.gateway.access.caller import ANYONE
from services.gateway.errors import ApiError
from services.gateway.responses_api import creation, history, long_work, records, routes, service
from services.gateway.responses_api.pieces import Outcome, OutputPiece
from services.gateway.responses_api.running import RunningResponse
from services.gateway.responses_api.service import Responses
from services.gateway.store.records import StoredResponse
from services.gateway.store.sqlite_file import SqliteFile
from services.gateway.store.sqlite_store import SqliteStore
from tests.contract.gateway.conftest import MODEL, Running, Start, until
from tests.contract.gateway.test_responses import PATH, create, done

REQUEST = orjson.dumps({"id": "resp_1", "object": "response", "model": MODEL, "previous_response_id": None}) + b"\n[]"
ONE = StoredResponse("", "resp_1", MODEL, 1700000000, True, b"f", REQUEST, b"{}")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "responses.db"


@pytest.fixture
def stored(file: Path) -> dict[str, Any]:
    return {"response_store": f"sqlite:///{file}"}


async def keep(file: Path, *responses: StoredResponse) -> None:
    opened = SqliteFile(file)
    store = SqliteStore(opened, ttl_s=1e6, max_bytes=2**30)
    for response in responses:
        assert await store.put(response, 0.0)
    await opened.close()


def stuck(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, go_on: threading.Event) -> list[str]:
    """Let the function take as long as a test wants. Returns the names of its calls."""
    original, calls = getattr(module, name), []

    def slow(*args: Any) -> Any:
        calls.append(name)
        go_on.wait(20)
        return original(*args)

    monkeypatch.setattr(module, name, slow)
    return calls


async def test_other_requests_are_served_while_a_long_response_is_decoded(
    start: Start, stored: dict[str, Any], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = [OutputPiece("text", f" word{number}") for number in range(20_000)]
    result = records.dump_result(pieces, Outcome("completed", {}))
    await keep(file, StoredResponse("", "resp_1", MODEL, 1700000000, True, b"f", REQUEST, b"", "completed", result))
    running = await start(settings=stored)
    for module, name, path, body in (
        (routes, "ended_response", f"{PATH}/resp_1", None),
        (service, "load_result", f"{PATH}/resp_1?stream=true", None),
        (history, "_turn", PATH, {"input": "x", "previous_response_id": "resp_1", "max_output_tokens": 1}),
    ):
        go_on = threading.Event()
        with monkeypatch.context() as patched:
            calls = stuck(patched, module, name, go_on)
            method = "GET" if body is None else "POST"
            asked = asyncio.create_task(running.http.request(method, path, json=body))
            await until(lambda calls=calls: bool(calls))  # type: ignore[misc]
            assert (await running.http.get("/health")).status_code == 200
            assert not asked.done()
            go_on.set()
            answer = await asked
        if body is None:
            assert answer.status_code == 200
            assert "word19999" in answer.text
        else:
            assert answer.status_code == 400, "it is longer than the model's context"


async def test_other_requests_are_served_while_a_long_answer_is_written(
    start: Start, stored: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_work, "_SHORT_PIECES", 16)
    go_on = threading.Event()
    calls = stuck(monkeypatch, service, "dump_result", go_on)
    running = await start(settings=stored)
    asked = asyncio.create_task(create(running, max_output_tokens=200))
    await until(lambda: bool(calls))
    assert (await running.http.get("/health")).status_code == 200
    go_on.set()
    assert (await asked).usage.output_tokens == 200


async def test_log_probabilities_of_a_stored_response_have_a_limit(
    start: Start, stored: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(creation, "MAX_STORED_LOGPROBS", 100)
    running = await start(settings=stored)

    async def status(**body: Any) -> tuple[int, str]:
        asked = {"input": "x", "include": ["message.output_text.logprobs"]} | body
        answer = await running.http.post(PATH, json=asked)
        return answer.status_code, answer.text

    assert (await status(top_logprobs=4, max_output_tokens=20))[0] == 200
    code, said = await status(top_logprobs=4, max_output_tokens=21)
    assert (code, "21 tokens with 5 log probabilities each are 105" in said) == (400, True)
    assert (await status())[0] == 400, "the whole context"
    assert (await status(top_logprobs=4, max_output_tokens=21, store=False))[0] == 200
    assert (await running.http.post(PATH, json={"input": "x", "max_output_tokens": 101})).status_code == 200


async def test_a_cancelled_response_is_stored_with_all_that_its_stream_showed(
    start: Start, stored: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens go on coming while the store writes."""
    finish = SqliteStore.finish

    async def slow(self: SqliteStore, *args: Any) -> bool:
        await asyncio.sleep(0.3)
        return await finish(self, *args)

    monkeypatch.setattr(SqliteStore, "finish", slow)
    running = await start(settings=stored, step_s=0.005)
    stream = await create(running, background=True, stream=True, max_output_tokens=1000)
    events = [await anext(stream) for _ in range(8)]
    cancelled = await running.openai.responses.cancel(events[0].response.id)
    events += [event async for event in stream]
    shown = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert shown
    assert cancelled.output_text == shown == events[-1].response.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_a_cancel_that_the_store_refuses_changes_nothing(
    start: Start, stored: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start(settings=stored, step_s=0.005)
    response = await create(running, background=True, max_output_tokens=100)
    with monkeypatch.context() as patched:

        async def fails(*_: Any) -> bool:
            raise ApiError(503, "no")

        patched.setattr(SqliteStore, "finish", fails)
        assert (await running.http.post(f"{PATH}/{response.id}/cancel")).status_code == 503
    assert (await done(running, response.id)).usage.output_tokens == 100


async def test_a_response_is_released_though_its_task_is_cancelled_twice(file: Path) -> None:
    """For example, the grace period and the end of the gateway both cancel it."""
    asked, go_on = asyncio.Event(), asyncio.Event()

    class Slow(SqliteStore):
        async def get(self, owner: str, response_id: str) -> StoredResponse | None:
            asked.set()
            await go_on.wait()
            return await super().get(owner, response_id)

    async def never(_: int) -> str:
        await asyncio.Event().wait()
        return ""

    opened = SqliteFile(file)
    store = Slow(opened, ttl_s=100, max_bytes=2**20)
    generation = SimpleNamespace(job=SimpleNamespace(reply=None, logprobs=False), next=never)
    reading = SimpleNamespace(generations=[generation], close=lambda: None)
    responses = Responses(cast(Any, SimpleNamespace(open=lambda *_: reading)), store)
    response = RunningResponse(ONE.name, {}, is_stored=True)
    assert await responses.begin(response, [], ANYONE, ONE)
    await asyncio.sleep(0)
    assert response.task is not None
    response.abandon()
    await asked.wait()
    response.abandon()
    await asyncio.sleep(0.05)
    go_on.set()
    await asyncio.wait([response.task])
    assert response.is_over
    assert await store.abandoned(8) == [ONE.name], "another gateway may go on at once"
    await opened.close()


async def test_responses_of_other_models_are_not_read(
    start: Start, stored: dict[str, Any], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [StoredResponse("", f"resp_{i}", "other", 1700000000, True, b"f", REQUEST, b"{}") for i in range(5)]
    await keep(file, *others)
    looked: list[str] = []
    monkeypatch.setattr(SqliteStore, "get", partial(_no_read, looked.append))
    model_of = SqliteStore.model_of

    async def noted(self: SqliteStore, owner: str, response_id: str) -> str | None:
        looked.append(response_id)
        return await model_of(self, owner, response_id)

    monkeypatch.setattr(SqliteStore, "model_of", noted)
    await start(settings=stored)
    await until(lambda: len(looked) >= 10)
    assert not [name for name in looked if name.startswith("read")]


async def _no_read(note: Callable[[str], None], *_: Any) -> None:
    note("read")


async def test_an_error_event_has_no_smaller_number_than_the_client_has_seen(
    start: Start, stored: dict[str, Any]
) -> None:
    """With a smaller number, a client that goes on after that number would get events twice."""
    first = await start(settings=stored | {"drain_s": 0.0}, step_s=0.005)
    second = await start(settings=stored | {"drain_s": 0.0}, step_s=0.005)
    stream = await create(first, background=True, stream=True, max_output_tokens=1000)
    response_id = (await anext(stream)).response.id
    seen = [(await anext(stream)).sequence_number for _ in range(40)][-1]
    second.scheduler.paused = True
    rest: asyncio.Task[list[Any]] = asyncio.create_task(_read(second, response_id, seen))
    await until(lambda: second.scheduler.num_running == 1)
    second.stop.set()
    events = await rest
    assert (events[-1].type, events[-1].sequence_number) == ("error", seen)
    await stream.close()


async def _read(running: Running, response_id: str, after: int) -> list[Any]:
    stream = await running.openai.responses.retrieve(response_id, stream=True, starting_after=after)
    return [event async for event in stream]
