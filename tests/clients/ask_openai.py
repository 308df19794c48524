"""The official Python client."""

from __future__ import annotations

import json
from typing import Any, Literal

from checks import API_KEY, CITY_TOOL, MODEL, URL, run
from openai import BadRequestError, OpenAI
from pydantic import BaseModel, ConfigDict

client = OpenAI(base_url=f"{URL}/v1", api_key=API_KEY, max_retries=0)
chat: list[Any] = [{"role": "user", "content": "Tell me a story."}]
options: Any = {"model": MODEL, "messages": chat, "max_tokens": 16}
tool: Any = CITY_TOOL


def models() -> None:
    assert MODEL in [model.id for model in client.models.list()]


def chats() -> None:
    answer = client.chat.completions.create(**options)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens <= 16


def streams() -> None:
    usage = {"include_usage": True}
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options=usage))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage.completion_tokens > 0


def completions() -> None:
    answer = client.completions.create(model=MODEL, prompt="Once there was", max_tokens=8, logprobs=2)
    assert answer.choices[0].text
    assert answer.choices[0].logprobs.token_logprobs


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")  # a small model would add names without an end

    name: Literal["Paris", "Rome"]
    people: Literal[1, 2]


def structured_outputs() -> None:
    parsed = client.chat.completions.parse(
        model=MODEL, messages=chat, response_format=City, max_tokens=200, temperature=0
    )
    assert isinstance(parsed.choices[0].message.parsed, City)


def tools() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=chat, tools=[tool], tool_choice="required", max_tokens=200, temperature=0
    )
    [call] = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


def errors() -> None:
    named = None
    try:
        client.chat.completions.create(model=MODEL, messages=chat, temperature=-1)
    except BadRequestError as error:
        named = error.param
    assert named == "temperature", named


run(models=models, chat=chats, stream=streams, completion=completions, structured_output=structured_outputs,
    tool_call=tools, error=errors)  # fmt: skip
