"""With real processes: a tool round trip of the unmodified OpenAI client, and a streamed call that
examples/resuming_stream.py resumes after its gateway was killed.

The calls are forced, because a grammar can make them as long as the tests need them. (test_readme.py has calls that the
demo model makes of its own accord.)"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from openai import OpenAI

from examples.resuming_stream import resuming_stream
from tests.support.stack import Stack

MODEL = "paceline-demo"
PARAMETERS = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 9},
        "b": {"type": "integer", "minimum": 0, "maximum": 9},
        "note": {"type": "string", "maxLength": 240, "minLength": 200},
    },
    "required": ["a", "b", "note"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]
ADD: Any = {"type": "function", "function": {"name": "add"}}
CHAT: list[Any] = [{"role": "user", "content": "What is 3 + 4?"}]
# The demo model's chat format, with tools, calls and results as text.
TEMPLATE = """{{ bos_token }}{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}
{%- for m in messages %}<|{{ 'user' if m.role == 'tool' else m.role }}|>{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


def openai(url: str) -> OpenAI:
    http: Any = httpx.Client(trust_env=False, timeout=200)
    return OpenAI(base_url=f"{url}/v1", api_key="none", http_client=http, max_retries=0)


def add(arguments: str) -> str:
    given = json.loads(arguments)
    jsonschema.validate(given, PARAMETERS)
    return str(given["a"] + given["b"])


@pytest.fixture
def tool_stack(own_stack: Stack, tmp_path: Path) -> Stack:
    template = tmp_path / "tools.jinja"
    template.write_text(TEMPLATE)
    own_stack.gateway_flags = ["--chat-template", str(template), "--resume-keep-s", "0"]
    return own_stack.up()


def test_a_round_trip_of_openais_client(tool_stack: Stack) -> None:
    common: dict[str, Any] = {"model": MODEL, "tools": TOOLS, "max_tokens": 600, "seed": 3}
    with openai(tool_stack.url) as client:
        first = client.chat.completions.create(messages=CHAT, tool_choice=ADD, **common).choices[0]
        assert first.finish_reason == "stop"
        [call] = first.message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "add"
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": add(call.function.arguments)}
        history: Any = [*CHAT, first.message.model_dump(exclude_none=True), result]
        tokens = httpx.post(
            f"{tool_stack.url}/tokenize", json={"messages": history, "tools": TOOLS}, trust_env=False, timeout=60
        ).json()["tokens"]
        shown = httpx.post(f"{tool_stack.url}/detokenize", json={"tokens": tokens}, trust_env=False, timeout=60).json()
        assert json.dumps(json.loads(call.function.arguments))[1:-1] in shown["prompt"]
        second = client.chat.completions.create(messages=history, **common).choices[0]
        assert second.message.content
        assert second.finish_reason in ("stop", "length")
        forced = client.chat.completions.create(
            messages=CHAT, tool_choice="required", parallel_tool_calls=False, **common
        ).choices[0]
        assert forced.finish_reason == "tool_calls"
        assert len(forced.message.tool_calls or []) == 1
        with client.chat.completions.stream(messages=CHAT, tool_choice=ADD, **common) as stream:
            pieces = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
            final = stream.get_final_completion().choices[0].message
        [streamed] = final.tool_calls or []
        assert streamed.function.arguments == call.function.arguments == "".join(pieces)
        assert len(pieces) > 3
        add(streamed.function.arguments)


def calls_of(chunks: list[Any]) -> list[list[str]]:
    calls: list[list[str]] = []
    for chunk in chunks:
        for part in chunk["choices"][0]["delta"].get("tool_calls", ()):
            if "id" in part:
                calls.append([part["id"], part["function"]["name"], ""])
            calls[part["index"]][-1] += part["function"]["arguments"]
    return calls


def test_a_killed_gateway_loses_no_part_of_a_call(tool_stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    other = tool_stack.start_gateway("gateway-2")
    body = {"messages": CHAT, "tools": TOOLS, "tool_choice": ADD, "max_tokens": 600, "temperature": 1.0}
    path = "/v1/chat/completions"
    undisturbed = list(resuming_stream([other], path, body, key="k"))
    [(_, name, arguments)] = calls_of(undisturbed)
    assert name == "add"
    add(arguments)
    got: list[Any] = []
    killed = threading.Event()
    for chunk in resuming_stream([tool_stack.url, other], path, body, key="k"):
        got.append(chunk)
        if not killed.is_set() and (begun := calls_of(got)) and begun[0][-1]:
            tool_stack.kill("gateway")
            killed.set()
    assert killed.is_set()
    assert calls_of(got) == calls_of(undisturbed)
    assert [chunk["choices"][0]["finish_reason"] for chunk in got][-1] == "stop"
