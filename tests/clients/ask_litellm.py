"""LiteLLM as a library, with its providers for OpenAI-compatible servers and for vLLM."""

from __future__ import annotations

import json
from typing import Any

import litellm
from checks import API_KEY, CITY_TOOL, MODEL, URL, run

chat = [{"role": "user", "content": "Tell me a story."}]
options: dict[str, Any] = {"api_base": f"{URL}/v1", "api_key": API_KEY, "messages": chat, "max_tokens": 200}


def chats() -> None:
    answer = litellm.completion(model=f"openai/{MODEL}", **options)
    assert answer.choices[0].message.content
    assert answer.usage.prompt_tokens > 0


def streams() -> None:
    chunks = list(litellm.completion(model=f"openai/{MODEL}", stream=True, **options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def hosted_vllm() -> None:
    answer = litellm.completion(model=f"hosted_vllm/{MODEL}", **options)
    assert answer.choices[0].message.content


def completions() -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="Once", max_tokens=8, api_base=f"{URL}/v1", api_key=API_KEY
    )
    assert answer.choices[0].text


def tools() -> None:
    # Greedy: a sample of the demo model may write spaces up to max_tokens.
    asked = options | {"tools": [CITY_TOOL], "tool_choice": "required", "temperature": 0, "max_tokens": 200}
    answer = litellm.completion(model=f"openai/{MODEL}", **asked)
    [call] = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


def context_errors() -> None:
    long = [{"role": "user", "content": "fox " * 20_000}]
    try:
        litellm.completion(model=f"openai/{MODEL}", **(options | {"messages": long}))
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("a prompt beyond the context was accepted")


run(chat=chats, stream=streams, hosted_vllm=hosted_vllm, completion=completions, tool_call=tools,
    context_error=context_errors)  # fmt: skip
