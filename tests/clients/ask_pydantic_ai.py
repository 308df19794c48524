"""Pydantic AI's agents on OpenAI's chat API."""

from __future__ import annotations

import asyncio
from typing import Literal

from checks import API_KEY, MODEL, URL, run
from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key=API_KEY))
settings = {"max_tokens": 200, "temperature": 0.0}


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")  # a small model would add names without an end

    name: Literal["Paris", "Rome"]
    people: Literal[1, 2]


def chats() -> None:
    answer = Agent(model, model_settings=settings).run_sync("Tell me a story.")
    assert answer.output


def streams() -> None:
    async def read() -> str:
        async with Agent(model, model_settings=settings).run_stream("Tell me a story.") as answer:
            return "".join([piece async for piece in answer.stream_text(delta=True)])

    assert asyncio.run(read())


def tool_outputs() -> None:
    agent = Agent(model, output_type=ToolOutput(City), model_settings=settings)
    assert isinstance(agent.run_sync("A city?").output, City)


def native_outputs() -> None:
    agent = Agent(model, output_type=NativeOutput(City), model_settings=settings)
    assert isinstance(agent.run_sync("A city?").output, City)


run(chat=chats, stream=streams, tool_output=tool_outputs, native_output=native_outputs)
