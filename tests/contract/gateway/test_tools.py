"""Tool calls and reasoning over HTTP: OpenAI's client and an event parser read scripted outputs of a model."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from demo import CHECKPOINT
from services.gateway.text.tokenizer import TextTokenizer
from tests.contract.gateway.conftest import MODEL, Running, Start, until
from tests.contract.gateway.fake_scheduler import scripted
from tests.support.sse import Event, parse_events

PATH = "/v1/chat/completions"
CHAT: Any = [{"role": "user", "content": "Weather in Paris?"}]
TEMPLATE = "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
HERMES = TEMPLATE + "{# <tool_call> #}"
THINKS = HERMES + "{# </think> #}{% if enable_thinking is false %}<think></think>{% endif %}"
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now", "description": "The time."}},
]
PARIS = '{"city": "Paris"}'
TWO_CALLS = (
    f'I will look.\n<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
TOKENIZER = TextTokenizer.from_folder(CHECKPOINT)
_END = 5
NAMED: Any = {"type": "function", "function": {"name": "now"}}


def says(text: str) -> dict[str, Any]:
    """The option of the fake scheduler that makes its model generate this text."""
    return {"next_token": scripted([*TOKENIZER.encode(text, add_special_tokens=False), _END])}


async def answer(running: Running, **options: Any) -> Any:
    found = await running.http.post(PATH, json={"messages": CHAT, "tools": TOOLS} | options)
    assert found.status_code == 200, found.text
    return found.json()["choices"]


async def refused(running: Running, **options: Any) -> tuple[str, str]:
    found = await running.http.post(PATH, json={"messages": CHAT, "tools": TOOLS} | options)
    assert found.status_code == 400
    error = found.json()["error"]
    return error["param"], error["message"]


async def events(
    running: Running, headers: dict[str, str], stop_after: int | None = None, **options: Any
) -> list[Event]:
    body = {"messages": CHAT, "tools": TOOLS, "stream": True} | options
    lines: list[str] = []
    async with running.http.stream("POST", PATH, json=body, headers=headers) as stream:
        assert stream.status_code == 200, await stream.aread()
        async for line in stream.aiter_lines():
            lines.append(line)
            if stop_after is not None and lines.count("") >= stop_after:
                break
    return list(parse_events(lines))


def joined(stream: list[Event]) -> dict[int, dict[str, Any]]:
    """The message and finish reasons of each choice, from deltas."""
    choices: dict[int, dict[str, Any]] = {}
    for event in stream:
        for part in json.loads(event.data)["choices"] if event.data != "[DONE]" else ():
            known = choices.setdefault(part["index"], {"content": "", "reasoning": "", "calls": [], "reasons": []})
            delta = part["delta"]
            known["content"] += delta.get("content") or ""
            known["reasoning"] += delta.get("reasoning_content", "")
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(known["calls"])
                    known["calls"].append([call["id"], call["type"], call["function"]["name"], ""])
                known["calls"][call["index"]][-1] += call["function"]["arguments"]
            known["reasons"] += [part["finish_reason"]] * bool(part["finish_reason"])
    return choices


async def test_openais_client_gets_tool_calls(start: Start) -> None:
    running = await start(settings={"chat_template": HERMES}, **says(TWO_CALLS))
    whole = await running.openai.chat.completions.create(model=MODEL, messages=CHAT, tools=TOOLS)
    message = whole.choices[0].message
    assert (whole.choices[0].finish_reason, message.content) == ("tool_calls", "I will look.")
    calls: Any = message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in calls] == [("get_weather", PARIS), ("now", "{}")]
    assert len({call.id for call in calls}) == 2
    assert all(call.id.startswith("call_") and len(call.id) == 29 and call.type == "function" for call in calls)
    async with running.openai.chat.completions.stream(model=MODEL, messages=CHAT, tools=TOOLS) as stream:
        kinds = [event.type async for event in stream]
        final = (await stream.get_final_completion()).choices[0]
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert kinds.count("tool_calls.function.arguments.delta") > 2
    assert (final.finish_reason, final.message.content) == ("tool_calls", "I will look.")
    streamed: Any = final.message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in streamed] == [
        ("get_weather", PARIS),
        ("now", "{}"),
    ]


async def test_the_first_delta_of_a_call_has_its_name(start: Start) -> None:
    running = await start(settings={"chat_template": HERMES}, **says(TWO_CALLS))
    stream = await events(running, {})
    parts = [part for e in stream[:-1] for part in json.loads(e.data)["choices"][0]["delta"].get("tool_calls", ())]
    for index in (0, 1):
        first, *rest = [part for part in parts if part["index"] == index]
        assert first.keys() == {"index", "id", "type", "function"}
        assert not rest or {tuple(sorted(part)) for part in rest} == {("function", "index")}
    first = next(json.loads(e.data)["choices"][0] for e in stream if '"finish_reason":"tool_calls"' in e.data)
    assert first["stop_reason"] is None


async def test_without_parallel_calls_an_answer_has_one_call(start: Start) -> None:
    running = await start(settings={"chat_template": HERMES}, **says(TWO_CALLS))
    [choice] = await answer(running, parallel_tool_calls=False)
    assert len(choice["message"]["tool_calls"]) == 1
    [streamed] = joined(await events(running, {}, parallel_tool_calls=False)).values()
    assert len(streamed["calls"]) == 1


async def test_without_a_call_the_text_is_the_answer(start: Start) -> None:
    running = await start(settings={"chat_template": HERMES}, **says("Sunny. \n"))
    [choice] = await answer(running)
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Sunny. \n", "stop")
    assert "tool_calls" not in choice["message"]
    cut = await start(settings={"chat_template": HERMES}, **says(TWO_CALLS))
    [choice] = await answer(cut, tool_choice="none")
    assert (choice["message"]["content"], choice["finish_reason"]) == (TWO_CALLS, "stop")
    [choice] = await answer(cut, max_tokens=len(TOKENIZER.encode(TWO_CALLS.partition('"Par')[0])) - 1)
    assert choice["finish_reason"] == "length"
    assert PARIS.startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])


@pytest.mark.parametrize(
    ("parser", "text", "size"),
    [
        ("llama3_json", f'{{"name": "get_weather", "parameters": {PARIS}}}', 29),
        ("mistral", f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {PARIS}}}]', 9),
    ],
)
async def test_the_tool_call_parser_flag_chooses_the_format(start: Start, parser: str, text: str, size: int) -> None:
    running = await start(settings={"tool_call_parser": parser, "chat_template": TEMPLATE}, **says(text))
    [choice] = await answer(running)
    [call] = choice["message"]["tool_calls"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert call["function"] == {"name": "get_weather", "arguments": PARIS}
    assert len(call["id"]) == size


async def test_the_template_gets_the_tools_as_they_were_sent(start: Start) -> None:
    running = await start(settings={"chat_template": HERMES}, **says("x"))
    odd = {"function": {"parameters": CITY, "name": "f", "x-more": 1}, "type": "function"}
    body = {"messages": CHAT, "tools": [odd], "return_prompt_text": True}
    text = (await running.http.post(PATH, json=body)).json()["prompt_text"]
    assert text == json.dumps([odd]) + "Weather in Paris?"


async def test_forced_and_strict_calls_have_a_grammar_and_other_requests_none(start: Start) -> None:
    running = await start(**says(TWO_CALLS.partition("\n")[2]))  # the demo's own template shows calls of Hermes
    tokenizer = LLTokenizer(str(CHECKPOINT / "tokenizer.json"), eos_token=[1, 5])
    for choice, finish in (("required", "tool_calls"), (NAMED, "stop")):
        running.scheduler.submissions.clear()
        [found] = await answer(running, tool_choice=choice)
        assert found["finish_reason"] == finish  # OpenAI and vLLM also report "stop" for a named function
        [submission] = running.scheduler.submissions
        matcher = LLMatcher(tokenizer, submission.sampling.grammar, log_level=0)
        call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
        assert all(map(matcher.consume_token, TOKENIZER.encode(call, add_special_tokens=False)))
        assert matcher.is_accepting()
    hermes = await start(settings={"chat_template": HERMES}, **says("x"))
    await answer(hermes)
    assert not hermes.scheduler.submissions[-1].sampling.grammar
    strict = [{"type": "function", "function": {"name": "f", "parameters": CITY, "strict": True}}]
    await answer(hermes, tools=strict)
    assert hermes.scheduler.submissions[-1].sampling.grammar


async def test_wrong_tools_are_refused_by_name(start: Start) -> None:
    running = await start(settings={"chat_template": TEMPLATE})  # this template shows no format of tool calls
    assert await refused(running) == ("tools", (await refused(running))[1])
    assert "--tool-call-parser" in (await refused(running))[1]
    assert (await refused(running, tool_choice="any"))[0] == "tool_choice"
    other = {"type": "function", "function": {"name": "other"}}
    assert (await refused(running, tool_choice=other))[0] == "tool_choice.function.name"
    assert (await refused(running, tools=[TOOLS[1], TOOLS[1]]))[0] == "tools.1.function.name"
    name, message = await refused(running, tools=[TOOLS[1]] * 129)
    assert (name, message) == ("tools", "tools has 129 tools; at most 128 are possible")
    formats = {"response_format": {"type": "json_object"}}
    assert (await refused(running, tool_choice="required", **formats))[0] == "tool_choice"
    wrong = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/nowhere"}}}
    assert (await refused(running, tools=[wrong], tool_choice="required"))[0] == "tools"


THOUGHTS = f"<think>\nHm, Paris.\n</think>\n\n{TWO_CALLS}"


async def test_reasoning_is_apart_from_the_answer(start: Start) -> None:
    running = await start(settings={"chat_template": THINKS}, **says(THOUGHTS))
    [choice] = await answer(running)
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm, Paris.", "I will look.")
    assert message["reasoning"] == message["reasoning_content"]
    assert len(message["tool_calls"]) == 2
    [streamed] = joined(await events(running, {})).values()
    assert (streamed["reasoning"], streamed["content"]) == ("Hm, Paris.", "I will look.")
    assert len(streamed["calls"]) == 2
    [hidden] = await answer(running, include_reasoning=False)
    assert "reasoning_content" not in hidden["message"]
    assert hidden["message"]["content"] == "I will look."
    [streamed] = joined(await events(running, {}, include_reasoning=False)).values()
    assert (streamed["reasoning"], streamed["content"]) == ("", "I will look.")
    # The prompt has closed the reasoning.
    [off] = await answer(running, tools=[], chat_template_kwargs={"enable_thinking": False})
    assert (off["message"]["reasoning_content"], off["message"]["content"]) == (None, THOUGHTS)
    unsplit = await start(settings={"chat_template": THINKS, "reasoning_parser": "none"}, **says("<think>a</think>b"))
    [choice] = await answer(unsplit, tools=[])
    assert choice["message"] == {"role": "assistant", "content": "<think>a</think>b", "refusal": None}


async def test_usage_counts_the_tokens_of_the_reasoning(start: Start) -> None:
    thoughts = TOKENIZER.encode("<think>\nHm, Paris.", add_special_tokens=False)
    end = TOKENIZER.encode("<think>\nHm, Paris.\n</think>", add_special_tokens=False)
    for tokens_per_step in (1, 3, 50):
        running = await start(settings={"chat_template": THINKS}, tokens_per_step=tokens_per_step, **says(THOUGHTS))
        body = {"messages": CHAT, "tools": TOOLS}
        for options in ({}, {"include_reasoning": False}, {"n": 2, "temperature": 0}):
            usage = (await running.http.post(PATH, json=body | options)).json()["usage"]
            counted = usage["completion_tokens_details"]["reasoning_tokens"] / options.get("n", 1)
            assert len(thoughts) - 1 <= counted < len(end), (tokens_per_step, options)
        asked: dict[str, Any] = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        *chunks, total, _ = [event.data for event in await events(running, {}, **asked)]
        shown = [json.loads(chunk)["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in chunks]
        assert shown == sorted(shown)
        assert json.loads(total)["usage"]["completion_tokens_details"]["reasoning_tokens"] == counted == shown[-1]
    off = await running.http.post(PATH, json=body | {"chat_template_kwargs": {"enable_thinking": False}})
    assert off.json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    plain = await start()
    assert "completion_tokens_details" not in (await plain.http.post(PATH, json={"messages": CHAT})).json()["usage"]


async def test_usage_counts_reasoning_that_was_held_back_until_the_end(start: Start) -> None:
    """The beginning of a stop string holds text back, and the answer ends in the reasoning."""
    thought = TOKENIZER.encode("so it is 4.", add_special_tokens=False)
    running = await start(settings={"reasoning_parser": "deepseek_r1"}, **says("so it is 4."))
    body = {"messages": CHAT, "max_tokens": len(thought), "stop": ["is 4. and", "4.!"]}
    answer = (await running.http.post(PATH, json=body)).json()
    assert answer["choices"][0]["message"]["reasoning_content"] == "so it is 4."
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(thought)
    stopped = (await running.http.post(PATH, json=body | {"stop": ["is"]})).json()
    assert stopped["choices"][0]["message"]["reasoning_content"] == "so it "
    assert stopped["usage"]["completion_tokens_details"]["reasoning_tokens"] == stopped["usage"]["completion_tokens"]


async def test_a_reasoning_model_may_think_before_its_structured_output(start: Start) -> None:
    running = await start(settings={"reasoning_parser": "deepseek_r1"}, **says('so</think>{"a": 1}'))
    [choice] = await answer(running, tools=[], response_format={"type": "json_object"})
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("so", '{"a": 1}')
    matcher = LLMatcher(
        LLTokenizer(str(CHECKPOINT / "tokenizer.json"), eos_token=[1, 5]),
        running.scheduler.submissions[-1].sampling.grammar,
        log_level=0,
    )
    assert all(map(matcher.consume_token, TOKENIZER.encode('so</think>{"a": 1}', add_special_tokens=False)))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("interval", [None, 4])
async def test_another_gateway_resumes_at_every_event(start: Start, n: int, interval: int | None) -> None:
    """An event may end in the middle of a name, of arguments or of reasoning."""
    settings = {"chat_template": THINKS}
    first = await start(settings=settings, **says(THOUGHTS))
    second = await start(settings=settings, tokens_per_step=3, **says(THOUGHTS))
    options = {"n": n, "stream_interval": interval}
    key = {"Idempotency-Key": "k"}
    undisturbed = await events(first, key, **options)
    expected = joined(undisturbed)
    assert [len(choice["calls"]) for choice in expected.values()] == [2] * n
    for count in range(1, len(undisturbed), 1 if n == 1 else 5):
        got = undisturbed[:count]
        rest = await events(second, key | {"Last-Event-ID": got[-1].id}, **options)
        assert joined([*got, *rest]) == expected, count
    await until(lambda: second.scheduler.num_running == 0)


async def test_a_whole_answer_equals_its_joined_stream(start: Start) -> None:
    running = await start(settings={"chat_template": THINKS}, tokens_per_step=2, **says(THOUGHTS))
    key = {"Idempotency-Key": "k"}
    for choice, streamed in zip(
        await answer(running, n=2), joined(await events(running, key, n=2)).values(), strict=True
    ):
        message = choice["message"]
        assert (message["content"], message["reasoning_content"]) == (streamed["content"], streamed["reasoning"])
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
        assert calls == [(name, arguments) for _, _, name, arguments in streamed["calls"]]
        assert [choice["finish_reason"]] == streamed["reasons"]
