"""The Responses API over HTTP, with OpenAI's client: text, tools, reasoning, conversations, background, cancel."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import openai
import pytest

from paceline.v1 import common_pb2, inference_pb2
from services.gateway.access.caller import ANYONE
from services.gateway.responses_api.running import RunningResponse
from services.gateway.responses_api.schema import IGNORED, REFUSED, ResponsesRequest
from services.gateway.responses_api.service import Responses
from services.gateway.store.records import StoredResponse
from services.gateway.store.sqlite_file import SqliteFile
from services.gateway.store.sqlite_store import SqliteStore
from tests.contract.gateway.conftest import MODEL, Running, Start, eventually, until
from tests.contract.gateway.test_tools import CITY, HERMES, PARIS, THINKS, TOKENIZER, TWO_CALLS, says
from tests.support.redis_server import RedisProcess, needs_redis

PATH = "/v1/responses"
TOOLS: Any = [
    {"type": "function", "name": "get_weather", "parameters": CITY, "strict": False},
    {"type": "function", "name": "now", "description": "The time.", "parameters": None, "strict": None},
]
ROLES = (
    HERMES
    + "{% for m in messages %}[{{ m.role }}: {{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}]{% endfor %}"
)


@pytest.fixture
def stored(tmp_path: Path) -> dict[str, Any]:
    """Settings of gateways that share a store."""
    return {"response_store": f"sqlite:///{tmp_path}/responses.db"}


async def create(running: Running, **fields: Any) -> Any:
    asked: dict[str, Any] = {"model": MODEL, "input": "Once", "max_output_tokens": 8, **fields}
    return await running.openai.responses.create(**asked)


async def stream_of(running: Running, **fields: Any) -> list[Any]:
    return [event async for event in await create(running, stream=True, **fields)]


async def done(running: Running, response_id: str) -> Any:
    found: list[Any] = []

    async def is_done() -> bool:
        found.append(await running.openai.responses.retrieve(response_id))
        return found[-1].status != "in_progress"

    await eventually(is_done)
    return found[-1]


async def refused(running: Running, **body: Any) -> tuple[int, str]:
    answer = await running.http.post(PATH, json={"input": "x"} | body)
    return answer.status_code, answer.json()["error"]["param"]


def prompt_of(submission: inference_pb2.Submission) -> str:
    ids = memoryview(submission.prompt_token_ids).cast("i").tolist()
    return TOKENIZER.decode(ids, skip_special_tokens=False)


async def test_a_response_is_what_openais_client_expects(start: Start, stored: dict[str, Any]) -> None:
    running = await start(settings=stored)
    whole = await create(running, metadata={"a": "b"}, instructions="Be brief.", temperature=0.7, max_output_tokens=5)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (whole.metadata, whole.instructions, whole.temperature, whole.store) == ({"a": "b"}, "Be brief.", 0.7, True)
    assert whole.usage.output_tokens == 5
    assert whole.usage.total_tokens == 5 + whole.usage.input_tokens
    assert whole.usage.input_tokens_details.cached_tokens == 3
    [item] = whole.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "incomplete")
    assert await running.openai.responses.retrieve(whole.id) == whole


async def test_events_are_numbered_and_tell_the_whole_response(start: Start, stored: dict[str, Any]) -> None:
    running = await start(settings=stored, **says("Hello there, fox."))
    events = await stream_of(running, max_output_tokens=50)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == "Hello there, fox."
    assert len(deltas) > 3
    others = [event.type for event in events if event not in deltas]
    assert others == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    last = events[-1].response
    assert last == await running.openai.responses.retrieve(last.id)
    for seen in (0, 5, len(events) - 1, len(events) + 5):
        rest = await running.openai.responses.retrieve(last.id, stream=True, starting_after=seen)
        assert [event async for event in rest] == events[seen + 1 :]


async def test_events_do_not_depend_on_how_tokens_arrive(start: Start, stored: dict[str, Any]) -> None:
    told = []
    for tokens_per_step in (1, 7):
        running = await start(settings=stored, tokens_per_step=tokens_per_step)
        async with running.http.stream(
            "POST", PATH, json={"input": "x", "max_output_tokens": 60, "seed": 3, "stream": True, "store": False}
        ) as answer:
            lines = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
        events = [json.loads(line[6:]) for line in lines]
        told.append([(e["sequence_number"], e["type"], e.get("delta"), e.get("text")) for e in events])
    assert told[0] == told[1]


async def test_a_stream_goes_on_at_another_gateway(start: Start, stored: dict[str, Any]) -> None:
    first = await start(settings=stored)
    second = await start(settings=stored, tokens_per_step=5)
    for background in (False, True):
        right = await stream_of(second, max_output_tokens=100, extra_body={"seed": 5}, store=False)
        first.scheduler.step_s = 0.005
        stream = await create(first, stream=True, max_output_tokens=100, extra_body={"seed": 5}, background=background)
        events = [await anext(stream) for _ in range(20)]
        first.scheduler.paused = True
        response_id, seen = events[0].response.id, events[-1].sequence_number
        events += [
            e async for e in await second.openai.responses.retrieve(response_id, stream=True, starting_after=seen)
        ]
        texts = ([e.delta for e in got if e.type == "response.output_text.delta"] for got in (events, right))
        assert next(texts) == next(texts)
        assert [e.type for e in events] == [e.type for e in right]
        assert [e.sequence_number for e in events] == list(range(len(right)))
        stored_response = await second.openai.responses.retrieve(response_id)
        assert stored_response == events[-1].response
        first.scheduler.paused = False
        # The first gateway learns of the end, and its client gets the rest.
        rest = [event async for event in stream]
        assert [e.sequence_number for e in rest] == list(range(20, len(right)))
        await until(lambda: first.scheduler.num_running == 0)


async def test_a_refused_resume_keeps_the_response(start: Start, stored: dict[str, Any]) -> None:
    first, second = await start(settings=stored), await start(settings=stored)
    first.scheduler.step_s = 0.005
    stream = await create(first, stream=True, max_output_tokens=300)
    response_id = (await anext(stream)).response.id
    ending = inference_pb2.Ending(reason=common_pb2.FINISH_REASON_ERROR, message="full")
    second.scheduler.reject = lambda submission: ending
    for ending.code, status in ((8, 429), (14, 503)):
        answer = await second.http.get(f"{PATH}/{response_id}?stream=true&starting_after=3")
        assert answer.status_code == status
    second.scheduler.reject = lambda submission: None
    again = await second.openai.responses.retrieve(response_id, stream=True, starting_after=0)
    rest = [event async for event in again]
    assert rest[-1].type == "response.incomplete"
    assert [event async for event in stream] == rest


async def test_a_response_gets_503_when_its_gateway_stops(start: Start, stored: dict[str, Any]) -> None:
    running = await start(settings=stored | {"drain_s": 0.0})
    running.scheduler.paused = True
    waiting = asyncio.create_task(running.http.post(PATH, json={"input": "x", "store": False}))
    await until(lambda: running.scheduler.num_running == 1)
    running.stop.set()
    assert (await waiting).status_code == 503
    await running.task


async def test_a_resumed_response_goes_on_behind_the_stored_tokens(start: Start, stored: dict[str, Any]) -> None:
    first, second = await start(settings=stored), await start(settings=stored)
    first.scheduler.step_s = 0.005
    response = await create(first, background=True, max_output_tokens=200)
    await until(
        lambda: any(
            stream.running and next(iter(stream.running.values())).output > 20 for stream in first.scheduler.streams
        )
    )
    first.scheduler.paused = True
    await asyncio.sleep(1.5)  # the gateway renews its leases each second
    stream: Any = await second.openai.responses.retrieve(response.id, stream=True)
    events = [event async for event in stream]
    [submission] = second.scheduler.submissions
    assert len(submission.output_token_ids) // 4 > 20
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.usage.output_tokens == 200
    first.scheduler.paused = False


async def test_tool_calls_and_their_outputs(start: Start, stored: dict[str, Any]) -> None:
    running = await start(settings=stored | {"chat_template": ROLES}, **says(TWO_CALLS))
    whole = await create(running, input="Weather?", tools=TOOLS, max_output_tokens=200)
    message, weather, now = whole.output
    assert (whole.status, message.content[0].text) == ("completed", "I will look.")
    assert (weather.type, weather.name, weather.arguments, weather.status) == (
        "function_call",
        "get_weather",
        PARIS,
        "completed",
    )
    assert (now.name, now.arguments) == ("now", "{}")
    assert weather.call_id.startswith("call_")
    assert weather.call_id != now.call_id

    events = await stream_of(running, input="Weather?", tools=TOOLS, max_output_tokens=200)
    assert [e.sequence_number for e in events] == list(range(len(events)))
    arguments: dict[int, str] = {}
    for event in events:
        if event.type == "response.function_call_arguments.delta":
            arguments[event.output_index] = arguments.get(event.output_index, "") + event.delta
    assert arguments == {1: PARIS, 2: "{}"}
    finished = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.type for item in finished] == ["message", "function_call", "function_call"]
    assert finished == events[-1].response.output

    outputs: Any = [{"type": "function_call_output", "call_id": weather.call_id, "output": "21 °C"}]
    running.scheduler.submissions.clear()
    await create(running, previous_response_id=whole.id, input=outputs, tools=TOOLS)
    calls = json.dumps([weather.name, now.name])[1:-1].split(", ")
    prompt = prompt_of(running.scheduler.submissions[0])
    assert "[user: Weather?][assistant: I will look.[{" in prompt
    assert all(name in prompt for name in calls)
    assert prompt.endswith("[tool: 21 °C]")
    # The same conversation, sent whole.
    history: Any = [{"role": "user", "content": "Weather?"}, *(item.model_dump() for item in whole.output), *outputs]
    await create(running, input=history, tools=TOOLS)
    assert prompt_of(running.scheduler.submissions[1]) == prompt


async def test_a_forced_call_and_a_schema_bring_a_grammar(start: Start, stored: dict[str, Any]) -> None:
    running = await start(settings=stored, **says(TWO_CALLS.partition("\n")[2]))
    for choice in ("required", {"type": "function", "name": "now"}):
        await create(running, tools=TOOLS, tool_choice=choice, max_output_tokens=200)
    await create(running, text={"format": {"type": "json_schema", "name": "city", "schema": CITY}})
    await create(running, text={"format": {"type": "json_object"}})
    assert all(submission.sampling.grammar for submission in running.scheduler.submissions)
    await create(running, text={"format": {"type": "text"}})
    assert not running.scheduler.submissions[-1].sampling.grammar


async def test_reasoning_is_an_item_of_its_own(start: Start, stored: dict[str, Any]) -> None:
    running = await start(settings=stored | {"chat_template": THINKS}, **says("<think>\nHm, so.\n</think>\n\nYes, do."))
    events = await stream_of(running, max_output_tokens=50, reasoning={"effort": "low"})
    reasoning = "".join(e.delta for e in events if e.type == "response.reasoning_text.delta")
    thought, message = events[-1].response.output
    assert (thought.type, thought.content[0].text, reasoning) == ("reasoning", "Hm, so.", "Hm, so.")
    assert message.content[0].text == "Yes, do."
    usage = events[-1].response.usage
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens


async def test_log_probabilities(start: Start, stored: dict[str, Any]) -> None:
    running = await start(settings=stored)
    events = await stream_of(running, include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=6)
    [item] = events[-1].response.output
    entries = item.content[0].logprobs
    assert len(entries) == 6
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    delta_entries = [entry for e in events if e.type == "response.output_text.delta" for entry in e.logprobs]
    assert [entry.token for entry in delta_entries] == [entry.token for entry in entries]


async def test_background_responses_are_polled_and_cancelled(start: Start, stored: dict[str, Any]) -> None:
    running = await start(settings=stored)
    response = await create(running, background=True)
    assert (response.status, response.output, response.background) == ("queued", [], True)
    finished = await done(running, response.id)
    assert (finished.status, finished.usage.output_tokens) == ("incomplete", 8)
    assert (await running.openai.responses.cancel(response.id)).status == "incomplete", "it has ended"

    running.scheduler.step_s = 0.005
    stream = await create(running, background=True, stream=True, max_output_tokens=500)
    events = [await anext(stream) for _ in range(8)]
    response_id = events[0].response.id
    cancelled = await running.openai.responses.cancel(response_id)
    assert cancelled.status == "cancelled"
    events += [event async for event in stream]
    assert (events[-1].type, events[-1].response.status) == ("response.incomplete", "cancelled")
    assert [e.sequence_number for e in events] == list(range(len(events)))
    await until(lambda: running.scheduler.num_running == 0)
    assert (await running.openai.responses.retrieve(response_id)).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match=r"Cannot cancel a synchronous response\."):  # OpenAI's words
        await running.openai.responses.cancel((await create(running)).id)
    with pytest.raises(openai.BadRequestError, match="background needs `store` true"):
        await create(running, background=True, store=False)
    with pytest.raises(openai.NotFoundError, match=r"Response with id .* not found\."):
        await running.openai.responses.retrieve("resp_none")


async def test_a_stream_of_a_response_that_another_gateway_cancelled_has_its_last_event(
    start: Start, stored: dict[str, Any]
) -> None:
    first, second = await start(settings=stored, step_s=0.005), await start(settings=stored)
    stream = await create(first, background=True, stream=True, max_output_tokens=1500)
    seen = [await anext(stream) for _ in range(20)]
    await stream.close()
    await second.openai.responses.cancel(response_id := seen[0].response.id)
    await until(lambda: first.scheduler.num_running == 0)
    for running in (first, second):  # the response is stored without its output, so both can send only its last event
        rest: list[Any] = []

        async def reads_one(running: Running = running, rest: list[Any] = rest) -> bool:
            events = await running.openai.responses.retrieve(response_id, stream=True, starting_after=19)
            rest[:] = [event async for event in events]
            return len(rest) == 1

        await eventually(reads_one)  # for a moment the first gateway may still have the events that it has made
        [last] = rest
        assert last.type == "response.incomplete"
        assert (last.response.status, last.sequence_number) == ("cancelled", 20)


async def test_a_response_that_ends_before_its_first_step_frees_what_it_took() -> None:
    closed: list[bool] = []
    reading = SimpleNamespace(generations=[None], close=lambda: closed.append(True))
    responses = Responses(cast(Any, SimpleNamespace(open=lambda *_: reading)), None)
    response = RunningResponse(("", "resp_1"), {}, is_stored=False)
    assert await responses.begin(response, [], ANYONE, None)
    response.abandon()
    await asyncio.wait([cast(Any, response.task)])
    await asyncio.sleep(0)
    assert closed
    assert response.is_over
    assert responses.running("", "resp_1") is None


async def test_a_background_response_goes_on_without_its_client(start: Start, stored: dict[str, Any]) -> None:
    running = await start(settings=stored | {"resume_grace_s": 0.0}, step_s=0.005)
    stream = await create(running, background=True, stream=True, max_output_tokens=60)
    response_id = (await anext(stream)).response.id
    await stream.close()
    assert (await done(running, response_id)).usage.output_tokens == 60


async def test_a_drained_gateway_leaves_its_responses_to_another(start: Start, stored: dict[str, Any]) -> None:
    first = await start(settings=stored | {"drain_s": 0.0})
    second = await start(settings=stored)
    first.scheduler.paused = True
    response = await create(first, background=True)
    first.stop.set()
    await first.task
    finished = await done(second, response.id)
    assert (finished.status, finished.usage.output_tokens) == ("incomplete", 8)


async def test_many_responses_of_other_models_do_not_block_a_takeover(start: Start, stored: dict[str, Any]) -> None:
    first = await start(settings=stored | {"drain_s": 0.0})
    first.scheduler.paused = True
    response = await create(first, background=True)
    first.stop.set()
    await first.task
    path = Path(stored["response_store"].removeprefix("sqlite:///"))
    an_hour_ago = time.time() - 3600
    file = SqliteFile(path)
    store = SqliteStore(file, ttl_s=7200, max_bytes=2**20, clock=lambda: an_hour_ago)
    for i in range(70):
        assert await store.put(StoredResponse("", f"resp_{i}", "other", 0, True, b"", b"{}", b"{}"), 0.0)
    await file.close()
    second = await start(settings=stored)

    def is_done() -> bool:  # no client asks for it
        with closing(sqlite3.connect(path)) as database:
            sql = "SELECT status FROM responses WHERE id = ?"
            return bool(database.execute(sql, (response.id,)).fetchone() == ("incomplete",))

    await until(is_done)
    assert len(second.scheduler.submissions) == 1


async def test_a_conversation_goes_on(start: Start, stored: dict[str, Any]) -> None:
    running = await start(settings=stored | {"chat_template": ROLES}, **says("Fine."))
    first = await create(running, input="One", instructions="Short.", max_output_tokens=20)
    second = await create(running, input="Two", previous_response_id=first.id, max_output_tokens=20)
    await create(running, input="Three", previous_response_id=second.id, instructions="Long.", max_output_tokens=20)
    prompts = [prompt_of(submission) for submission in running.scheduler.submissions]
    assert prompts[0].endswith("[system: Short.][user: One]")
    assert prompts[1].endswith("[user: One][assistant: Fine.][user: Two]")
    assert "Short." not in prompts[1]
    assert prompts[2].endswith("[system: Long.][user: One][assistant: Fine.][user: Two][assistant: Fine.][user: Three]")
    await running.openai.responses.delete(first.id)
    for gone in (first.id, "resp_unknown"):
        with pytest.raises(openai.NotFoundError) as caught:
            await create(running, previous_response_id=gone)
        assert caught.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        await create(running, previous_response_id=second.id)
    with pytest.raises(openai.NotFoundError):
        await running.openai.responses.retrieve(first.id)
    running.scheduler.paused = True
    waiting = await create(running, background=True)
    with pytest.raises(openai.BadRequestError, match="in_progress"):
        await create(running, previous_response_id=waiting.id)
    await running.openai.responses.delete(waiting.id)
    await until(lambda: running.scheduler.cancels != [])
    running.scheduler.paused = False


async def test_input_items_are_listed_in_pages(start: Start, stored: dict[str, Any]) -> None:
    running = await start(settings=stored)
    texts = [f"m{i}" for i in range(5)]
    given: Any = [{"role": "user", "content": text} for text in texts]
    response = await create(running, input=given)
    listed: Any = running.openai.responses.input_items.list(response.id, order="asc", limit=2)
    assert [item.content[0].text async for item in listed] == texts
    newest: Any = await running.openai.responses.input_items.list(response.id)
    assert [item.content[0].text for item in newest.data] == texts[::-1]
    for query in ("order=up", "limit=0", "limit=x", "after=none"):
        answer = await running.http.get(f"{PATH}/{response.id}/input_items?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])


async def test_a_response_that_is_not_stored_is_not_found(start: Start, stored: dict[str, Any]) -> None:
    running = await start(settings=stored)
    response = await create(running, store=False)
    assert response.store is False
    with pytest.raises(openai.NotFoundError):
        await running.openai.responses.retrieve(response.id)
    assert await refused(running, background=True, store=False) == (400, "store")
    without = await start(settings={"response_store": "none"})
    assert (await create(without)).store is False
    assert await refused(without, background=True) == (400, "background")
    assert (await without.http.get(f"{PATH}/{response.id}")).status_code == 404


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [7]}, "input.0"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": 7}]}, "input.0.name"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "name": "a b"}], "tool_choice": "required"}, "tools.0.name"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"include": ["all"]}, "include"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"top_logprobs": 99}, "top_logprobs"),
        ({"n": 2}, "n"),
        ({"mesages": 1}, "mesages"),
    ],
)
async def test_wrong_fields_are_refused_by_name(running: Running, body: dict[str, Any], param: str) -> None:
    assert await refused(running, **body) == (400, param)


async def test_ignored_fields_change_nothing(start: Start, stored: dict[str, Any]) -> None:
    running = await start(settings=stored)
    more: Any = {"service_tier": "flex", "safety_identifier": "u", "prompt_cache_key": "k", "max_tool_calls": 3}
    assert (await create(running, **more, conversation=None)).status == "incomplete"


async def test_wrong_queries_are_refused_by_name(start: Start, stored: dict[str, Any]) -> None:
    running = await start(settings=stored)
    path = f"{PATH}/{(await create(running)).id}"
    for query, param in (
        ("starting_after=3", "starting_after"),
        ("stream=true&starting_after=-1", "starting_after"),
        ("stream=true&starting_after=x", "starting_after"),
        ("stream=maybe", "stream"),
    ):
        answer = await running.http.get(f"{path}?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_refused_request_has_its_status_and_leaves_nothing(start: Start, stored: dict[str, Any]) -> None:
    running = await start(settings=stored)
    ending = inference_pb2.Ending(reason=common_pb2.FINISH_REASON_ERROR, code=8, message="full")
    running.scheduler.reject = lambda submission: ending
    for stream in (False, True):
        headers = {"Idempotency-Key": f"k{stream}"}
        answer = await running.http.post(PATH, json={"input": "x", "stream": stream}, headers=headers)
        assert answer.status_code == 429
        running.scheduler.reject, kept = lambda submission: None, running.scheduler.reject
        body = {"input": "x", "stream": stream, "max_output_tokens": 3}
        assert (await running.http.post(PATH, json=body, headers=headers)).status_code == 200, "nothing was stored"
        running.scheduler.reject = kept
    broken = inference_pb2.Ending(reason=common_pb2.FINISH_REASON_ERROR, code=13, message="it kills workers")
    running.scheduler.reject = lambda submission: broken
    assert (await running.http.post(PATH, json={"input": "x"})).status_code == 500
    response = await create(running, background=True)
    failed = await done(running, response.id)
    assert (failed.status, failed.error.code, failed.error.message) == ("failed", "server_error", "it kills workers")


async def test_a_response_is_cancelled_when_its_client_leaves_and_ends_when_the_client_returns(
    start: Start, stored: dict[str, Any]
) -> None:
    running = await start(settings=stored | {"resume_grace_s": 0.2}, step_s=0.005)
    await create(running)
    with pytest.raises(openai.APITimeoutError):
        await create(running, max_output_tokens=1000, timeout=0.3)
    await until(lambda: running.scheduler.num_running == 0)
    database = sqlite3.connect(stored["response_store"].removeprefix("sqlite:///"))
    assert database.execute("SELECT count(*) FROM responses").fetchone() == (1,), (
        "the response that timed out is not stored: no client knows its id"
    )
    database.close()
    stream = await create(running, stream=True, max_output_tokens=1000)
    response_id = (await anext(stream)).response.id
    await stream.close()
    await until(lambda: running.scheduler.num_running == 0)
    assert running.scheduler.cancels
    # A client that asks again gets it all, and the server finishes the response.
    running.scheduler.step_s = 0.0
    assert (await running.openai.responses.retrieve(response_id)).status == "in_progress"
    assert (await done(running, response_id)).usage.output_tokens == 1000


async def test_a_request_sent_again_with_its_key_gets_the_same_response(start: Start, stored: dict[str, Any]) -> None:
    first, second = await start(settings=stored), await start(settings=stored)
    headers = {"Idempotency-Key": "one"}
    whole = await create(first, extra_headers=headers)
    for running in (first, second):
        assert await create(running, extra_headers=headers) == whole
        answer = await running.http.post(PATH, json={"input": "other"}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["reason"]) == (422, "idempotency_key_reused")
    assert not second.scheduler.submissions
    first.scheduler.step_s = 0.01
    headers = {"Idempotency-Key": "two"}
    both = await asyncio.gather(*(create(first, extra_headers=headers) for _ in range(3)))
    assert both[0] == both[1] == both[2]
    assert len(first.scheduler.submissions) == 2


@needs_redis
async def test_a_store_that_dies_costs_no_answer(start: Start, tmp_path: Path) -> None:
    server = await asyncio.to_thread(RedisProcess(tmp_path).start)
    try:
        running = await start(settings={"response_store": server.url})
        stored = await create(running)
        running.scheduler.step_s = 0.005
        stream = await create(running, stream=True, max_output_tokens=50)
        events = [await anext(stream) for _ in range(5)]
        await asyncio.to_thread(server.stop)
        events += [event async for event in stream]
        assert events[-1].response.usage.output_tokens == 50
        for method, path, body in (
            ("GET", f"{PATH}/{stored.id}", None),
            ("POST", PATH, {"input": "x", "stream": True}),
            ("POST", PATH, {"input": "x", "background": True}),
            ("POST", PATH, {"input": "x", "previous_response_id": stored.id}),
        ):
            answer = await running.http.request(method, path, json=body)
            assert (answer.status_code, answer.json()["error"]["reason"]) == (503, "store_unavailable")
        assert (await create(running)).store is False, "it could not be stored"
        assert (await create(running, store=False)).status == "incomplete"
        await until(lambda: running.scheduler.num_running == 0)
    finally:
        await asyncio.to_thread(server.stop)


async def test_no_value_in_any_field_is_an_internal_error(running: Running) -> None:
    names = [*ResponsesRequest.model_fields, *REFUSED, *IGNORED, "nonsense"]
    values: list[Any] = [None, True, -1, 2**70, 1e300, "", "x", [], [1], [None], [{}], {}, {"type": 1}, {"a": [[]]}]
    values += [
        [{"type": "message"}],
        [{"type": "function", "name": 1}],
        {"format": {"type": "json_schema", "schema": 1}},
    ]

    async def ask(name: str, value: Any) -> None:
        body = {"input": "x", "max_output_tokens": 1, "store": False, name: value}
        answer = await running.http.post(PATH, json=body)
        assert answer.status_code in (200, 400, 404), (name, value, answer.text)
        if answer.status_code != 200 and name not in ("background", "input"):
            assert (answer.json()["error"]["param"] or "").startswith(name), (name, value, answer.text)

    for name in names:
        await asyncio.gather(*(ask(name, value) for value in values))
