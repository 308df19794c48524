"""Whatever is wrong with a request: the right status, OpenAI's shape, the field's name, and no effect on others."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import openai
import pytest

from paceline.v1 import inference_pb2
from services.gateway.http import connection as http_connection
from tests.contract.gateway.conftest import MODEL, Running, Start, until, until_metrics
from tests.support.fake_session import ERROR

CHAT = {"messages": [{"role": "user", "content": "x"}]}


def check_shape(body: Any) -> dict[str, Any]:
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code", "reason"}
    assert isinstance(error["code"], int) or error["code"] == "context_length_exceeded"
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    return error


async def post(running: Running, path: str, **request: Any) -> tuple[int, dict[str, Any]]:
    response = await running.http.post(path, **request)
    assert response.headers["x-request-id"]
    return response.status_code, check_shape(response.json())


async def test_values_out_of_range_and_of_wrong_types(running: Running) -> None:
    cases: list[tuple[str, dict[str, Any], int, str | None]] = [
        ("completions", {}, 400, "prompt"),
        ("completions", {"prompt": ""}, 400, "prompt"),
        ("completions", {"prompt": []}, 400, "prompt"),
        ("completions", {"prompt": ["a", ""]}, 400, "prompt"),
        ("completions", {"prompt": [[]]}, 400, "prompt"),
        ("completions", {"prompt": [1024]}, 400, "prompt"),
        ("completions", {"prompt": [-1]}, 400, "prompt"),
        ("completions", {"prompt": [2**70]}, 400, "prompt"),
        ("completions", {"prompt": [7] * 2048}, 400, "prompt"),
        ("completions", {"prompt": [7] * 20, "max_tokens": 2049}, 400, "max_tokens"),
        ("completions", {"prompt": "x" * 1_000_000}, 400, "prompt"),
        ("completions", {"prompt": "x", "max_tokens": -5}, 400, "max_tokens"),
        ("completions", {"prompt": "x", "max_tokens": "5.5"}, 400, "max_tokens"),
        ("completions", {"prompt": "x", "max_tokens": 5.5}, 400, "max_tokens"),
        ("completions", {"prompt": "x", "temperature": []}, 400, "temperature"),
        ("completions", {"prompt": "x", "temperature": "nan"}, 400, "temperature"),
        ("completions", {"prompt": "x", "temperature": -1}, 400, "temperature"),
        ("completions", {"prompt": "x", "n": 0}, 400, "n"),
        ("completions", {"prompt": "x", "n": 65}, 400, "n"),
        ("completions", {"prompt": "x", "n": 2, "best_of": 1}, 400, "best_of"),
        ("completions", {"prompt": "x", "deadline_s": 0}, 400, "deadline_s"),
        ("completions", {"prompt": "x", "deadline_s": -1.5}, 400, "deadline_s"),
        ("completions", {"prompt": "x", "priority": "high"}, 400, "priority"),
        ("completions", {"prompt": "x", "priority": 1e39}, 400, "priority"),  # infinite, as a float of 32 bits
        ("completions", {"prompt": "x", "deadline_s": 1e39}, 400, "deadline_s"),
        ("completions", {"prompt": "x", "tenant": 7}, 400, "tenant"),
        ("completions", {"prompt": "x", "tenant": "x" * 129}, 400, "tenant"),
        ("completions", {"prompt": "x", "cache_salt": 7}, 400, "cache_salt"),
        ("completions", {"prompt": "x", "cache_salt": "x" * 257, "n": 64}, 400, "cache_salt"),
        ("completions", {"prompt": "x", "cache_retention": [{"priority": 1}] * 65}, 400, "cache_retention"),
        ("completions", {"prompt": "x", "cache_retention": [{"priority": -1}]}, 400, "cache_retention.0.priority"),
        ("completions", {"prompt": "x", "cache_retention": [{}]}, 400, "cache_retention.0.priority"),
        ("completions", {"prompt": "x", "model": "other"}, 404, "model"),
        ("completions", {"prompt": "x", "stop": [""]}, 400, "stop"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x " * 3000}]}, 400, "messages"),
        ("chat/completions", CHAT | {"max_completion_tokens": 3000}, 400, "max_completion_tokens"),
        ("chat/completions", CHAT | {"max_completion_tokens": 0}, 400, "max_completion_tokens"),
        ("chat/completions", CHAT | {"model": "other"}, 404, "model"),
    ]
    for path, body, status, param in cases:
        for stream in (False, True):
            answer = await post(running, f"/v1/{path}", json=body | {"stream": stream})
            assert (answer[0], answer[1]["param"]) == (status, param), body
    assert running.scheduler.submissions == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b'\xef\xbb\xbf{"prompt": "x"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"[]",
        b"null",
    ],
)
async def test_broken_json(running: Running, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    assert (await post(running, "/v1/completions", content=content, headers=headers))[0] == 400


@pytest.mark.parametrize(
    ("content", "field"),
    [
        (b'{"prompt": "NaN", "temperature": NaN}', "temperature"),
        (b'{"prompt": "x", "logit_bias": {"5": -Infinity}, "top_p": NaN}', "logit_bias"),
        (b'{"prompt": "x", "top_p": 1e999}', "top_p"),
        (b'{"prompt": "NaN", "temperature": 1', None),
        (b"NaN", None),
        (b"[" * 60_000 + b"NaN", None),
    ],
)
async def test_the_field_of_nan_or_infinity_is_named(running: Running, content: bytes, field: str | None) -> None:
    headers = {"content-type": "application/json"}
    status, error = await post(running, "/v1/completions", content=content, headers=headers)
    assert (status, error["param"], error["reason"]) == (400, field, "invalid_json")


async def test_bodies_that_are_no_json(running: Running) -> None:
    body = b'{"prompt": "x"}'
    for headers in ({"content-type": "text/plain"}, {"content-encoding": "gzip", "content-type": "application/json"}):
        assert (await post(running, "/v1/completions", content=body, headers=headers))[0] == 415


async def test_paths_and_methods(running: Running) -> None:
    for path in ("/assets", "/v1", "/v1/nothing", "/v1/completions/", "//v1/models", "/v1/models/"):
        response = await running.http.get(path)
        assert response.status_code == 404, path
        check_shape(response.json())
    response = await running.http.get("/v1/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    check_shape(response.json())
    response = await running.http.get("/v1/models/other")
    assert response.status_code == 404
    assert check_shape(response.json())["reason"] == "model_not_found"


async def test_embeddings_are_refused_with_the_reason(running: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="makes no embeddings") as refused:
        await running.openai.embeddings.create(model=MODEL, input="x")
    assert refused.value.param == "model"
    status, error = await post(running, "/v1/embeddings", json={})
    assert (status, error["reason"]) == (400, "no_embedding_model")


async def test_a_body_of_50_megabytes_is_refused(running: Running) -> None:
    async def chunks() -> Any:
        for _ in range(800):
            yield bytes(65536)

    headers = {"content-type": "application/json"}
    assert (await post(running, "/v1/completions", content=bytes(50 * 2**20), headers=headers))[0] == 413
    assert (await post(running, "/v1/completions", content=chunks(), headers=headers))[0] == 413
    # A client that closes the connection after this answer can read it, too.
    headers["connection"] = "close"
    assert (await post(running, "/v1/completions", content=bytes(50 * 2**20), headers=headers))[0] == 413
    assert (await post(running, "/v1/completions", content=chunks(), headers=headers))[0] == 413
    assert (await running.http.get("/health")).status_code == 200


async def raw(running: Running, data: bytes) -> bytes:
    assert running.addresses.http is not None
    host, port = running.addresses.http.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    answer = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    return answer


async def test_requests_that_are_not_http_are_refused(running: Running) -> None:
    answer = await raw(running, b"nonsense\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400")
    assert b'{"error"' in answer
    large = b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-large: " + b"a" * 100_000 + b"\r\n\r\n"
    assert (await raw(running, large)).startswith(b"HTTP/1.1 431")
    many = b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"a: b\r\n" * 50_000 + b"\r\n"
    assert (await raw(running, many)).startswith(b"HTTP/1.1 431")
    assert (await running.http.get("/health")).status_code == 200


@pytest.mark.parametrize("begin", [b"M-SEARCH / HTTP/1.1\r\na: ", b"PRI /"], ids=["M-SEARCH", "PRI"])
async def test_the_limit_of_a_request_head_holds_for_any_method(running: Running, begin: bytes) -> None:
    """uvicorn's parser accepts such methods, and would buffer their head without a limit."""
    reader, writer = await asyncio.open_connection(*str(running.addresses.http).split(":"))
    writer.write(begin)
    await asyncio.sleep(0.05)
    writer.write(b"x" * 200_000)
    assert (await asyncio.wait_for(reader.readuntil(b"\r\n"), 10)).split()[1] in (b"400", b"431")
    writer.close()


async def test_a_method_that_no_path_supports_is_refused(running: Running) -> None:
    assert (await running.http.request("M-SEARCH", "/health")).status_code == 405


async def test_request_ids_are_echoed_without_unsafe_characters(running: Running) -> None:
    async def echo(given: str | None) -> str:
        headers = {} if given is None else {b"X-Request-ID": given.encode("latin-1")}
        return (await running.http.get("/health", headers=headers)).headers["x-request-id"]

    assert await echo("bench-1_a.b:c") == "bench-1_a.b:c"
    assert len(await echo(None)) == 32
    assert await echo("a b;<é>") == "ab"
    assert await echo("x" * 1000) == "x" * 128
    assert len(await echo("///")) == 32


@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_of_the_scheduler_become_http_statuses(start: Start, stream: bool) -> None:
    running = await start()
    endings = {
        429: inference_pb2.Ending(reason=ERROR, code=8, message="queue: full", retry_after_s=2.5),
        503: inference_pb2.Ending(reason=ERROR, code=14, message="no worker"),
        500: inference_pb2.Ending(reason=ERROR, code=13, message="the forward pass failed"),
        400: inference_pb2.Ending(reason=ERROR, code=3, message="never fits", field="prompt_token_ids"),
    }
    for status, ending in endings.items():
        running.scheduler.reject = lambda _, ending=ending: ending  # type: ignore[misc]
        response = await running.http.post("/v1/chat/completions", json=CHAT | {"stream": stream})
        assert response.status_code == status
        assert check_shape(response.json())["message"] == ending.message
        assert response.headers.get("retry-after") == ("3" if status == 429 else None)
    with pytest.raises(openai.BadRequestError):
        await running.openai.completions.create(model=MODEL, prompt="x")


async def test_too_many_requests_in_flight(start: Start) -> None:
    running = await start(settings={"max_live_requests": 2})
    running.scheduler.paused = True
    tasks = [asyncio.create_task(running.http.post("/v1/completions", json={"prompt": "x"})) for _ in range(2)]
    await until(lambda: running.scheduler.num_running == 2)
    response = await running.http.post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    running.scheduler.paused = False
    assert [(await task).status_code for task in tasks] == [200, 200]


async def test_more_sequences_than_can_ever_be_in_flight(start: Start) -> None:
    running = await start(settings={"max_live_requests": 8})
    request = {"prompt": ["x", "y", "z"], "n": 3}
    response = await running.http.post("/v1/completions", json=request)
    assert response.status_code == 400, "not 429, because a client would retry for ever"
    assert check_shape(response.json())["param"] == "n"
    assert "9 sequences" in response.json()["error"]["message"]
    assert not running.scheduler.submissions
    assert (await running.http.post("/v1/completions", json=request | {"n": 2})).status_code == 200


@pytest.mark.parametrize("value", ["", "x:1"])
async def test_only_a_resumed_stream_passes_the_limit_of_live_requests(start: Start, value: str) -> None:
    running = await start(settings={"max_live_requests": 1})
    running.scheduler.paused = True
    task = asyncio.create_task(running.http.post("/v1/completions", json={"prompt": "x"}))
    await until(lambda: running.scheduler.num_running == 1)
    response = await running.http.post("/v1/completions", content=b"no json", headers={"Last-Event-ID": value})
    assert response.status_code == (400 if value else 429), "only the body of a resumed stream is read"
    running.scheduler.paused = False
    assert (await task).status_code == 200


async def test_a_failure_after_the_first_token_is_an_event(start: Start) -> None:
    running = await start()
    running.scheduler.paused = True
    request = CHAT | {"stream": True, "max_tokens": 5}
    stream = running.scheduler.streams[0]
    refused = asyncio.create_task(running.http.post("/v1/chat/completions", json=request))
    await until(lambda: running.scheduler.num_running == 1)
    (handle,) = stream.running
    del stream.running[handle]
    stream.endings.append(inference_pb2.Ending(handle=handle, reason=ERROR, code=13, message="boom"))
    running.scheduler.paused = False
    stream.wake.set()
    # No token had come, so the answer is an HTTP error.
    assert (await refused).status_code == 500
    running.scheduler.step_s = 0.02
    async with running.http.stream("POST", "/v1/chat/completions", json=request | {"max_tokens": 500}) as response:
        assert response.status_code == 200
        lines = response.aiter_lines()
        await anext(lines)
        (handle,) = stream.running
        del stream.running[handle]
        stream.endings.append(inference_pb2.Ending(handle=handle, reason=ERROR, code=13, message="boom"))
        rest = [line async for line in lines if line]
    assert '"message":"boom"' in rest[-1]
    assert "data: [DONE]" not in rest


async def test_metrics(start: Start) -> None:
    running = await start()
    assert (await running.http.head("/metrics")).status_code == 200
    await running.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 4, "ignore_eos": True})
    await running.http.post("/v1/completions", json={"prompt": ""})
    await until_metrics(
        running,
        'paceline_gateway_requests_total{endpoint="completion",finish_reason="length"} 1.0',
        'paceline_gateway_requests_total{endpoint="completion",finish_reason="rejected"} 1.0',
        "paceline_gateway_generation_tokens_total 4.0",
        "paceline_gateway_prompt_tokens_total 2.0",
        "paceline_gateway_live_requests 0.0",
        "paceline_gateway_scheduler_ready 1.0",
        "paceline_gateway_time_to_first_token_seconds_count 1.0",
        "paceline_gateway_inter_token_latency_seconds_count 3.0",
        "paceline_gateway_e2e_request_latency_seconds_count 1.0",
    )


async def test_parts_of_all_messages_are_counted_together(running: Running) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": ""}] * 10_000}
    status, error = await post(running, "/v1/chat/completions", json={"messages": [message] * 2})
    assert (status, error["param"]) == (400, "messages")
    assert "20000 parts" in error["message"]


async def test_an_incomplete_request_head_times_out(start: Start) -> None:
    running = await start(settings={"head_timeout_s": 1.0})
    assert await raw(running, b"") == b"", "nothing was asked"
    answer = await raw(running, b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-")
    assert answer.startswith(b"HTTP/1.1 408")
    assert check_shape(json.loads(answer.partition(b"\r\n\r\n")[2]))["reason"] == "request_timeout"
    # A later head on a connection times out, too. Between two requests a connection may be idle for longer.
    well = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    reader, writer = await asyncio.open_connection(*str(running.addresses.http).split(":"))
    for _ in range(2):
        writer.write(well)
        assert b"200 OK" in await reader.readuntil(b"}")
        await asyncio.sleep(1.2)
    writer.write(well[:20])
    assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 408")
    writer.close()


@pytest.mark.parametrize(
    ("asked", "then"),
    [
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n", b"\r\n"),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n", b"a"),
        (b"POST /nothing HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n", b"a"),
        (b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000000\r\n\r\n", b"a"),
    ],
)
async def test_data_that_begins_no_request_closes_the_connection(
    start: Start, monkeypatch: pytest.MonkeyPatch, asked: bytes, then: bytes
) -> None:
    monkeypatch.setattr(http_connection, "_REST_S", 1)
    running = await start()
    reader, writer = await asyncio.open_connection(*str(running.addresses.http).split(":"))
    writer.write(asked)
    assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 ")
    for _ in range(2):  # time for the rest of the answer
        await asyncio.sleep(0.1)
        writer.write(then)
    async with asyncio.timeout(10):
        while await reader.read(1000):
            pass
    writer.close()


async def test_a_request_after_an_empty_line_is_served(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "_REST_S", 1)
    running = await start(step_s=0.1)
    reader, writer = await asyncio.open_connection(*str(running.addresses.http).split(":"))
    writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert b"200 OK" in await reader.readuntil(b"}")
    writer.write(b"\r\n")
    await asyncio.sleep(0.1)
    content = json.dumps({"prompt": "x", "max_tokens": 20, "ignore_eos": True}).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(content) + content
    )
    assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"}"), 20), (
        "the time of an answer does not count as idle"
    )
    writer.close()


STREAM = json.dumps({"prompt": "x", "max_tokens": 20, "ignore_eos": True, "stream": True}).encode()
ASKED = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(STREAM) + STREAM
LAST_CHUNK = b"0\r\n\r\n"


async def test_a_head_that_begins_during_an_answer_may_end_after_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The idle time of a connection begins after the answer, and ends with the next head."""
    monkeypatch.setattr(http_connection, "_REST_S", 1)
    running = await start(step_s=0.1)
    reader, writer = await asyncio.open_connection(*str(running.addresses.http).split(":"))
    writer.write(ASKED)
    await reader.readuntil(b"data: ")
    writer.write(ASKED[:10])
    await asyncio.wait_for(reader.readuntil(LAST_CHUNK), 20)
    await asyncio.sleep(0.1)
    writer.write(ASKED[10:])
    assert b"[DONE]" in await asyncio.wait_for(reader.readuntil(LAST_CHUNK), 20)
    writer.close()


@pytest.mark.parametrize(("more", "status"), [(ASKED[:10], b"408"), (b"\0\0\0\0", b"400")])
async def test_no_refusal_stands_in_the_middle_of_an_answer(start: Start, more: bytes, status: bytes) -> None:
    """Behind its request the client sends a head that is late, or bytes that are not HTTP."""
    running = await start(step_s=0.1, settings={"head_timeout_s": 0.5})
    reader, writer = await asyncio.open_connection(*str(running.addresses.http).split(":"))
    writer.write(ASKED)
    got = await reader.readuntil(b"data: ")
    writer.write(more)
    async with asyncio.timeout(20):
        while part := await reader.read(65536):
            got += part
    whole, _, refusal = got.partition(LAST_CHUNK)
    assert whole.count(b"HTTP/1.1") == 1
    assert b"[DONE]" in whole
    assert refusal.startswith(b"HTTP/1.1 " + status)
    writer.close()


async def test_connections_above_the_limit_are_refused(start: Start) -> None:
    running = await start(settings={"max_connections": 3})
    assert (await running.http.get("/health")).status_code == 200  # one of the three
    others = [await asyncio.open_connection(*str(running.addresses.http).split(":")) for _ in range(2)]
    answer = await raw(running, b"")
    assert answer.startswith(b"HTTP/1.1 503")
    assert (await running.http.get("/health")).status_code == 200
    for _, writer in others:
        writer.close()

    async def served() -> bool:
        return (await raw(running, b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")).startswith(
            b"HTTP/1.1 200"
        )

    async with asyncio.timeout(20):
        while not await served():  # noqa: ASYNC110 - the server's state, which sends no event
            await asyncio.sleep(0.02)


async def open_from(running: Running, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = str(running.addresses.http).split(":")
    return await asyncio.open_connection(host, int(port), local_addr=(address, 0))


async def test_a_client_that_holds_all_connections_gives_one_up_for_another_client(start: Start) -> None:
    running = await start(step_s=0.05, settings={"max_connections": 4})
    await running.http.aclose()  # it has a connection, too
    held = [await open_from(running, "127.0.0.2") for _ in range(4)]
    answering, slow, resting, silent = held
    body = b'{"prompt": [7], "max_tokens": 40, "stream": true, "ignore_eos": true}'
    answering[1].write(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    )
    await answering[0].readuntil(b"data: ")
    slow[1].write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n\r\n{")
    resting[1].write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    await resting[0].readuntil(b"}")
    others = []
    for _ in range(2):
        others.append(await open_from(running, "127.0.0.1"))
        others[-1][1].write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await others[-1][0].readuntil(b"}")).startswith(b"HTTP/1.1 200")
    # Each client has two connections: the gateway closes none for a new one any more.
    for address in ("127.0.0.1", "127.0.0.2"):
        reader, writer = await open_from(running, address)
        async with asyncio.timeout(20):
            assert (await reader.read()).startswith(b"HTTP/1.1 503")
        writer.close()
    assert b"[DONE]" in await answering[0].readuntil(b"[DONE]")
    closed = 0
    for reader, _ in (slow, resting, silent):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                with contextlib.suppress(ConnectionError):
                    await reader.read()
                closed += 1
    assert closed == 2
    for _, writer in [*held, *others]:
        writer.close()


async def test_a_client_with_too_many_connections_gets_the_reason(start: Start) -> None:
    running = await start(settings={"max_connections_per_client": 2})
    await running.http.aclose()
    held = [await open_from(running, "127.0.0.2") for _ in range(2)]
    reader, writer = await open_from(running, "127.0.0.2")
    async with asyncio.timeout(20):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 429")
    error = json.loads(body)["error"]
    assert (error["reason"], "--max-connections-per-client" in error["message"]) == ("too_many_connections", True)
    other = await open_from(running, "127.0.0.1")
    other[1].write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    assert (await other[0].read()).startswith(b"HTTP/1.1 200")
    for _, each in [*held, other, (reader, writer)]:
        each.close()
