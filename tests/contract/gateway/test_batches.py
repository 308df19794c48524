"""Files and batches at a gateway over loopback. Two tests use the official client, the others send plain HTTP."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from services.gateway.batches.files import Files
from services.gateway.errors import ApiError
from services.gateway.store.periodic import LEASE_S
from tests.contract.gateway.conftest import MODEL, Running, Start, until
from tests.contract.gateway.test_keys import Keys, bearer

CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "ignore_eos": True, "temperature": 0},
    COMPLETION: {"prompt": "hello", "max_tokens": 4, "ignore_eos": True, "temperature": 0},
    RESPONSE: {"input": "hello", "max_output_tokens": 4, "ignore_eos": True, "temperature": 0},
}


def line(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": MODEL, **BODIES[url], **body}}


def jsonl(*lines: dict[str, Any]) -> bytes:
    return b"\n".join(json.dumps(one).encode() for one in lines)


async def launch(start: Start, tmp_path: Path, settings: dict[str, Any] | None = None, **scheduler: Any) -> Running:
    store = {"response_store": f"sqlite:///{tmp_path}/store.db", "drain_s": 0.0}
    return await start(settings=store | (settings or {}), **scheduler)


async def upload(running: Running, content: bytes, name: str = "in.jsonl", **options: Any) -> httpx.Response:
    """`data`: the form fields beside the file; by default the purpose `batch`."""
    data = options.pop("data", {"purpose": "batch"})
    return await running.http.post("/v1/files", files={"file": (name, content)}, data=data, **options)


async def begin(running: Running, content: bytes, endpoint: str = CHAT, **options: Any) -> str:
    """The id of a new batch. `options`: headers."""
    file_id = (await upload(running, content, **options)).json()["id"]
    body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h"}
    made = await running.http.post("/v1/batches", json=body, **options)
    assert made.status_code == 200, made.text
    return str(made.json()["id"])


async def batch_of(running: Running, batch_id: str, **options: Any) -> dict[str, Any]:
    return dict((await running.http.get(f"/v1/batches/{batch_id}", **options)).json())


async def until_status(running: Running, batch_id: str, *statuses: str, **options: Any) -> dict[str, Any]:
    async with asyncio.timeout(30):
        while (batch := await batch_of(running, batch_id, **options))["status"] not in statuses:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return batch


async def results(running: Running, file_id: str, **options: Any) -> dict[str, dict[str, Any]]:
    """The lines of an output or error file, by custom id."""
    content = (await running.http.get(f"/v1/files/{file_id}/content", **options)).text
    lines = [json.loads(one) for one in content.splitlines()]
    found = {one["custom_id"]: one for one in lines}
    assert len(found) == len(lines), "a line has two results"
    return found


@pytest.mark.parametrize("url", [CHAT, COMPLETION, RESPONSE])
async def test_a_batch_answers_as_its_endpoint_does(running: Running, url: Any) -> None:
    client = running.openai
    lines = [line(f"r{i}", url, seed=i) for i in range(5)] + [line("bad", url, temperature=-1)]
    file = await client.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")
    batch = await client.batches.create(
        input_file_id=file.id, endpoint=url, completion_window="24h", metadata={"a": "b"}
    )
    assert (batch.status, batch.metadata, batch.endpoint) == ("validating", {"a": "b"}, url)
    await until_status(running, batch.id, "completed")
    batch = await client.batches.retrieve(batch.id)
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (6, 5, 1)
    assert batch.model == MODEL
    assert batch.created_at <= (batch.in_progress_at or 0) <= (batch.finalizing_at or 0) <= (batch.completed_at or 0)
    assert all(submission.offline for submission in running.scheduler.submissions)

    right = await running.http.post(url, json=lines[0]["body"])
    assert not running.scheduler.submissions[-1].offline
    served = await results(running, batch.output_file_id or "")
    assert served.keys() == {f"r{i}" for i in range(5)}
    assert _without_ids(served["r0"]["response"]["body"]) == _without_ids(right.json())
    assert served["r0"]["response"]["status_code"] == 200
    assert served["r0"]["error"] is None
    assert served["r0"]["id"].startswith("batch_req_")
    assert batch.usage is not None
    assert batch.usage.output_tokens == 5 * 4

    failed = await results(running, batch.error_file_id or "")
    wrong = await running.http.post(url, json=lines[-1]["body"])
    assert failed["bad"]["response"]["status_code"] == wrong.status_code == 400
    assert failed["bad"]["response"]["body"] == wrong.json()
    output = await client.files.retrieve(batch.output_file_id or "")
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert output.bytes == len((await client.files.content(output.id)).content)


def _without_ids(body: dict[str, Any]) -> dict[str, Any]:
    dropped = {"id", "created", "created_at", "timings", "output"}
    kept = {name: value for name, value in body.items() if name not in dropped}
    return kept | {"texts": [item["content"] for item in body.get("output", ())]}


async def test_files_are_listed_in_pages_shown_and_deleted(start: Start, tmp_path: Path) -> None:
    running = await launch(start, tmp_path)
    client = running.openai
    made = []
    for number in range(5):
        expiry: Any = {"anchor": "created_at", "seconds": 3600} if number else openai.omit
        made.append(
            await client.files.create(
                file=(f"{number}.jsonl", b"x" * number + b"{}\n"), purpose="batch", expires_after=expiry
            )
        )
    assert [made[0].expires_at, made[1].expires_at] == [made[0].created_at + 30 * 86400, made[1].created_at + 3600]
    assert [file.id async for file in client.files.list(limit=2)] == [file.id for file in reversed(made)]
    assert [file.id async for file in client.files.list(limit=2, order="asc")] == [file.id for file in made]
    page = await client.files.list(limit=5)
    assert not page.has_more
    assert not (await client.files.list(purpose="batch_output")).data
    assert await client.files.retrieve(made[3].id) == made[3]
    assert (await client.files.content(made[3].id)).content == b"xxx{}\n"
    head = await running.http.head(f"/v1/files/{made[3].id}/content")
    assert (head.status_code, head.headers["content-length"], head.content) == (200, "6", b"")
    assert (await client.files.delete(made[3].id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(made[3].id)
    with pytest.raises(openai.NotFoundError):
        await client.files.content(made[3].id)
    assert [file.id async for file in client.files.list(limit=1)] == [made[i].id for i in (4, 2, 1, 0)]


@pytest.mark.parametrize(
    ("data", "param"),
    [
        ({}, "purpose"),
        ({"purpose": "fine-tune"}, "purpose"),
        ({"purpose": ["batch", "batch"]}, "purpose"),
        ({"purpose": "batch", "porpoise": "x"}, "porpoise"),
        ({"purpose": "batch", "expires_after[seconds]": "3600"}, "expires_after[anchor]"),
        ({"purpose": "batch", "expires_after[anchor]": "created_at"}, "expires_after[seconds]"),
        (
            {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3599"},
            "expires_after[seconds]",
        ),
    ],
)
async def test_a_wrong_field_of_an_upload_is_named(running: Running, data: dict[str, Any], param: str) -> None:
    refused = await upload(running, b"{}", data=data)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def charset(name: str) -> dict[str, Any]:
    """An upload in this charset. Some charsets cannot decode its field name, or decode it to invalid text."""
    body = b'--x\r\ncontent-disposition: form-data; name="\\ud800"\r\n\r\ny\r\n--x--\r\n'
    return {"content": body, "headers": {"content-type": f"multipart/form-data; boundary=x; charset={name}"}}


async def test_a_body_that_is_no_upload_is_refused(running: Running) -> None:
    post = running.http.post
    two = [("file", ("a", b"{}")), ("file", ("b", b"{}"))]
    for answer, status in (
        (await post("/v1/files", json={"purpose": "batch"}), 415),
        (await post("/v1/files", data={"purpose": "batch"}), 415),
        (await post("/v1/files", files={"purpose": (None, "batch")}), 400),
        (await post("/v1/files", files={"file": (None, "{}"), "purpose": (None, "batch")}), 400),
        (await post("/v1/files", files=two, data={"purpose": "batch"}), 400),
        (await post("/v1/files", content=b"x", headers={"content-type": "multipart/form-data"}), 400),
        (await post("/v1/files", content=b"x", headers={"content-type": "multipart/form-data; boundary=y"}), 400),
        *[(await post("/v1/files", **charset(name)), 415) for name in ("undefined", "punycode", "unicode_escape")],
        (await upload(running, b""), 400),
        (await upload(running, b"{}", name="a" * 256), 400),
    ):
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["message"]


async def test_an_upload_beyond_a_limit_is_refused_with_the_limit(start: Start, tmp_path: Path) -> None:
    running = await launch(start, tmp_path, {"max_file_bytes": 400_000, "max_files_bytes": 900_000})
    large = await upload(running, b"x" * 400_001)
    assert (large.status_code, large.json()["error"]["param"]) == (413, "file")
    assert "400000 bytes" in large.json()["error"]["message"]

    async def without_length() -> Any:
        yield b'--y\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(60):
            yield b"x" * 10_000

    kind = {"content-type": "multipart/form-data; boundary=y"}
    cut = await running.http.post("/v1/files", content=without_length(), headers=kind)
    assert cut.status_code == 413
    many = await upload(running, b"\n" * 50_001)
    assert many.status_code == 400
    assert "50000" in many.json()["error"]["message"]
    kept = [await upload(running, b"x" * 300_000) for _ in range(4)]
    assert [answer.status_code for answer in kept] == [200, 200, 200, 413]
    assert "900000 bytes" in kept[-1].json()["error"]["message"]
    await running.http.delete(f"/v1/files/{kept[0].json()['id']}")
    assert (await upload(running, b"x" * 300_000)).status_code == 200


@pytest.mark.parametrize(
    ("bad", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[]", "invalid_request", None),
        (json.dumps(line("") | {"custom_id": "r0"}).encode(), "duplicate_custom_id", "custom_id"),
        (json.dumps(line("")).encode(), "invalid_type", "custom_id"),
        (json.dumps(line("x") | {"method": "GET"}).encode(), "invalid_type", "method"),
        (json.dumps(line("x", COMPLETION)).encode(), "invalid_url", "url"),
        (json.dumps(line("x") | {"body": []}).encode(), "invalid_type", "body"),
        (json.dumps(line("x", model="other")).encode(), "model_not_found", "body.model"),
        (json.dumps(line("x", model=None)).encode(), "mismatched_model", "body.model"),
        (json.dumps(line("x", stream=True)).encode(), "unsupported_value", "body.stream"),
    ],
)
async def test_a_bad_line_fails_the_batch_with_its_number(
    running: Running, bad: bytes, code: str, param: str | None
) -> None:
    batch_id = await begin(running, jsonl(line("r0")) + b"\n\n" + bad + b"\n")
    batch = await until_status(running, batch_id, "failed", "completed")
    assert batch["status"] == "failed", batch
    [error] = batch["errors"]["data"]
    assert (error["line"], error["param"], error["message"] != "") == (3, param, True)
    assert error["code"] == code or (code == "invalid_type" and error["code"])
    assert batch["failed_at"] >= batch["created_at"]
    assert not running.scheduler.submissions, "no line was run"
    Batch.model_validate(batch, strict=True)


async def test_a_bad_first_line_makes_no_other_line_wrong(running: Running) -> None:
    batch_id = await begin(running, b"{\n" + jsonl(line("r0"), line("r1")))
    batch = await until_status(running, batch_id, "failed")
    assert [error["line"] for error in batch["errors"]["data"]] == [1]


async def test_a_wrong_field_of_a_batch_is_named(running: Running) -> None:
    file_id = (await upload(running, jsonl(line("a")))).json()["id"]
    good = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    for wrong, status, param in (
        ({"input_file_id": "file-0"}, 404, "input_file_id"),
        ({"endpoint": "/v1/moderations"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"metadata": {"k" * 65: "v"}}, 400, "metadata"),
        ({"metadata": {str(i): "v" for i in range(17)}}, 400, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "output_expires_after.seconds"),
    ):
        refused = await running.http.post("/v1/batches", json=good | wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (status, param), refused.text


async def test_a_batch_is_cancelled(start: Start, tmp_path: Path) -> None:
    running = await launch(start, tmp_path, {"batch_lines": 4}, step_s=0.05)
    lines = [line(f"r{i}", max_tokens=1500 if i else 1) for i in range(20)]
    batch_id = await begin(running, jsonl(*lines))
    await until(lambda: running.scheduler.num_requests == 5 and running.scheduler.num_running == 4)
    assert (await running.http.post(f"/v1/batches/{batch_id}/cancel")).json()["status"] == "cancelling"
    batch = await until_status(running, batch_id, "cancelled")
    assert running.scheduler.num_running == 0
    assert batch["request_counts"] == {"total": 20, "completed": 1, "failed": 19}
    assert (await results(running, batch["output_file_id"])).keys() == {"r0"}
    failed = await results(running, batch["error_file_id"])
    assert {one["error"]["code"] for one in failed.values()} == {"batch_cancelled"}
    assert failed.keys() == {f"r{i}" for i in range(1, 20)}
    again = await running.http.post(f"/v1/batches/{batch_id}/cancel")
    assert again.status_code == 400


async def test_an_expired_batch_keeps_its_finished_results(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.batches.records.WINDOW_S", 3)
    running = await launch(start, tmp_path, {"batch_lines": 1}, step_s=0.05)
    batch_id = await begin(running, jsonl(line("r0", max_tokens=1), *(line(f"r{i}", max_tokens=900) for i in (1, 2))))
    batch = await until_status(running, batch_id, "expired")
    assert batch["expired_at"] >= batch["expires_at"] == batch["created_at"] + 3
    assert batch["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
    failed = await results(running, batch["error_file_id"])
    assert {name: one["error"]["code"] for name, one in failed.items()} == dict.fromkeys(("r1", "r2"), "batch_expired")
    assert running.scheduler.num_running == 0


async def test_the_input_of_a_batch_cannot_be_deleted_before_its_end(start: Start, tmp_path: Path) -> None:
    running = await launch(start, tmp_path)
    running.scheduler.paused = True
    batch_id = await begin(running, jsonl(line("a")))
    file_id = (await batch_of(running, batch_id))["input_file_id"]
    refused = await running.http.delete(f"/v1/files/{file_id}")
    assert refused.status_code == 409
    assert batch_id in refused.text
    running.scheduler.paused = False
    await until_status(running, batch_id, "completed")
    assert (await running.http.delete(f"/v1/files/{file_id}")).status_code == 200


async def test_a_full_server_delays_lines_and_fails_none(start: Start, tmp_path: Path) -> None:
    running = await launch(start, tmp_path, {"max_live_requests": 2})
    running.scheduler.set_ready(False)
    batch_id = await begin(running, jsonl(*(line(f"r{i}") for i in range(30))))
    await until_status(running, batch_id, "in_progress")
    running.scheduler.set_ready(True)
    batch = await until_status(running, batch_id, "completed")
    assert batch["request_counts"] == {"total": 30, "completed": 30, "failed": 0}


async def test_files_and_batches_belong_to_their_key(start: Start, tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.toml")
    ann, bob = (bearer(keys.add(name, max_requests=2)) for name in ("ann", "bob"))
    running = await launch(start, tmp_path, {"keys_file": str(keys.path)})
    batch_id = await begin(running, jsonl(*(line(f"r{i}") for i in range(8))), headers=ann)
    batch = await until_status(running, batch_id, "completed", headers=ann)
    assert batch["request_counts"]["completed"] == 8
    assert {submission.tenant for submission in running.scheduler.submissions} == {"ann"}
    for path in (f"/v1/files/{batch['input_file_id']}", f"/v1/files/{batch['output_file_id']}/content"):
        assert (await running.http.get(path, headers=ann)).status_code == 200
        assert (await running.http.get(path, headers=bob)).status_code == 404
        assert (await running.http.get(path)).status_code == 401
    assert (await running.http.delete(f"/v1/files/{batch['input_file_id']}", headers=bob)).status_code == 404
    assert (await running.http.get(f"/v1/batches/{batch_id}", headers=bob)).status_code == 404
    assert (await running.http.post(f"/v1/batches/{batch_id}/cancel", headers=bob)).status_code == 404
    for path in ("/v1/files", "/v1/batches"):
        assert (await running.http.get(path, headers=bob)).json()["data"] == []
        assert (await running.http.get(path, headers=ann)).json()["data"] != []
    foreign = {"input_file_id": batch["input_file_id"], "endpoint": CHAT, "completion_window": "24h"}
    assert (await running.http.post("/v1/batches", json=foreign, headers=bob)).status_code == 404


async def until_head(running: Running, status: int, headers: dict[str, str]) -> None:
    async with asyncio.timeout(30):
        while (await running.http.get("/v1/batches", headers=headers)).status_code != status:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_a_removed_key_fails_the_lines_that_are_left(start: Start, tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.toml")
    ann, _ = (bearer(keys.add(name)) for name in ("ann", "bob"))
    running = await launch(start, tmp_path, {"keys_file": str(keys.path), "batch_lines": 1}, step_s=0.2)
    batch_id = await begin(running, jsonl(*(line(f"r{i}") for i in range(30))), headers=ann)
    await until(lambda: running.scheduler.num_requests > 2)
    keys.remove("ann")
    await until_head(running, 401, ann)
    await until(lambda: running.scheduler.num_running == 0)
    keys.add("ann")  # to read the batch again
    await until_head(running, 200, ann)
    batch = await until_status(running, batch_id, "completed", headers=ann)
    counts = batch["request_counts"]
    assert counts["completed"] >= 1
    assert counts["completed"] + counts["failed"] == 30
    failed = await results(running, batch["error_file_id"], headers=ann)
    assert {one["error"]["code"] for one in failed.values()} == {"api_key_revoked"}


async def test_a_stopped_gateway_leaves_its_batch_to_the_next_one(start: Start, tmp_path: Path) -> None:
    running = await launch(start, tmp_path, {"batch_lines": 4}, step_s=0.02)
    batch_id = await begin(running, jsonl(*(line(f"r{i}", max_tokens=20) for i in range(40))))
    async with asyncio.timeout(30):
        while (await batch_of(running, batch_id))["request_counts"]["completed"] < 8:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    running.stop.set()
    await running.task
    second = await launch(start, tmp_path)
    batch = await until_status(second, batch_id, "completed")
    assert batch["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
    assert second.scheduler.num_requests < 40, "lines with a result are not run again"
    assert (await results(second, batch["output_file_id"])).keys() == {f"r{i}" for i in range(40)}


async def test_a_draining_gateway_hands_its_batches_over_at_once(start: Start, tmp_path: Path) -> None:
    """The gateway still serves the streams of its clients."""
    first = await launch(start, tmp_path, {"batch_lines": 4, "drain_s": 60.0}, step_s=0.2)
    second = await launch(start, tmp_path)
    body = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    async with first.http.stream("POST", COMPLETION, json=body) as stream:
        events = stream.aiter_lines()  # without a reference to this iterator the stream would end
        await anext(events)
        batch_id = await begin(first, jsonl(*(line(f"r{i}", max_tokens=400 if i else 1) for i in range(8))))
        await until(lambda: len(first.scheduler.submissions) == 6 and first.scheduler.num_running == 5)
        first.stop.set()
        async with asyncio.timeout(LEASE_S / 2):
            await until(lambda: bool(second.scheduler.submissions))
        batch = await until_status(second, batch_id, "completed")
        assert batch["request_counts"] == {"total": 8, "completed": 8, "failed": 0}
        assert not first.task.done()
        assert first.scheduler.num_running == 1, "only the stream still runs"


async def test_two_gateways_that_take_a_batch_from_each_other_give_each_line_once(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.batches.service.LEASE_S", 0.2)  # shorter than the time between renewals
    first, second = [await launch(start, tmp_path, {"batch_lines": 3}, step_s=0.02) for _ in range(2)]
    asked = [line(f"r{i}", max_tokens=20, seed=i, temperature=1) for i in range(40)]
    batch_id = await begin(first, jsonl(*asked))
    batch = await until_status(second, batch_id, "completed")
    assert first.scheduler.num_requests
    assert second.scheduler.num_requests, "the other gateway took it over"
    assert batch["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
    served = await results(first, batch["output_file_id"])
    assert list(served) == [f"r{i}" for i in range(40)]
    for i in (0, 39):
        right = (await first.http.post(CHAT, json=asked[i]["body"])).json()
        assert served[f"r{i}"]["response"]["body"]["choices"] == right["choices"]


async def test_without_a_store_there_are_no_files(start: Start) -> None:
    running = await start(settings={"response_store": "none"})
    assert (await upload(running, b"{}")).status_code == 404
    for path in ("/v1/files", "/v1/files/x", "/v1/batches", "/v1/batches/x"):
        answer = await running.http.get(path)
        assert answer.status_code == 404
        assert "--response-store none" in answer.json()["error"]["message"]


async def test_usage_is_counted_again_after_a_failure_between_the_two_files(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.batches.service.LEASE_S", 1.5)
    write, failures = Files.write, [ApiError(503, "the gateway is gone")]

    async def write_or_fail(self: Files, owner: str, file_id: str, filename: str, *rest: Any) -> None:
        if filename.endswith("_error.jsonl") and failures:
            raise failures.pop()
        await write(self, owner, file_id, filename, *rest)

    monkeypatch.setattr(Files, "write", write_or_fail)
    running = await launch(start, tmp_path)
    batch_id = await begin(running, jsonl(line("good"), line("bad", temperature=-1)))
    batch = await until_status(running, batch_id, "completed")
    assert not failures
    assert batch["usage"]["output_tokens"] == 4


async def test_a_line_that_the_next_gateway_finds_too_large_fails_alone(start: Start, tmp_path: Path) -> None:
    running = await launch(start, tmp_path)
    running.scheduler.set_ready(False)
    batch_id = await begin(running, jsonl(line("small"), line("large", user="x" * 100_000)))
    await until_status(running, batch_id, "in_progress")
    running.stop.set()
    await running.task
    second = await launch(start, tmp_path, {"max_body_bytes": 70_000})
    batch = await until_status(second, batch_id, "completed")
    assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    [failed] = (await results(second, batch["error_file_id"])).values()
    assert failed["response"]["status_code"] == 400
    assert "--max-body-bytes" in failed["response"]["body"]["error"]["message"]


async def test_a_batch_of_another_key_does_not_wait_for_many_of_one_key(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.batches.service.MAX_RUNS", 2)
    keys = Keys(tmp_path / "keys.toml")
    ann, bob = (bearer(keys.add(name)) for name in ("ann", "bob"))
    running = await launch(start, tmp_path, {"keys_file": str(keys.path), "batch_lines": 2}, step_s=0.05)
    long = jsonl(*(line(f"r{i}", max_tokens=1500) for i in range(4)))
    of_ann = [await begin(running, long, headers=ann) for _ in range(4)]
    await until_status(running, of_ann[1], "in_progress", headers=ann)
    of_bob = await begin(running, jsonl(line("a"), line("b")), headers=bob)
    batch = await until_status(running, of_bob, "completed", headers=bob)
    assert batch["request_counts"]["completed"] == 2
    statuses = [(await batch_of(running, batch_id, headers=ann))["status"] for batch_id in of_ann]
    assert set(statuses) <= {"validating", "in_progress"}
    for batch_id in of_ann:
        await running.http.post(f"/v1/batches/{batch_id}/cancel", headers=ann)
        await until_status(running, batch_id, "cancelled", headers=ann)


async def test_lines_of_a_key_with_many_batches_leave_another_key_its_share(start: Start, tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.toml")
    ann, bob = (bearer(keys.add(name)) for name in ("ann", "bob"))
    settings = {"keys_file": str(keys.path), "batch_lines": 4, "all_batch_lines": 2}
    running = await launch(start, tmp_path, settings, step_s=0.02)
    running.scheduler.paused = True
    lines = jsonl(*(line(f"r{i}") for i in range(20)))
    of_ann = [await begin(running, lines, headers=ann) for _ in range(3)]
    of_bob = await begin(running, lines, headers=bob)
    await until_status(running, of_bob, "in_progress", headers=bob)
    running.scheduler.paused = False
    await until_status(running, of_bob, "completed", headers=bob)
    tenants = [submission.tenant for submission in running.scheduler.submissions]
    last = len(tenants) - tenants[::-1].index("bob")
    assert tenants[:last].count("ann") <= 20 + 8, "bob has one of two slots, except during the first lines"
    for batch_id in of_ann:
        await until_status(running, batch_id, "completed", headers=ann)


async def test_batches_of_more_keys_than_run_at_once_take_turns(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line runs once, also a line that takes longer than a turn."""
    monkeypatch.setattr("services.gateway.batches.service.MAX_RUNS", 2)
    monkeypatch.setattr("services.gateway.batches.service.TURN_S", 0.5)
    keys = Keys(tmp_path / "keys.toml")
    names = ["ann", "bob", "cem"]
    headers = [bearer(keys.add(name)) for name in names]
    running = await launch(start, tmp_path, {"keys_file": str(keys.path), "batch_lines": 2}, step_s=0.05)
    long = jsonl(line("r0", max_tokens=40), *(line(f"r{i}", max_tokens=8) for i in range(1, 16)))
    batch_ids = [await begin(running, long, headers=each) for each in headers]
    most = 0

    async def completed(number: int) -> int:
        nonlocal most
        most = max(most, running.scheduler.num_running)
        return int((await batch_of(running, batch_ids[number], headers=headers[number]))["request_counts"]["completed"])

    async with asyncio.timeout(30):
        while not await completed(2):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert max(await completed(0), await completed(1)) < 16, "the third key does not wait for the end of a batch"
    assert most <= 4, "at most two batches run, with at most two lines each"
    for batch_id, each in zip(batch_ids, headers, strict=True):
        batch = await until_status(running, batch_id, "completed", headers=each)
        assert batch["request_counts"] == {"total": 16, "completed": 16, "failed": 0}
    assert len(running.scheduler.submissions) == 3 * 16


async def test_a_batch_that_waits_for_its_turn_can_be_cancelled_and_can_expire(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.batches.service.MAX_RUNS", 0)
    running = await launch(start, tmp_path)
    batch_id = await begin(running, jsonl(line("a")))
    assert (await running.http.post(f"/v1/batches/{batch_id}/cancel")).json()["status"] == "cancelling"
    await until_status(running, batch_id, "cancelled")
    monkeypatch.setattr("services.gateway.batches.records.WINDOW_S", 1)
    await until_status(running, await begin(running, jsonl(line("a"))), "expired")


async def test_a_batch_of_a_model_that_is_gone_can_be_cancelled(start: Start, tmp_path: Path) -> None:
    running = await launch(start, tmp_path)
    running.scheduler.set_ready(False)
    batch_id = await begin(running, jsonl(line("a"), line("b")))
    await until_status(running, batch_id, "in_progress")
    running.stop.set()
    await running.task
    second = await launch(start, tmp_path, {"served_model_name": "another"})
    file_id = (await batch_of(second, batch_id))["input_file_id"]
    assert (await second.http.delete(f"/v1/files/{file_id}")).status_code == 409
    assert (await second.http.post(f"/v1/batches/{batch_id}/cancel")).json()["status"] == "cancelling"
    batch = await until_status(second, batch_id, "cancelled")
    assert batch["request_counts"] == {"total": 2, "completed": 0, "failed": 2}
    assert (await second.http.delete(f"/v1/files/{file_id}")).status_code == 200


async def test_output_files_beyond_the_limit_refuse_new_batches_until_some_are_deleted(
    start: Start, tmp_path: Path
) -> None:
    running = await launch(start, tmp_path, {"max_files_bytes": 1024})
    file_id = (await upload(running, jsonl(line("a"), line("b")))).json()["id"]
    body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    made = await running.http.post("/v1/batches", json=body)
    batch = await until_status(running, made.json()["id"], "completed")
    assert batch["request_counts"]["completed"] == 2
    refused = await running.http.post("/v1/batches", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (413, "input_file_id")
    assert "1024 bytes (--max-files-bytes)" in refused.json()["error"]["message"]
    await running.http.delete(f"/v1/files/{batch['output_file_id']}")
    assert (await running.http.post("/v1/batches", json=body)).status_code == 200


async def test_results_of_a_running_batch_count_for_its_key(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results count towards the limit of uploads. At the limit, the batch ends and keeps its results so far."""
    monkeypatch.setattr("services.gateway.batches.run._CHECKED_BYTES", 1)
    content = jsonl(*(line(f"r{i}") for i in range(60)))
    limits = {"max_files_bytes": len(content) + 6000, "batch_lines": 1}
    running = await launch(start, tmp_path, limits, step_s=0.05)
    batch_id = await begin(running, content)
    async with asyncio.timeout(20):
        while (await batch_of(running, batch_id))["request_counts"]["completed"] < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    refused = await upload(running, b"x" * 5900)
    assert (refused.status_code, refused.json()["error"]["reason"]) == (413, "files_limit_exceeded")
    assert "running batches" in refused.json()["error"]["message"]
    batch = await until_status(running, batch_id, "completed")
    counts = batch["request_counts"]
    assert 4 <= counts["completed"] < 60
    assert counts["completed"] + counts["failed"] == counts["total"] == 60
    served, failed = [await results(running, batch[name]) for name in ("output_file_id", "error_file_id")]
    assert served.keys() | failed.keys() == {f"r{i}" for i in range(60)}
    assert {one["error"]["code"] for one in failed.values()} == {"files_limit_exceeded"}
    assert running.scheduler.num_running == 0
    for name in ("output_file_id", "error_file_id"):
        await running.http.delete(f"/v1/files/{batch[name]}")
    assert (await upload(running, b"x" * 5900)).status_code == 200, "the results count once"


async def test_a_batch_of_many_sequences_refuses_no_online_request(start: Start, tmp_path: Path) -> None:
    running = await launch(start, tmp_path, {"max_live_requests": 6}, step_s=0.02)
    batch_id = await begin(running, jsonl(*(line(f"r{i}", n=3, temperature=1, max_tokens=60) for i in range(6))))
    await until(lambda: running.scheduler.num_running == 6)
    answers = await asyncio.gather(*(running.http.post(CHAT, json=BODIES[CHAT]) for _ in range(4)))
    assert [answer.status_code for answer in answers] == [200] * 4
    batch = await until_status(running, batch_id, "completed")
    assert batch["request_counts"] == {"total": 6, "completed": 6, "failed": 0}
