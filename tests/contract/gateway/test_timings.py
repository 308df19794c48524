"""Where the time of a request went, as its answer says: `timings` with llama.cpp's names, and Server-Timing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from paceline.v1 import inference_pb2
from tests.contract.gateway.conftest import MODEL, Running, Start, until
from tests.support.sse import parse_events

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
CHAT: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
LLAMA_CPP = {
    "cache_n",
    "prompt_n",
    "prompt_ms",
    "prompt_per_token_ms",
    "prompt_per_second",
    "predicted_n",
    "predicted_ms",
    "predicted_per_token_ms",
    "predicted_per_second",
}
OURS = {"queue_ms", "cache_device_n", "cache_host_n", "preemptions", "restarts"}


async def events(running: Running, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = await running.http.post(path, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    return [json.loads(event.data) for event in parse_events(answer.text.splitlines()) if event.data != "[DONE]"]


async def test_a_whole_answer_has_the_schedulers_times(start: Start) -> None:
    running = await start()
    running.scheduler.timing = inference_pb2.RequestTiming(
        queue_s=0.25, prefill_s=0.5, decode_s=1.5, num_preemptions=2, num_cached_host_tokens=2, num_losses=1
    )
    answer = await running.http.post(COMPLETIONS, json={"prompt": [7, 8, 9, 10, 11], "max_tokens": 6})
    took = answer.json()["timings"]
    assert took.keys() == LLAMA_CPP | OURS
    assert took == {
        "cache_n": 3,
        "prompt_n": 2,
        "prompt_ms": 500.0,
        "prompt_per_token_ms": 250.0,
        "prompt_per_second": 4.0,
        "predicted_n": 6,
        "predicted_ms": 1500.0,
        "predicted_per_token_ms": 250.0,
        "predicted_per_second": 4.0,
        "queue_ms": 250.0,
        "cache_device_n": 1,
        "cache_host_n": 2,
        "preemptions": 2,
        "restarts": 1,
    }
    assert answer.headers["server-timing"] == "queue;dur=250, prompt;dur=500, predicted;dur=1500"


async def test_samples_share_the_prompt_and_add_their_output(running: Running) -> None:
    answer = (await running.http.post(COMPLETIONS, json={"prompt": [[7] * 5, [8] * 4], "n": 2, "max_tokens": 3})).json()
    took = answer["timings"]
    assert (took["cache_n"], took["prompt_n"], took["predicted_n"]) == (6, 3, 12)
    assert (took["prompt_ms"], took["preemptions"]) == (500.0, 8)
    assert took["cache_n"] + took["prompt_n"] == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("usage", [False, True])
async def test_the_last_event_of_a_stream_has_the_timings(running: Running, n: int, usage: bool) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": "x y z"}), (CHATS, {"messages": CHAT})):
        options: dict[str, Any] = {"stream_options": {"include_usage": True}} if usage else {}
        found = await events(running, path, max_tokens=4, n=n, **options, **prompt)
        assert [event for event in found if "timings" in event] == found[-1:]
        assert found[-1]["timings"].keys() == LLAMA_CPP | OURS
        assert found[-1]["timings"]["predicted_n"] == 4 * n
        assert bool(found[-1]["choices"]) is not usage


async def test_a_stream_tells_the_time_to_its_first_token_in_its_headers(running: Running) -> None:
    async with running.http.stream(
        "POST", COMPLETIONS, json={"prompt": "x", "max_tokens": 2, "stream": True}
    ) as answer:
        name, _, duration = answer.headers["server-timing"].partition(";dur=")
        await answer.aread()
    assert name == "ttft"
    assert float(duration) > 0


OTHER_APIS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/responses", {"input": "hello", "max_output_tokens": 4}),
    ("/v1/messages", {"model": MODEL, "messages": CHAT, "max_tokens": 4}),
]


@pytest.mark.parametrize(("path", "body"), OTHER_APIS)
async def test_answers_of_the_other_apis_have_timings(running: Running, path: str, body: dict[str, Any]) -> None:
    answer = await running.http.post(path, json=body)
    took = answer.json()["timings"]
    assert took.keys() == LLAMA_CPP | OURS
    assert (took["predicted_n"], took["queue_ms"]) == (4, 250.0)
    assert answer.headers["server-timing"].startswith("queue;dur=250, prompt;dur=500")
    if path == "/v1/responses":
        stored = await running.http.get(f"{path}/{answer.json()['id']}")
        assert stored.json()["timings"] == took


@pytest.mark.parametrize(("path", "body"), OTHER_APIS)
async def test_the_end_of_streams_of_the_other_apis_has_timings(
    running: Running, path: str, body: dict[str, Any]
) -> None:
    answer = await running.http.post(path, json=body | {"stream": True})
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    found = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert ("server-timing" in answer.headers) is (path == "/v1/messages")
    [last] = [event for event in found if event["type"] in ("response.incomplete", "message_delta")]
    assert (last.get("response") or last)["timings"]["predicted_n"] == 4


async def test_openais_client_reads_answers_with_timings(running: Running) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_tokens": 4}
    whole: Any = await running.openai.chat.completions.create(**options)
    assert whole.timings["predicted_n"] == 4
    chunks: list[Any] = [c async for c in await running.openai.chat.completions.create(**options, stream=True)]
    assert chunks[-1].timings["predicted_n"] == 4


async def test_an_answer_that_survived_its_scheduler_says_so(start: Start) -> None:
    """The new scheduler's times are those of the rest of the answer, so they are not shown."""
    running = await start(step_s=0.02)
    task = running.http.post(COMPLETIONS, json={"prompt": [7, 8], "max_tokens": 20})
    asking = asyncio.create_task(task)
    await until(lambda: any(one.output > 2 for stream in running.scheduler.streams for one in stream.running.values()))
    running.scheduler.break_streams()
    took = (await asking).json()["timings"]
    assert (took["restarts"], took["queue_ms"], took["predicted_n"]) == (1, None, 20)
    assert 0 < took["predicted_ms"] != 1500.0
    assert took["prompt_ms"] > 0


async def test_an_answer_without_output_has_no_rates(running: Running) -> None:
    body = {"prompt": [7, 8, 9, 10], "max_tokens": 0, "echo": True}
    took = (await running.http.post(COMPLETIONS, json=body)).json()["timings"]
    assert (took["predicted_n"], took["predicted_per_token_ms"]) == (0, None)
