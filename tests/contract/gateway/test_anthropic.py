"""The Messages API over HTTP, with the unmodified Anthropic client, which checks the shape of every answer."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic, beta_async_tool
from llguidance import LLMatcher, LLTokenizer

from demo import CHECKPOINT
from services.gateway.anthropic import answers
from services.gateway.text.tokenizer import TextTokenizer
from tests.contract.gateway.conftest import MODEL, Running, Start, eventually, until, until_metrics
from tests.contract.gateway.fake_scheduler import scripted
from tests.contract.gateway.test_keys import Keys, launch
from tests.contract.gateway.test_keys import keys as keys

PATH = "/v1/messages"
CHAT: Any = [{"role": "user", "content": "Weather in Paris?"}]
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "messages": CHAT}
TEMPLATE = (
    "{{ tools | tojson if tools }}{% for m in messages %}<|{{ m.role }}|>{{ m.reasoning }}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HERMES = TEMPLATE + "{# <tool_call> #}"
THINKS = HERMES + "{# </think> #}{% if enable_thinking is false %}<think></think>{% endif %}"
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
TOOLS: Any = [
    {"name": "get_weather", "input_schema": CITY},
    {"name": "now", "description": "The time.", "input_schema": {"type": "object"}},
]
PARIS = '{"city": "Paris"}'
TWO_CALLS = (
    f'I will look.\n<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
TOKENIZER = TextTokenizer.from_folder(CHECKPOINT)
_END = 5


def says(text: str) -> dict[str, Any]:
    """The option of the fake scheduler that makes its model generate this text."""
    return {"next_token": scripted([*TOKENIZER.encode(text, add_special_tokens=False), _END])}


def client(running: Running, api_key: str = "none") -> AsyncAnthropic:
    return AsyncAnthropic(
        base_url=str(running.http.base_url),
        api_key=api_key,
        max_retries=0,
        timeout=20,
        _strict_response_validation=True,
    )


async def events(running: Running, **options: Any) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
    """The raw events of a stream."""
    body = ASKED | {"stream": True} | options
    name = ""
    async with running.http.stream("POST", PATH, json=body) as stream:
        assert stream.status_code == 200, await stream.aread()
        async for line in stream.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line:
                yield name, json.loads(line.removeprefix("data: "))


def content(message: Any) -> list[dict[str, Any]]:
    """The blocks of a message as the client has read them."""
    return [block.to_dict() for block in message.content]


async def refused(running: Running, path: str = PATH, **options: Any) -> str:
    found = await running.http.post(path, json=ASKED | options)
    assert found.status_code == 400, found.text
    said = found.json()
    assert said.keys() == {"type", "error", "request_id"}
    assert (said["type"], said["error"]["type"]) == ("error", "invalid_request_error")
    assert said["request_id"] == found.headers["request-id"] == found.headers["x-request-id"]
    return str(said["error"]["message"])


async def prompt_of(running: Running, **options: Any) -> str:
    """The text of the prompt that a request makes."""
    running.scheduler.submissions.clear()
    found = await running.http.post(PATH, json=ASKED | options)
    assert found.status_code == 200, found.text
    [submission] = running.scheduler.submissions
    ids = memoryview(submission.prompt_token_ids).cast("i").tolist()
    return TOKENIZER.decode(ids)


async def test_a_message(start: Start) -> None:
    running = await start(**says("Sunny."))
    async with client(running) as asked:
        raw = await asked.messages.with_raw_response.create(**ASKED)
    found = await raw.parse()
    assert raw.headers["request-id"] == found._request_id == raw.headers["x-request-id"]
    assert found.id == f"msg_{found._request_id}"
    assert (found.type, found.role, found.model) == ("message", "assistant", MODEL)
    assert content(found) == [{"type": "text", "text": "Sunny.", "citations": None}]
    assert (found.stop_reason, found.stop_sequence) == ("end_turn", None)
    used = found.usage
    assert (used.cache_read_input_tokens, used.cache_creation_input_tokens) == (3, 0)
    [submission] = running.scheduler.submissions
    assert used.input_tokens + 3 == len(submission.prompt_token_ids) // 4
    assert used.output_tokens == len(TOKENIZER.encode("Sunny.", add_special_tokens=False)) + 1
    await until_metrics(running, 'paceline_gateway_requests_total{endpoint="message",finish_reason="stop"} 1.0')


async def test_a_stream(start: Start) -> None:
    running = await start(tokens_per_step=2, **says("Sunny, and warm."))
    async with client(running) as asked:
        async with asked.messages.stream(**ASKED) as stream:
            texts = [text async for text in stream.text_stream]
            final = await stream.get_final_message()
        whole = await asked.messages.create(**ASKED)
    assert len(texts) > 2
    assert "".join(texts) == "Sunny, and warm."
    assert content(final) == content(whole)
    # The client copies these counts from the last delta, except `cache_creation`, the counts by TTL.
    assert final.usage.to_dict() | {"cache_creation": None} == whole.usage.to_dict() | {"cache_creation": None}
    assert final.stop_reason == "end_turn"


async def test_the_events_of_a_stream(start: Start) -> None:
    running = await start(**says("Hi."))
    got = [event async for event in events(running)]
    assert all(name == data["type"] for name, data in got)
    names = [name for name, _ in got]
    deltas = names.count("content_block_delta")
    assert names == [
        "message_start",
        "ping",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    begun = got[0][1]["message"]
    assert (begun["content"], begun["stop_reason"]) == ([], None)
    assert (begun["usage"]["output_tokens"], begun["usage"]["cache_read_input_tokens"]) == (0, None)
    ended = got[-2][1]
    assert ended["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert ended["usage"]["input_tokens"] + 3 == begun["usage"]["input_tokens"]


async def test_sampling_fields_reach_the_scheduler_and_stop_reasons_the_client(start: Start) -> None:
    running = await start(**says("one two three four"))
    more = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "seed": 3, "tenant": "acme"}
    async with client(running) as asked:
        cut = await asked.messages.create(**ASKED | {"max_tokens": 2}, extra_body=more)
        stopped = await asked.messages.create(**ASKED, stop_sequences=["x", " three"])
        unlimited = await asked.messages.create(**ASKED | {"max_tokens": 2048})
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " three")
    assert content(stopped)[0]["text"] == "one two"
    assert unlimited.stop_reason == "end_turn"
    sampling = running.scheduler.submissions[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.25, 7, 3)
    assert running.scheduler.submissions[0].tenant == "acme"
    endless = await start(next_token=scripted([400]))
    async with client(endless) as asked:
        full = await asked.messages.create(**ASKED | {"max_tokens": 2048})
    assert full.stop_reason == "model_context_window_exceeded"


async def test_tool_calls(start: Start) -> None:
    running = await start(settings={"chat_template": HERMES}, **says(TWO_CALLS))
    async with client(running) as asked:
        whole = await asked.messages.create(**ASKED, tools=TOOLS)
        async with asked.messages.stream(**ASKED, tools=TOOLS) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_message()
        one = await asked.messages.create(
            **ASKED, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True}
        )
    assert whole.stop_reason == final.stop_reason == "tool_use"
    text, weather, now = content(whole)
    assert (text["type"], text["text"]) == ("text", "I will look.")
    assert (weather["type"], weather["name"], weather["input"]) == ("tool_use", "get_weather", {"city": "Paris"})
    assert (now["type"], now["name"], now["input"]) == ("tool_use", "now", {})
    assert weather["id"] != now["id"]
    assert [block["type"] for block in content(final)] == ["text", "tool_use", "tool_use"]
    assert [block.get("input") for block in content(final)] == [None, {"city": "Paris"}, {}]
    assert kinds.count("content_block_stop") == 3
    assert kinds.count("input_json") > 2
    assert [block.type for block in one.content] == ["text", "tool_use"]


async def test_a_tool_round_trip(start: Start) -> None:
    """A client sends the results of the calls. The prompt has the calls and the results."""
    running = await start(settings={"chat_template": HERMES}, **says(TWO_CALLS))
    async with client(running) as asked:
        first = await asked.messages.create(**ASKED, tools=TOOLS)
        results: Any = [
            {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": f"result {i}"}]}
            for i, block in enumerate(first.content)
            if block.type == "tool_use"
        ]
        results.append({"type": "text", "text": "Thanks."})
        history: Any = [*CHAT, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        await asked.messages.create(**ASKED | {"messages": history}, tools=TOOLS)
    ids = memoryview(running.scheduler.submissions[-1].prompt_token_ids).cast("i").tolist()
    prompt = TOKENIZER.decode(ids)
    assert prompt.endswith(
        '<|assistant|>I will look.{"name": "get_weather", "arguments": {"city": "Paris"}}'
        '{"name": "now", "arguments": {}}<|tool|>result 1<|tool|>result 2<|user|>Thanks.<|assistant|>'
    )
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
    assert prompt.startswith(json.dumps([tool])[:-1])


async def test_the_tool_runner_of_the_client(start: Start) -> None:
    """The client's tool runner sends results until an answer has no calls, on the path with `?beta=true`."""

    @beta_async_tool
    async def get_weather(city: str) -> str:
        """The weather of a city."""
        return f"rain in {city}"

    running = await start(settings={"chat_template": HERMES})
    first = [*TOKENIZER.encode(TWO_CALLS.rpartition("\n<tool_call>")[0], add_special_tokens=False), _END]
    second = [*TOKENIZER.encode("It rains.", add_special_tokens=False), _END]

    def next_token(prompt: list[int], position: int, _: Any) -> int:
        script = second if "rain in Paris" in TOKENIZER.decode(prompt) else first
        return script[position % len(script)]

    running.scheduler.next_token = next_token
    async with client(running) as asked:
        runner = asked.beta.messages.tool_runner(**ASKED, tools=[get_weather])
        answers = [message async for message in runner]
    assert [message.stop_reason for message in answers] == ["tool_use", "end_turn"]
    assert content(answers[-1])[0]["text"] == "It rains."


async def test_forced_calls_and_json_schemas_submit_a_grammar(start: Start) -> None:
    # The demo's own template writes calls in the format of Hermes, so no other template is needed.
    running = await start(**says(TWO_CALLS.partition("\n")[2]))
    tokenizer = LLTokenizer(str(CHECKPOINT / "tokenizer.json"), eos_token=[1, 5])

    def accepts(text: str) -> bool:
        matcher = LLMatcher(tokenizer, running.scheduler.submissions[-1].sampling.grammar, log_level=0)
        tokens = TOKENIZER.encode(text, add_special_tokens=False)
        return all(map(matcher.consume_token, tokens)) and bool(matcher.is_accepting())

    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    choices: list[Any] = [{"type": "any"}, {"type": "tool", "name": "now"}]
    async with client(running) as asked:
        for choice in choices:
            found = await asked.messages.create(**ASKED, tools=TOOLS, tool_choice=choice)
            assert found.stop_reason == "tool_use"
            assert accepts(call)
        form: Any = {"format": {"type": "json_schema", "schema": CITY}}
        await asked.messages.create(**ASKED, output_config=form)
        assert accepts(PARIS)
        assert not accepts(call)
        await asked.messages.create(**ASKED, tools=TOOLS, tool_choice={"type": "none"})
        assert not running.scheduler.submissions[-1].sampling.grammar


async def test_arguments_cut_off_by_max_tokens_are_marked_as_invalid_json(start: Start) -> None:
    cut = TWO_CALLS.partition('"Par')[0]
    running = await start(settings={"chat_template": HERMES}, **says(cut))
    limit = len(TOKENIZER.encode(cut, add_special_tokens=False))
    async with client(running) as asked:
        found = await asked.messages.create(**ASKED | {"max_tokens": limit}, tools=TOOLS)
    assert found.stop_reason == "max_tokens"
    assert content(found)[-1]["input"] == {"INVALID_JSON": '{"city": '}


async def test_thinking(start: Start) -> None:
    running = await start(settings={"chat_template": THINKS}, **says("<think>Paris?</think>Sunny."))
    async with client(running) as asked:
        whole = await asked.messages.create(**ASKED, thinking={"type": "enabled", "budget_tokens": 1024})
        async with asked.messages.stream(**ASKED, thinking={"type": "adaptive"}) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_message()
        hidden = await asked.messages.create(**ASKED, thinking={"type": "adaptive", "display": "omitted"})
        history: Any = [*CHAT, {"role": "assistant", "content": whole.content}, *CHAT]
        await asked.messages.create(**ASKED | {"messages": history})
    for found in (whole, final):
        thinking, text = content(found)
        assert (thinking["type"], thinking["thinking"]) == ("thinking", "Paris?")
        assert (text["type"], text["text"]) == ("text", "Sunny.")
    assert "thinking" in kinds
    assert [block.type for block in hidden.content] == ["text"]
    ids = memoryview(running.scheduler.submissions[-1].prompt_token_ids).cast("i").tolist()
    assert "<|assistant|>Paris?Sunny.<|user|>" in TOKENIZER.decode(ids)
    assert (await prompt_of(running, thinking={"type": "disabled"})).endswith("<think></think>")
    assert not (await prompt_of(running, thinking={"type": "adaptive"})).endswith("<think></think>")


async def test_an_answer_without_text_has_no_block(start: Start) -> None:
    running = await start(next_token=scripted([_END]))
    async with client(running) as asked:
        assert (await asked.messages.create(**ASKED)).content == []
        async with asked.messages.stream(**ASKED) as stream:
            assert (await stream.get_final_message()).content == []


async def test_each_error_raises_its_exception_in_the_client(start: Start, keys: Keys) -> None:
    secret = keys.add("a", max_requests=1, max_priority=1.0)
    running = await launch(start, keys)
    async with client(running, secret) as asked, client(running, "wrong") as stranger:
        with pytest.raises(anthropic.AuthenticationError) as unknown:
            await stranger.messages.create(**ASKED)
        assert unknown.value.type == "authentication_error"
        assert unknown.value.request_id
        # The client declares `body` as `object | None`.
        assert unknown.value.body["request_id"] == unknown.value.request_id  # type: ignore[index]
        with pytest.raises(anthropic.AuthenticationError):
            await stranger.messages.count_tokens(model=MODEL, messages=CHAT)
        with pytest.raises(anthropic.NotFoundError) as missing:
            await asked.messages.create(**ASKED | {"model": "claude"})
        assert missing.value.type == "not_found_error"
        with pytest.raises(anthropic.BadRequestError, match="temperature") as wrong:
            await asked.messages.create(**ASKED, extra_body={"temperature": -1})
        assert wrong.value.type == "invalid_request_error"
        with pytest.raises(anthropic.PermissionDeniedError) as above:
            await asked.messages.create(**ASKED, extra_body={"priority": 2})
        assert above.value.type == "permission_error"
        running.scheduler.paused = True
        first = asyncio.create_task(asked.messages.create(**ASKED))
        await until(lambda: running.scheduler.num_running == 1)
        with pytest.raises(anthropic.RateLimitError, match="max_requests") as busy:
            await asked.messages.create(**ASKED)
        assert (busy.value.type, busy.value.response.headers["retry-after"]) == ("rate_limit_error", "1")
        with pytest.raises(anthropic.RateLimitError):
            await asked.messages.count_tokens(model=MODEL, messages=CHAT)
        running.scheduler.paused = False
        await first
    other = await running.http.post("/v1/completions", json={})
    assert other.json()["error"]["reason"] == "missing_api_key"  # in OpenAI's shape


async def test_a_full_server(start: Start) -> None:
    running = await start()
    running.scheduler.set_full(True)
    async with client(running) as asked:

        async def is_refused() -> bool:
            try:
                await asked.messages.create(**ASKED)
            except anthropic.RateLimitError as full:
                return full.type == "rate_limit_error"
            return False  # the gateway does not know yet

        await eventually(is_refused)
    gone = await start(scheduler_up=False, settings={"scheduler_wait_s": 0.05})
    async with client(gone) as asked:
        with pytest.raises(anthropic.ServiceUnavailableError) as down:
            await asked.messages.create(**ASKED)
    assert down.value.type == "overloaded_error"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_stream_that_fails_ends_with_an_error_event(start: Start) -> None:
    running = await start(step_s=0.01, settings={"scheduler_wait_s": 0.05}, next_token=scripted([400]))
    got: list[str] = []
    async with client(running) as asked:

        async def read() -> None:
            async with asked.messages.stream(**ASKED) as stream:
                async for event in stream:
                    got.append(event.type)
                    if len(got) == 4:
                        await running.scheduler.stop()

        with pytest.raises(anthropic.APIStatusError) as failed:
            await read()
    assert failed.value.type == "overloaded_error"
    assert "message_stop" not in got
    del failed
    gc.collect()  # the client leaves a generator of its HTTP library open, which would warn in a later test


async def test_a_quiet_stream_gets_pings(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "PING_S", 0.05)
    running = await start(**says("one two three"), step_s=0.01)
    pings = 0
    async for name, _ in events(running):
        pings += name == "ping"
        if name == "content_block_delta":
            running.scheduler.paused = pings < 4
        elif pings >= 4:
            running.scheduler.paused = False
    assert pings >= 4


async def test_an_idempotency_key_gets_the_same_message(start: Start) -> None:
    running = await start()
    key = {"Idempotency-Key": "k"}
    more = {"temperature": 1.0}
    async with client(running) as asked:
        one = await asked.messages.create(**ASKED, extra_headers=key, extra_body=more)
        two = await asked.messages.create(**ASKED, extra_headers=key, extra_body=more)
    assert one.to_dict() == two.to_dict()
    assert len(running.scheduler.submissions) == 1
    other = await running.http.post(PATH, json=ASKED | {"max_tokens": 3}, headers=key)
    assert (other.status_code, other.json()["error"]["type"]) == (422, "invalid_request_error")


async def test_a_client_that_disconnects_cancels_its_request(start: Start) -> None:
    running = await start(step_s=0.01, next_token=scripted([400]))
    async with aclosing(events(running)) as got:
        async for name, _ in got:
            if name == "content_block_delta":
                break
    await until(lambda: bool(running.scheduler.cancels))
