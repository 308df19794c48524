"""How a request of the Responses API becomes a chat."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from services.gateway.errors import ApiError, invalid
from services.gateway.openai import schema
from services.gateway.responses_api.conversion import chat_body, in_own_terms, parse_chat
from services.gateway.responses_api.items import chat_messages, input_items
from services.gateway.responses_api.schema import ResponsesRequest

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "id": "fc_1", "status": "completed"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "21"}]}
THOUGHT = {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look.", "logprobs": []}]}


def parsed(**body: Any) -> ResponsesRequest:
    return schema.parse(ResponsesRequest, {"input": "x", **body}, 1024)


def messages_of(items: Any, instructions: str | None = None) -> list[dict[str, Any]]:
    return chat_messages(instructions, input_items(items))


def test_a_text_is_a_message_of_the_user() -> None:
    assert messages_of("Hi") == [{"role": "user", "content": "Hi"}]
    assert messages_of([{"role": "user", "content": "Hi"}]) == messages_of("Hi")
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert messages_of([{"type": "message", "role": "user", "content": parts}]) == messages_of("a\nb")


def test_instructions_and_first_system_messages_are_one_message() -> None:
    items = [
        {"role": "developer", "content": "B"},
        {"role": "user", "content": "x"},
        {"role": "system", "content": "C"},
    ]
    assert messages_of(items, "A") == [
        {"role": "system", "content": "A\n\nB"},
        {"role": "user", "content": "x"},
        {"role": "system", "content": "C"},
    ]
    assert messages_of([{"role": "system", "content": "B"}]) == [{"role": "system", "content": "B"}]


def test_reasoning_text_and_calls_in_a_row_are_one_turn() -> None:
    turn = messages_of([{"role": "user", "content": "x"}, THOUGHT, SAID, CALL, CALL | {"call_id": "c2"}, OUTPUT])
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert turn == [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "I look.", "reasoning": "Hm.", "tool_calls": [call, call | {"id": "c2"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "21"},
    ]
    assert [m["role"] for m in messages_of([CALL, OUTPUT, CALL, OUTPUT])] == ["assistant", "tool"] * 2
    assert [m["content"] for m in messages_of([SAID, SAID])] == ["I look."] * 2
    assert [m["content"] for m in messages_of([CALL, SAID])] == [None, "I look."]
    assert messages_of([SAID, THOUGHT])[1] == {"role": "assistant", "content": None, "reasoning": "Hm."}
    without_text = {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "s"}]}
    assert messages_of([without_text, SAID]) == messages_of([SAID])


def test_fields_have_the_names_of_a_chat() -> None:
    tool = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    request = parsed(
        instructions="I",
        max_output_tokens=7,
        temperature=0.5,
        tenant="t",
        tools=[tool],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
        include=["message.output_text.logprobs"],
        top_logprobs=3,
    )
    assert chat_body(request, input_items([SAID])) == {
        "messages": [
            {"role": "system", "content": "I"},
            {"role": "assistant", "content": "I look."},
            {"role": "user", "content": "x"},
        ],
        "max_completion_tokens": 7,
        "temperature": 0.5,
        "tenant": "t",
        "stop": [],
        "tools": [{"type": "function", "function": {name: tool[name] for name in tool if name != "type"}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "strict": True, "schema": {"type": "object"}},
        },
        "logprobs": True,
        "top_logprobs": 3,
    }
    assert chat_body(parsed(), ()) == {"messages": [{"role": "user", "content": "x"}], "stop": []}


@pytest.mark.parametrize(
    ("of_chat", "message", "own", "own_message"),
    [
        ("messages", "messages: too long", "input", "input: too long"),
        ("max_completion_tokens", "max_completion_tokens must", "max_output_tokens", "max_output_tokens must"),
        ("response_format.json_schema.schema", "response_format.json_schema.schema: no", "text.format.schema", None),
        ("tools.3.function.name", "tools.3.function.name: twice", "tools.3.name", "tools.3.name: twice"),
        ("tool_choice", "a call, and response_format an answer", "tool_choice", "a call, and text.format an answer"),
        ("temperature", "temperature: at most 100", "temperature", "temperature: at most 100"),
    ],
)
def test_errors_name_the_fields_of_the_responses_api(
    of_chat: str, message: str, own: str, own_message: str | None
) -> None:
    error = in_own_terms(invalid(of_chat, message))
    assert (error.param, error.message) == (own, own_message or f"{own}: no")
    without = ApiError(503, "messages", retry_after_s=2.0)
    assert in_own_terms(without) is without


def test_errors_of_chats_use_the_terms_of_the_responses_api() -> None:
    tools = [{"type": "function", "name": "f"}, {"type": "function", "name": "f"}]
    with pytest.raises(ApiError) as caught:
        parse_chat(chat_body(parsed(tools=tools), ()), 1024)
    assert (caught.value.param, "tools.1.name" in caught.value.message) == ("tools.1.name", True)


def test_an_unknown_field_is_refused_unless_it_is_null() -> None:
    assert parsed(nonsense=None, conversation=None).input
    for name in ("nonsense", "conversation", "prompt", "n"):
        with pytest.raises(ApiError) as caught:
            parsed(**{name: {"a": 1}})
        assert (caught.value.status, caught.value.param) == (400, name)


IGNORED_OBJECTS: dict[str, Any] = {
    "reasoning": {"effort": "low", "summary": "auto", "generate_summary": "auto", "context": "auto", "mode": "pro"},
    "stream_options": {"include_obfuscation": False},
    "text": {"verbosity": "medium", "format": {"type": "text"}},
    "tool_choice": {"type": "function", "name": "f"},
    "tools.0": {
        "type": "function",
        "name": "f",
        "output_schema": {},
        "defer_loading": True,
        "allowed_callers": ["direct"],
    },
}


def nested(path: str, value: Any) -> Any:
    """Wraps `value` so that it is at `path` in the request: for "tools.0" the result is a list with `value`."""
    *_, last = path.split(".")
    return [value] if last == "0" else value


@pytest.mark.parametrize("path", IGNORED_OBJECTS)
def test_an_unknown_field_inside_an_object_is_refused_with_its_path(path: str) -> None:
    field, value = path.partition(".")[0], IGNORED_OBJECTS[path]
    assert parsed(**{field: nested(path, {**value, "foo": None})})
    with pytest.raises(ApiError) as caught:
        parsed(**{field: nested(path, {**value, "foo": 1})})
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, f"{path}.foo", "unknown_parameter")


def test_an_unknown_field_of_a_text_format_is_refused_with_its_path() -> None:
    with pytest.raises(ApiError, match=r"Unknown parameter: 'text.format.foo'"):
        parsed(text={"format": {"type": "text", "foo": 1}})
    with pytest.raises(ApiError, match=r"Unknown parameter: 'text.formatt'"):
        parsed(text={"formatt": {"type": "text"}})


ACCEPTED = [
    "Hi",
    [{"role": "user", "content": "Hi"}],
    [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Hi"}]}],
    [CALL, OUTPUT, THOUGHT, SAID],
    [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}],
    [{"type": "reasoning", "id": "rs", "content": None}],
]
REFUSED = [
    [],
    1,
    ["Hi"],
    [{"role": "user"}],
    [{"role": "tool", "content": "Hi"}],
    [{"role": "user", "content": [{"type": "refusal", "refusal": "No."}]}],
    [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
    [{"role": "user", "content": ["Hi"]}],
    [CALL | {"arguments": {}}],
    [{"type": "function_call", "call_id": "c1", "name": "f"}],
    [OUTPUT | {"output": None}],
    [THOUGHT | {"content": [{"type": "summary_text", "text": "Hm."}]}],
    [{"type": "web_search_call", "id": "ws"}],
]


@pytest.mark.parametrize("value", [*ACCEPTED, *REFUSED])
def test_the_openapi_document_describes_the_items_that_are_accepted(value: Any) -> None:
    shape = ResponsesRequest.model_json_schema()
    described = Draft202012Validator({**shape["properties"]["input"], "$defs": shape["$defs"]}).is_valid(value)
    assert described == (value in ACCEPTED)
    if described:
        assert input_items(value)
    else:
        with pytest.raises(ApiError):
            input_items(value)
