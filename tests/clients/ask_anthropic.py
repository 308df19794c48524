"""The official client of Anthropic's Messages API."""

from __future__ import annotations

from typing import Any

from anthropic import Anthropic
from checks import API_KEY, CITY_TOOL, MODEL, URL, run

client = Anthropic(base_url=URL, api_key=API_KEY, max_retries=0)
chat: Any = [{"role": "user", "content": "Tell me a story."}]
function: Any = CITY_TOOL["function"]
tool: Any = {"name": function["name"], "description": "", "input_schema": function["parameters"]}


def messages() -> None:
    answer = client.messages.create(model=MODEL, messages=chat, max_tokens=16)
    assert answer.content[0].text
    assert answer.usage.output_tokens <= 16


def streams() -> None:
    with client.messages.stream(model=MODEL, messages=chat, max_tokens=16) as stream:
        assert "".join(stream.text_stream)


def counts() -> None:
    assert client.messages.count_tokens(model=MODEL, messages=chat).input_tokens > 0


def tools() -> None:
    answer = client.messages.create(
        model=MODEL, messages=chat, max_tokens=200, tools=[tool], tool_choice={"type": "any"}
    )
    assert answer.content[-1].input["city"] in ("Paris", "Rome")


run(message=messages, stream=streams, count_tokens=counts, tool_call=tools)
