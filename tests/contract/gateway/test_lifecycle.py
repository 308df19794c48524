"""Clients that go away, schedulers that die, gateways that stop."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.v1 import common_pb2
from services.client import AsyncPacelineClient, Result
from services.gateway.text.tokenizer import TextTokenizer
from tests.contract.gateway.conftest import MODEL, Running, Start, eventually, until, until_metrics
from tests.contract.gateway.test_openai import CHECKPOINT

TOKENIZER = TextTokenizer.from_folder(CHECKPOINT)


def body(**options: Any) -> dict[str, Any]:
    return {"prompt": [7, 8, 9], "max_tokens": 200, "ignore_eos": True, "seed": 1, **options}


def expected_text(running: Running, prompt: list[int], num_tokens: int, *, temperature: float = 1.0) -> str:
    """What an undisturbed run gives."""
    sampling = running.scheduler.submissions[0].sampling
    assert sampling.temperature == temperature
    ids = [running.scheduler.next_token(prompt, i, sampling) for i in range(num_tokens)]
    detokenizer = TOKENIZER.detokenizer()
    return detokenizer.push(ids) + detokenizer.finish()


async def read_text(response: Any, parts: list[str]) -> str:
    """The whole text. `parts` gets each piece when it arrives."""
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            data = json.loads(line[6:])
            assert "error" not in data, data
            parts += [choice["text"] for choice in data["choices"]]
    return "".join(parts)


@pytest.mark.parametrize("when", ["queued", "streaming", "whole"])
async def test_a_client_that_goes_away_is_cancelled_at_the_scheduler(start: Start, when: str) -> None:
    running = await start(step_s=0.005)
    running.scheduler.paused = when == "queued"
    task = asyncio.create_task(
        running.http.post("/v1/completions", json=body(max_tokens=2000, stream=when == "streaming"))
    )
    await until(lambda: running.scheduler.num_running == 1)
    await asyncio.sleep(0.03)
    task.cancel()
    await until(lambda: len(running.scheduler.cancels) == 1)
    await until(lambda: running.scheduler.num_running == 0)
    aborted = 'requests_total{endpoint="completion",finish_reason="abort"} 1.0'
    await until_metrics(running, aborted, "paceline_gateway_live_requests 0.0")
    assert len(running.scheduler.cancels) == 1, "once"


async def test_a_cancel_storm_leaves_nothing_behind(start: Start) -> None:
    running = await start()
    running.scheduler.step_s = 0.002
    tasks = []
    for i in range(120):
        tasks.append(asyncio.create_task(running.http.post("/v1/completions", json=body(max_tokens=60, seed=i))))
        if i % 3 == 0:
            await asyncio.sleep(0.001)
            tasks[-1].cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(not isinstance(answer, BaseException) for answer in done) == 80
    await until(lambda: running.scheduler.num_running == 0)
    await until_metrics(running, "paceline_gateway_live_requests 0.0")


async def test_a_stalled_reader_holds_up_no_other(start: Start) -> None:
    running = await start(tokens_per_step=8)
    assert running.addresses.http is not None
    host, port = running.addresses.http.split(":")
    content = json.dumps(body(max_tokens=2000, stream=True)).encode()
    stalled = []
    for _ in range(4):
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
        writer.write(b"content-length: %d\r\n\r\n" % len(content) + content)
        stalled.append(writer)
    answer = await running.http.post("/v1/completions", json=body(max_tokens=500))
    assert answer.json()["usage"]["completion_tokens"] == 500
    await until(lambda: running.scheduler.num_running == 0)
    assert running.scheduler.max_ahead <= 64
    for writer in stalled:
        writer.close()


@pytest.mark.parametrize("how", ["server dies", "stream breaks"])
async def test_a_scheduler_that_dies_is_only_a_pause(start: Start, how: str) -> None:
    running, num_tokens = await start(step_s=0.002), 400
    streamed: list[list[str]] = [[] for _ in range(0, 20, 2)]

    async def one(i: int) -> str:
        # No seed: the gateway chooses one, and keeps it when it submits the request again.
        request = body(prompt=[7, 8, 9 + i], max_tokens=num_tokens, stream=i % 2 == 0)
        del request["seed"]
        async with running.http.stream("POST", "/v1/completions", json=request) as response:
            assert response.status_code == 200
            if i % 2 == 0:
                return await read_text(response, streamed[i // 2])
            return str(json.loads(await response.aread())["choices"][0]["text"])

    tasks = [asyncio.create_task(one(i)) for i in range(20)]
    running.scheduler.paused = True
    for _ in range(2):
        await until(lambda: running.scheduler.num_running == 20)
        before = [len(parts) for parts in streamed]
        running.scheduler.paused = False
        await until(lambda before=before: all(len(parts) > n for parts, n in zip(streamed, before, strict=True)))  # type: ignore[misc]
        running.scheduler.paused = True
        if how == "server dies":
            await running.scheduler.stop()
            assert (await running.http.get("/health")).status_code == 200
            await running.until_ready(503)
            await asyncio.sleep(0.1)
            await running.scheduler.start()
        else:
            running.scheduler.break_streams()
            await running.until_ready(503)
    running.scheduler.paused = False
    texts = await asyncio.gather(*tasks)
    first = running.scheduler.submissions[:20]
    again = [s for s in running.scheduler.submissions[20:] if s.accepted_before]
    assert len(again) >= 20
    assert any(s.output_token_ids for s in again)
    sampling = {s.prompt_token_ids: s.sampling for s in first}
    assert all(sampling[s.prompt_token_ids] == s.sampling for s in again)
    for i, text in enumerate(texts):
        prompt = [7, 8, 9 + i]
        key = b"".join(t.to_bytes(4, "little") for t in prompt)
        ids = [running.scheduler.next_token(prompt, position, sampling[key]) for position in range(num_tokens)]
        detokenizer = TOKENIZER.detokenizer()
        assert text == detokenizer.push(ids) + detokenizer.finish()


async def test_a_gateway_serves_before_its_scheduler_is_there(start: Start) -> None:
    running = await start(scheduler_up=False)
    assert (await running.http.get("/health")).status_code == 200
    response = await running.http.get("/ready")
    assert response.status_code == 503
    assert response.json()["reason"] == "no connection to the scheduler"
    assert (await running.http.get("/v1/models")).json()["data"][0]["max_model_len"] == 2048
    waiting = asyncio.create_task(running.http.post("/v1/completions", json=body(max_tokens=5)))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await running.scheduler.start()
    assert (await waiting).status_code == 200


async def test_waiting_for_a_scheduler_ends_in_503(start: Start) -> None:
    running = await start(scheduler_up=False, settings={"scheduler_wait_s": 0.3})
    response = await running.http.post("/v1/completions", json=body())
    assert response.status_code == 503
    assert "no connection to the scheduler" in response.json()["error"]["message"]


async def test_readiness_follows_the_scheduler_over_http_and_grpc(start: Start) -> None:
    running = await start()
    async with grpc.aio.insecure_channel(running.addresses.grpc or "") as channel:
        health = health_pb2_grpc.HealthStub(channel)

        async def serving() -> bool:
            service = "paceline.v1.InferenceService"
            reply = await health.Check(health_pb2.HealthCheckRequest(service=service))
            return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

        async def not_serving() -> bool:
            return not await serving()

        await eventually(serving)
        running.scheduler.set_ready(False)
        await running.until_ready(503)
        assert (await running.http.get("/ready")).json()["reason"] == "no worker is attached, or all are draining"
        await eventually(not_serving)
        running.scheduler.set_ready(True)
        await running.until_ready(200)
        await eventually(serving)


async def test_a_gateway_that_stops_finishes_what_runs(start: Start) -> None:
    running = await start(step_s=0.003)
    task = asyncio.create_task(running.http.post("/v1/completions", json=body(max_tokens=200)))
    await until(lambda: running.scheduler.num_running == 1)
    running.stop.set()
    answer = await task
    assert answer.json()["choices"][0]["text"] == expected_text(running, [7, 8, 9], 200)
    await asyncio.wait_for(running.task, 30)


async def test_while_a_gateway_stops_open_connections_are_served_and_new_ones_refused(start: Start) -> None:
    running = await start(step_s=0.003)
    limits = httpx.Limits(max_connections=2)
    async with httpx.AsyncClient(base_url=running.http.base_url, limits=limits, trust_env=False) as http:
        await asyncio.gather(http.get("/health"), http.get("/health"))
        task = asyncio.create_task(http.post("/v1/completions", json=body(max_tokens=200)))
        await until(lambda: running.scheduler.num_running == 1)
        running.scheduler.paused = True  # so that it does not end before all this has happened
        # This connection may still be in the kernel's accept queue when the socket closes: it must not be reset.
        reader, writer = await asyncio.open_connection(running.http.base_url.host, running.http.base_url.port)
        running.stop.set()
        served = await http.get("/ready")  # on the connection that is left
        assert (served.status_code, served.json()["reason"]) == (503, "draining")
        assert served.headers["connection"] == "close"
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")  # to the end: it is closed
        writer.close()
        with pytest.raises(httpx.ConnectError):
            await http.get("/ready")
        running.scheduler.paused = False
        assert (await task).json()["choices"][0]["text"] == expected_text(running, [7, 8, 9], 200)
    await asyncio.wait_for(running.task, 30)


async def test_a_gateway_that_stops_ends_its_grpc_calls(start: Start) -> None:
    running = await start(step_s=0.003)
    async with AsyncPacelineClient(running.addresses.grpc or "") as client:
        task = asyncio.create_task(client.generate(token_ids=[7, 8, 9], max_tokens=200, ignore_eos=True, seed=1))
        await until(lambda: running.scheduler.num_running == 1)
        running.stop.set()
        assert (await task).text == expected_text(running, [7, 8, 9], 200)
    await asyncio.wait_for(running.task, 30)


async def test_requests_that_outlast_the_drain_get_503(start: Start) -> None:
    running = await start(step_s=0.02, settings={"drain_s": 0.2})
    async with running.http.stream("POST", "/v1/completions", json=body(max_tokens=2000, stream=True)) as begun:
        task = asyncio.create_task(running.http.post("/v1/completions", json=body(max_tokens=2000)))
        assert begun.status_code == 200  # with its first token
        await until(lambda: running.scheduler.num_running == 2)
        running.stop.set()
        answer = await asyncio.wait_for(task, 30)
        assert answer.status_code == 503
        assert "the server is shutting down" in answer.text
        assert "the server is shutting down" in (await begun.aread()).decode()
    await asyncio.wait_for(running.task, 30)


async def test_a_gateway_does_not_start_on_a_port_that_is_taken(start: Start) -> None:
    running = await start()
    http_port, grpc_port = (int((a or "").split(":")[1]) for a in (running.addresses.http, running.addresses.grpc))
    with pytest.raises(OSError, match="in use"):
        await start(settings={"port": http_port})
    with pytest.raises((OSError, RuntimeError), match=str(grpc_port)):
        await start(settings={"grpc_port": grpc_port})
    assert (await running.http.get("/v1/models")).json()["data"][0]["id"] == MODEL


async def test_a_request_from_before_the_scheduler_is_limited_by_the_model_of_its_workers(start: Start) -> None:
    model = common_pb2.ModelInfo(name="demo", vocab_size=1024, max_model_len=100, eos_token_ids=[5, 1])
    running = await start(scheduler_up=False, model=model)
    body = {"messages": [{"role": "user", "content": "one two three"}]}  # no max_tokens; the files say 2048

    async def over_grpc() -> Result:
        async with AsyncPacelineClient(running.addresses.grpc or "") as client:
            return await client.generate("one two three")

    chat = asyncio.create_task(running.http.post("/v1/chat/completions", json=body))
    generated = asyncio.create_task(over_grpc())
    await asyncio.sleep(0.2)
    await running.scheduler.start()
    response = await chat
    assert response.status_code == 200, response.text
    await generated
    for submission in running.scheduler.submissions:
        assert len(submission.prompt_token_ids) // 4 + submission.sampling.max_tokens == 100


async def test_a_request_waits_longer_for_the_first_worker_than_for_a_scheduler(start: Start) -> None:
    running = await start(scheduler_up=False, settings={"scheduler_wait_s": 0.2})
    body = {"messages": [{"role": "user", "content": "one two three"}]}
    unserved = await running.http.post("/v1/chat/completions", json=body)
    assert (unserved.status_code, "no connection to the scheduler" in unserved.text) == (503, True)
    running.scheduler.ready = False  # its worker still loads, and the model is not known yet
    await running.scheduler.start()
    await until(lambda: bool(running.scheduler.streams))
    chat = asyncio.create_task(running.http.post("/v1/chat/completions", json=body))
    done, _ = await asyncio.wait([chat], timeout=0.6)
    assert not done
    running.scheduler.set_ready(True)
    response = await chat
    assert response.status_code == 200, response.text
