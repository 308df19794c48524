"""Anthropic's unmodified client with real processes and the demo model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import jsonschema
import pytest
from anthropic import Anthropic, DefaultHttpxClient

from tests.support.stack import Stack

MODEL = "paceline-demo"
CHAT: Any = [{"role": "user", "content": "Repeat after me: blue fox seven"}]
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 60, "messages": CHAT}
GREEDY = {"temperature": 0}
SUM = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture
def client(stack: Stack) -> Iterator[Anthropic]:
    http_client = DefaultHttpxClient(trust_env=False, timeout=200)
    with Anthropic(
        base_url=stack.url, api_key="none", http_client=http_client, max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content)


def test_a_message_has_the_same_text_as_a_chat_completion(stack: Stack, client: Anthropic) -> None:
    whole = client.messages.create(**ASKED, extra_body=GREEDY)
    with client.messages.stream(**ASKED, extra_body=GREEDY) as stream:
        pieces = list(stream.text_stream)
        streamed = stream.get_final_message()
    chat = httpx.post(f"{stack.url}/v1/chat/completions", json=ASKED | GREEDY, trust_env=False, timeout=200).json()
    assert text_of(whole) == text_of(streamed) == "".join(pieces) == chat["choices"][0]["message"]["content"]
    assert len(pieces) > 2
    assert whole.stop_reason == streamed.stop_reason == "end_turn"
    read = streamed.usage.cache_read_input_tokens
    assert read
    counted = client.messages.count_tokens(model=MODEL, messages=CHAT).input_tokens
    used = streamed.usage
    assert counted == used.input_tokens + read == chat["usage"]["prompt_tokens"]
    assert used.output_tokens == chat["usage"]["completion_tokens"]


def test_cache_control_keeps_a_prompt(client: Anthropic) -> None:
    words = " ".join(f"word{i}" for i in range(60))
    system: Any = [{"type": "text", "text": words, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    first, second = (client.messages.create(**ASKED, system=system).usage for _ in range(2))
    created, read = first.cache_creation_input_tokens, second.cache_read_input_tokens
    assert created
    assert read
    assert created > 60
    assert read >= created
    assert second.cache_creation_input_tokens == 0


def test_a_forced_call_follows_its_schema(client: Anthropic) -> None:
    tools: Any = [{"name": "add", "input_schema": SUM}]
    found = client.messages.create(**ASKED | {"max_tokens": 200}, tools=tools, tool_choice={"type": "any"})
    assert found.stop_reason == "tool_use"
    calls: list[Any] = [block for block in found.content if block.type == "tool_use"]
    assert calls
    for call in calls:
        jsonschema.validate(call.input, SUM)


def test_errors(client: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**ASKED | {"model": "claude"})
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        client.messages.create(**ASKED | {"max_tokens": 10**6})
