"""LangChain's ChatOpenAI and OpenAI, with `base_url`."""

from __future__ import annotations

from typing import Any, Literal

from checks import API_KEY, CITY_TOOL, MODEL, URL, run
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict

options: Any = {"base_url": f"{URL}/v1", "api_key": API_KEY, "model": MODEL, "max_tokens": 200, "temperature": 0}
chat = ChatOpenAI(**options, stream_usage=True)


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")  # a small model would add names without an end

    name: Literal["Paris", "Rome"]
    people: Literal[1, 2]


def chats() -> None:
    answer = chat.invoke("Tell me a story.")
    assert answer.content
    assert answer.usage_metadata["output_tokens"] > 0


def streams() -> None:
    chunks = list(chat.stream("Tell me a story."))
    assert "".join(chunk.content for chunk in chunks)
    assert any(chunk.usage_metadata for chunk in chunks)


def completions() -> None:
    assert OpenAI(**options).invoke("Once there was")


def structured_outputs() -> None:
    for method in ("json_schema", "function_calling"):
        assert isinstance(chat.with_structured_output(City, method=method).invoke("A city?"), City), method


def tools() -> None:
    [call] = chat.bind_tools([CITY_TOOL], tool_choice="required").invoke("The weather?").tool_calls
    assert call["args"]["city"] in ("Paris", "Rome")


def batches() -> None:
    assert all(answer.content for answer in chat.batch(["One?", "Two?", "Three?"]))


run(chat=chats, stream=streams, completion=completions, structured_output=structured_outputs, tool_call=tools,
    batch=batches)  # fmt: skip
