"""The queues inside a gateway have limits."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import pytest

from paceline.v1 import inference_pb2, inference_pb2_grpc
from services.client import AsyncPacelineClient
from services.client.types import PacelineError
from services.gateway import server
from services.gateway.grpc.inference_service import InferenceService
from services.gateway.text.tokenizer import TextTokenizer
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


async def test_texts_that_wait_to_be_tokenised_count_towards_the_limit_of_bodies(
    start: Start, stuck: threading.Event
) -> None:
    running = await start(settings={"max_bodies_bytes": 5 * len(LONG)})
    tasks = [post(running, LONG) for _ in range(12)]
    await until(lambda: sum(task.done() for task in tasks) >= 8)
    assert await post(running, "short") == 200
    stuck.set()
    assert sorted(await asyncio.gather(*tasks)) == [200] * 4 + [429] * 8
    await until_served(running, 4 * LONG)  # all bytes were given back


async def test_texts_of_grpc_messages_count_towards_the_limit_of_bodies(start: Start, stuck: threading.Event) -> None:
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


async def test_many_short_texts_are_tokenised_off_the_event_loop_as_a_long_one_is(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start()
    loop_thread, threads = threading.current_thread(), set()
    encode = TextTokenizer.encode

    def watched(self: TextTokenizer, text: str, **options: Any) -> list[int]:
        threads.add(threading.current_thread() is loop_thread)
        return encode(self, text, **options)

    monkeypatch.setattr(TextTokenizer, "encode", watched)
    for prompts, on_loop in ((["x" * 1000] * 4, True), (["x" * 1000] * 5, False)):
        threads.clear()
        answer = await running.http.post("/v1/completions", json={"prompt": prompts, "max_tokens": 1})
        assert (answer.status_code, threads) == (200, {on_loop})


async def test_many_ids_are_detokenised_off_the_event_loop(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    running, go_on = await start(), threading.Event()

    def decode(self: TextTokenizer, ids: Any, **options: Any) -> str:
        go_on.wait(20)
        return f"{len(ids)} tokens"

    monkeypatch.setattr(TextTokenizer, "decode", decode)
    detokenized = asyncio.create_task(running.http.post("/detokenize", json={"tokens": [7] * 131_072}))
    try:
        assert await post(running, "short") == 200
    finally:
        go_on.set()
    assert (await detokenized).json() == {"prompt": "131072 tokens"}


async def test_a_large_body_is_answered_as_a_small_one_is(start: Start) -> None:
    running = await start(settings={"max_body_bytes": 4 * 2**20})
    junk: dict[str, Any] = {"metadata": {"junk": [{}] * 100_000}}
    for path, body in (
        ("/v1/completions", {"prompt": "hello", "max_tokens": 4, "temperature": 0}),
        ("/v1/completions", {"prompt": [7, 8], "max_tokens": 4, "temperature": 0}),
        ("/tokenize", {"prompt": "hello"}),
        ("/v1/completions", {"prompt": "hello", "max_tokens": -1}),
        ("/v1/completions", {"prompt": "hello", "model": "other"}),
    ):
        small = await running.http.post(path, json=body)
        large = await running.http.post(path, json=body | junk)
        ignored = {"id", "created"}
        assert large.status_code == small.status_code
        assert {k: v for k, v in large.json().items() if k not in ignored} == {
            k: v for k, v in small.json().items() if k not in ignored
        }
    key = {"Idempotency-Key": "large"}
    body = {"prompt": "hello", "max_tokens": 4}
    first = (await running.http.post("/v1/completions", json=body | junk, headers=key)).json()
    assert (await running.http.post("/v1/completions", json=body | junk, headers=key)).json() == first
    other = await running.http.post("/v1/completions", json=body, headers=key)
    assert (other.status_code, other.json()["error"]["reason"]) == (422, "idempotency_key_reused")


async def test_sequences_that_each_copy_large_options_are_bounded(start: Start) -> None:
    running = await start()
    bias = {str(token): 1 for token in range(1000)}
    for prompts, n, status in ((1, 64, 200), (4, 64, 400), (128, 1, 400), (128, 2, 200)):
        body = {
            "prompt": [[7]] * prompts,
            "n": n,
            "max_tokens": 1,
            "logit_bias": bias if status == 400 or n == 64 else {},
        }
        answer = await running.http.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json().get("error", {}).get("param")) == (
            status,
            "n" if status == 400 else None,
        )


async def test_bodies_and_messages_have_one_limit_that_follows_the_context(start: Start) -> None:
    for settings, limit in (({}, 2**20), ({"max_body_bytes": 2**18}, 2**18)):
        running = await start(settings=settings)
        assert await post(running, "x" * limit) == 413
        assert await post(running, "x" * (limit - 100)) == 400  # too many tokens
        async with AsyncPacelineClient(running.addresses.grpc or "") as client:
            assert await generate(client, "x" * (limit + 100)) is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await generate(client, "x" * (limit - 100)) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_grpc_request_does_not_stay_in_memory_while_its_answer_is_streamed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start(step_s=0.01)
    requests: list[inference_pb2.GenerateRequest] = []
    make_job = InferenceService._job

    def watched(self: InferenceService, request: inference_pb2.GenerateRequest, *rest: Any) -> Any:
        requests.append(request)
        return make_job(self, request, *rest)

    monkeypatch.setattr(InferenceService, "_job", watched)
    async with grpc.aio.insecure_channel(running.addresses.grpc or "") as channel:
        message = inference_pb2.GenerateRequest(text="hello")
        message.sampling.max_tokens = 500
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(message)
        await call.read()
        references = sys.getrefcount(requests.pop())
        assert references == 1  # the list held the last reference
        call.cancel()


async def test_freed_memory_is_given_back_when_no_body_has_come_for_a_while(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    trims: list[int] = []
    monkeypatch.setattr(server, "trim_memory", lambda: trims.append(1))
    monkeypatch.setattr(server, "_TRIM_S", 0.01)
    monkeypatch.setattr(server, "_TRIMMED_BYTES", 10_000)
    running = await start()
    await post(running, "x" * 4000)
    await post(running, "x" * 4000)
    assert not trims
    await post(running, "x" * 4000)
    await until(lambda: len(trims) == 1)
    await asyncio.sleep(0.1)
    assert len(trims) == 1


async def test_grpc_connections_without_a_request_are_closed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_HANDSHAKE_S", 0.2)
    monkeypatch.setattr(server, "_IDLE_CALLS_S", 0.2)
    running = await start()
    host, port = str(running.addresses.grpc).split(":")
    for said in (b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(said)
        async with asyncio.timeout(20):
            await reader.read()
        writer.close()
    async with AsyncPacelineClient(running.addresses.grpc or "") as client:
        for _ in range(2):
            assert await generate(client, "hello") is grpc.StatusCode.OK
            await asyncio.sleep(0.5)


async def test_grpc_connections_leave_file_descriptors_for_http(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that opens as many connections as it can locks out neither HTTP nor open connections."""
    monkeypatch.setattr(server, "max_open_files", lambda: 40)
    running = await start()
    host, port = str(running.addresses.grpc).split(":")
    async with AsyncPacelineClient(running.addresses.grpc or "") as client:
        assert await generate(client, "hello") is grpc.StatusCode.OK
        answers, writers = [], []
        for _ in range(15):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
            writers.append(writer)
            with contextlib.suppress(ConnectionResetError):
                async with asyncio.timeout(20):
                    answers.append(await reader.read(9))
        assert len([answer for answer in answers if answer]) == 9  # with the client's own, 10: a quarter of 40
        assert await generate(client, "hello") is grpc.StatusCode.OK
        assert await post(running, "hello") == 200
        for writer in writers:
            writer.close()


async def test_a_grpc_request_that_is_refused_does_not_stay_in_memory(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start()
    requests: list[inference_pb2.GenerateRequest] = []
    make_job = InferenceService._job

    async def watched(self: InferenceService, request: inference_pb2.GenerateRequest, *rest: Any) -> Any:
        requests.append(request)
        return await make_job(self, request, *rest)

    monkeypatch.setattr(InferenceService, "_job", watched)
    gc.disable()
    try:
        async with AsyncPacelineClient(running.addresses.grpc or "") as client:
            assert await generate(client, "x " * 100_000) is grpc.StatusCode.INVALID_ARGUMENT
        await until(lambda: sys.getrefcount(requests[0]) == 2)  # the references of the list and of getrefcount
    finally:
        gc.enable()
