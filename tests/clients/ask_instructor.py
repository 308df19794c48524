"""Instructor in its modes for OpenAI's API."""

from __future__ import annotations

from typing import Any, Literal

import instructor
from checks import API_KEY, MODEL, URL, run
from openai import OpenAI
from pydantic import BaseModel, ConfigDict

chat: Any = [{"role": "user", "content": "A city?"}]


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")  # a small model would add names without an end

    name: Literal["Paris", "Rome"]
    people: Literal[1, 2]


def in_mode(mode: instructor.Mode) -> None:
    client = instructor.from_openai(OpenAI(base_url=f"{URL}/v1", api_key=API_KEY), mode=mode)
    found = client.chat.completions.create(
        model=MODEL, messages=chat, response_model=City, max_tokens=300, temperature=0, max_retries=0
    )
    assert isinstance(found, City)


def partials() -> None:
    client = instructor.from_openai(OpenAI(base_url=f"{URL}/v1", api_key=API_KEY), mode=instructor.Mode.TOOLS)
    found = list(
        client.chat.completions.create_partial(
            model=MODEL, messages=chat, response_model=City, max_tokens=300, temperature=0, max_retries=0
        )
    )
    assert found[-1].name is not None


run(
    tools=lambda: in_mode(instructor.Mode.TOOLS),
    json_schema=lambda: in_mode(instructor.Mode.JSON_SCHEMA),
    strict_tools=lambda: in_mode(instructor.Mode.TOOLS_STRICT),
    stream_of_partials=partials,
)
