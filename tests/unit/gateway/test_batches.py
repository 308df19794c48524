"""Parts of batches without a server: statuses, lines of files, the throttle, the results of lines."""

from __future__ import annotations

import asyncio
import io
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from openai.types import Batch as OpenAiBatch

from services.gateway.batches.calls import LineAnswer, call_endpoint
from services.gateway.batches.files import PIECE_BYTES, FileLimits, Files, Line
from services.gateway.batches.records import ENDED, TRANSITIONS, BatchRecord, new_batch, stored_batch
from services.gateway.batches.results import BatchUsage, line_result, output_id, unrun_result
from services.gateway.batches.schema import BatchLine, BatchRequest
from services.gateway.batches.throttle import ByteLimit, LineSlots, Throttle, Turns
from services.gateway.errors import ApiError
from services.gateway.store.documents import Document, DocumentName
from services.gateway.store.sqlite_documents import SqliteDocuments
from services.gateway.store.sqlite_file import SqliteFile

REQUEST = BatchRequest(input_file_id="file-1", endpoint="/v1/completions", completion_window="24h")
NAME = DocumentName("batch", "ann", "batch_1")


def batch() -> BatchRecord:
    return new_batch(NAME, "demo", REQUEST, 1000.0, 60.0)


def test_a_batch_is_read_back_as_it_was_stored() -> None:
    moved = replace(batch().after("valid", 1001.0).after("run", 1002.0), num_bytes=7)
    assert moved.document().num_bytes == 7, "the bytes count towards the owner's limit"
    assert stored_batch(moved.document()) == moved
    shown = moved.shown()
    assert (shown["status"], shown["in_progress_at"], shown["finalizing_at"]) == ("finalizing", 1001, 1002)
    assert (shown["created_at"], shown["expires_at"]) == (1000, 1000 + 86400)
    assert shown.keys() == OpenAiBatch.model_fields.keys()
    OpenAiBatch.model_validate(shown, strict=True)


def test_every_status_leads_to_an_end_and_no_end_leads_on() -> None:
    after: dict[str, set[str]] = {}
    for (status, _), next_status in TRANSITIONS.items():
        after.setdefault(status, set()).add(next_status)
    assert not after.keys() & set(ENDED)
    reached, new = set(), {"validating"}
    while new:
        reached |= new
        new = {following for status in new for following in after.get(status, ())} - reached
    assert reached >= after.keys()
    assert all(after.get(status) for status in reached - set(ENDED))


@pytest.mark.parametrize(
    ("unrun", "end"), [("", "completed"), ("batch_expired", "expired"), ("input_file_lost", "failed")]
)
def test_the_final_status_of_a_batch_follows_from_its_lines(unrun: Any, end: str) -> None:
    ended = replace(batch(), status="finalizing", unrun=unrun).after("finish", 1005.0)
    assert ended.status == end
    assert ended.shown()[f"{end}_at"] == 1005


@pytest.mark.parametrize("size", [1, 7, 100, PIECE_BYTES])
async def test_lines_may_span_several_pieces(tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.batches.files.PIECE_BYTES", size)
    database = SqliteFile(tmp_path / "x.db")
    files = Files(SqliteDocuments(database), FileLimits())
    content = b"one\n\n  two \r\n" + b"x" * 50 + b"\n" + b"y" * 20 + b"\nlast"
    stored = await files.add("ann", "in.jsonl", io.BytesIO(content), len(content), None)
    found = [line async for line in files.lines(stored, 20)]
    assert found == [Line(1, b"one"), Line(3, b"two"), Line(4, None), Line(5, b"y" * 20), Line(6, b"last")]
    assert b"".join([piece async for piece in files.content(stored)]) == content
    await files.delete(stored)
    with pytest.raises(ApiError):
        await files.find("ann", stored.name.id)
    await database.close()


async def test_an_upload_that_is_too_large_never_counts_for_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it could end a running batch of its owner."""
    database = SqliteFile(tmp_path / "x.db")
    store = SqliteDocuments(database)
    files, put, names = Files(store, FileLimits(max_owner_bytes=10)), store.put, list[DocumentName]()

    async def noted(document: Document, **options: Any) -> bool:
        names.append(document.name)
        return await put(document, **options)

    monkeypatch.setattr(store, "put", noted)
    kept = await files.add("ann", "in.jsonl", io.BytesIO(b"x" * 6), 6, None)
    with pytest.raises(ApiError, match="10 bytes"):
        await files.add("ann", "in.jsonl", io.BytesIO(b"x" * 5), 5, None)
    assert names == [kept.name]
    await database.close()


async def test_two_writers_of_an_output_file_make_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.batches.files.PIECE_BYTES", 4)
    database = SqliteFile(tmp_path / "x.db")
    files = Files(SqliteDocuments(database), FileLimits())

    async def chunks() -> Any:
        for chunk in (b"abc", b"defghij", b"", b"k"):
            await asyncio.sleep(0)
            yield chunk

    await asyncio.gather(*(files.write("ann", "file-1", "out.jsonl", 60.0, chunks()) for _ in range(2)))
    stored = await files.find("ann", "file-1")
    assert (stored.num_bytes, stored.num_pieces, stored.purpose) == (11, 3, "batch_output")
    assert b"".join([piece async for piece in files.content(stored)]) == b"abcdefghijk"
    await database.close()


def test_a_line_keeps_its_body_as_it_is() -> None:
    body = {"model": "m", "prompt": "é", "n": 3}
    line = BatchLine.from_body({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}, 100)
    assert orjson.loads(line.request) == body
    assert line.body == {"model": "m"}


def test_results_have_openais_shape() -> None:
    served = line_result("batch_1", 3, 'a"b', "batch_1-3", LineAnswer(200, b'{"x":1}'))
    assert json.loads(served.data) == {
        "id": json.loads(served.data)["id"],
        "custom_id": 'a"b',
        "response": {"status_code": 200, "request_id": "batch_1-3", "body": {"x": 1}},
        "error": None,
    }
    failed = line_result("batch_1", 4, "c", "batch_1-4", LineAnswer(400, b"{}"))
    unrun = unrun_result("batch_1", 5, "d", "batch_expired")
    told = json.loads(unrun.data)
    assert (told["response"], told["error"]["code"]) == (None, "batch_expired")
    assert [piece.mark for piece in (served, failed, unrun)] == [0, 1, 1]
    assert all(piece.data.endswith(b"\n") and piece.data.count(b"\n") == 1 for piece in (served, failed, unrun))
    ids = {json.loads(piece.data)["id"] for piece in (served, failed, unrun)}
    assert len(ids) == 3
    assert len({output_id(batch(), mark) for mark in (0, 1)}) == 2


def test_usage_adds_up_the_fields_of_all_endpoints() -> None:
    usage = BatchUsage()
    chat = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}
    response = {"input_tokens": 7, "output_tokens": 4, "output_tokens_details": {"reasoning_tokens": 1}}
    embedding = {"prompt_tokens": 9, "total_tokens": 9}
    usage.add([orjson.dumps({"response": {"body": {"usage": one}}}) for one in (chat, response, embedding, None)])
    shown = usage.shown()
    assert (shown["input_tokens"], shown["output_tokens"], shown["total_tokens"]) == (21, 6, 27)
    assert shown["input_tokens_details"] == {"cached_tokens": 3}
    assert shown["output_tokens_details"] == {"reasoning_tokens": 1}


async def test_the_throttle_halves_at_a_refusal_and_grows_with_success() -> None:
    throttle = Throttle(8)
    for _ in range(3):
        throttle.refused(None)  # in one pause: they count as one
    assert throttle.limit == 4
    for _ in range(4):
        throttle.served()
    assert 4.9 < throttle.limit < 5.1
    for _ in range(1000):
        throttle.served()
    assert throttle.limit == 8


async def test_the_throttle_lets_in_as_many_as_its_limit() -> None:
    throttle, most = Throttle(3), 0

    async def run() -> None:
        nonlocal most
        async with throttle.entering():
            most = max(most, throttle.num_running)
            await asyncio.sleep(0.001)

    await asyncio.gather(*(run() for _ in range(20)))
    assert most == 3
    assert throttle.num_running == 0


async def test_a_pause_ends_by_itself() -> None:
    throttle = Throttle(2)
    throttle.refused(0.0)
    async with asyncio.timeout(10), throttle.entering():
        assert throttle.num_running == 1


async def test_the_owners_of_waiting_lines_get_slots_in_turn() -> None:
    slots, served = LineSlots(1), list[str]()

    async def run(owner: str) -> None:
        async with slots.entering(owner):
            served.append(owner)
            await asyncio.sleep(0)

    await asyncio.gather(*(run(owner) for owner in "aaaaabbc"))
    assert "".join(served) == "aabcabaa"


async def test_a_cancelled_line_passes_its_slot_on() -> None:
    slots, most, num_running = LineSlots(2), 0, 0

    async def run(owner: str) -> None:
        nonlocal most, num_running
        async with slots.entering(owner):
            num_running += 1
            most = max(most, num_running)
            try:
                await asyncio.sleep(0)
            finally:
                num_running -= 1

    draw = random.Random(7)
    for _ in range(50):
        tasks = [asyncio.create_task(run(draw.choice("abc"))) for _ in range(12)]
        for _ in range(6):
            await asyncio.sleep(0)
            draw.choice(tasks).cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert most == 2
    async with asyncio.timeout(5), slots.entering("a"), slots.entering("b"):
        assert num_running == 0, "both slots are free again"


@pytest.mark.parametrize(("num_lines", "num_bytes", "num_turns"), [(160, 200, 10), (20, 20_000, 10), (4, 64_000, 4)])
async def test_other_tasks_run_between_lines(num_lines: int, num_bytes: int, num_turns: int) -> None:
    seen, turns = 0, Turns()

    async def other() -> None:
        nonlocal seen
        while True:
            seen += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    for _ in range(num_lines):
        await turns.take(num_bytes)
    task.cancel()
    assert num_turns <= seen <= 2 * num_turns


async def test_bytes_in_flight_are_limited_and_something_larger_goes_alone() -> None:
    limit, largest = ByteLimit(100), 0

    async def hold(num_bytes: int) -> None:
        nonlocal largest
        await limit.acquire(num_bytes)
        largest = max(largest, limit.num_bytes)
        await asyncio.sleep(0)
        limit.release(num_bytes)

    await asyncio.gather(*(hold(num_bytes) for num_bytes in (40, 40, 40, 90, 10, 100)))
    assert largest == 100
    await hold(500)
    assert limit.num_bytes == 0


async def test_an_endpoint_that_fails_gives_the_line_an_error() -> None:
    async def broken(_: Any) -> Any:
        raise ZeroDivisionError

    async def refusing(_: Any) -> Any:
        raise ApiError(429, "later", retry_after_s=1.5)

    caller: Any = None
    answer = await call_endpoint(broken, "/v1/completions", b"{}", caller, "id")
    assert (answer.status, answer.is_refused) == (500, False)
    answer = await call_endpoint(refusing, "/v1/completions", b"{}", caller, "id")
    assert (answer.status, answer.is_refused, answer.retry_after_s) == (429, True, 1.5)
