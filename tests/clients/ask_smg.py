"""The official Python client through smg, which stands in front of the gateway (`run.py` starts it)."""

from __future__ import annotations

import json
import os
from typing import Any

from checks import API_KEY, MODEL, URL, run
from openai import OpenAI

routed = OpenAI(base_url=f"{os.environ['PACELINE_SMG_URL']}/v1", api_key=API_KEY, max_retries=0, timeout=60)
direct = OpenAI(base_url=f"{URL}/v1", api_key=API_KEY, max_retries=0, timeout=60)
asked: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 20,
    "temperature": 0,
}


def chats() -> None:
    expected = direct.chat.completions.create(**asked)
    answer = routed.chat.completions.create(**asked)
    assert answer.choices[0].message.content == expected.choices[0].message.content
    assert answer.choices[0].finish_reason == expected.choices[0].finish_reason
    assert answer.usage.completion_tokens == expected.usage.completion_tokens
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens, "smg has our tokenizer and chat template"


def streams() -> None:
    expected = direct.chat.completions.create(**asked)
    chunks = list(routed.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == expected.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == expected.usage.completion_tokens


def samples_and_logprobs() -> None:
    options = {**asked, "max_tokens": 6, "n": 2, "logprobs": True, "top_logprobs": 2}
    answer = routed.chat.completions.create(**options)
    assert len(answer.choices) == 2
    for choice in answer.choices:
        assert [len(token.top_logprobs) for token in choice.logprobs.content] == [2] * 6


def stops() -> None:
    content = routed.chat.completions.create(**asked).choices[0].message.content
    stop = content.split()[2]
    cut = routed.chat.completions.create(**asked, stop=[stop]).choices[0]
    assert cut.finish_reason == "stop"
    assert (cut.message.content or "").rstrip() == content.partition(stop)[0].rstrip()


def structured_outputs() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = {"name": "n", "schema": {**schema, "additionalProperties": False}}
    options = {**asked, "max_tokens": 80, "response_format": {"type": "json_schema", "json_schema": form}}
    answer = routed.chat.completions.create(**options)
    assert isinstance(json.loads(answer.choices[0].message.content)["a"], bool)


run(chat=chats, stream=streams, samples_and_log_probabilities=samples_and_logprobs, stop_string=stops,
    structured_output=structured_outputs)  # fmt: skip
