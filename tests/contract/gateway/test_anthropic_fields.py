"""The Messages API over HTTP: which fields make which prompt, what the cache keeps, and what is refused."""

from __future__ import annotations

import json
from typing import Any

from tests.contract.gateway.conftest import MODEL, Running, Start
from tests.contract.gateway.test_anthropic import (
    ASKED,
    CHAT,
    CITY,
    HERMES,
    PATH,
    TEMPLATE,
    TOKENIZER,
    TOOLS,
    client,
    prompt_of,
    refused,
    says,
)


async def test_the_user_is_the_tenant(start: Start) -> None:
    running = await start(**says("x"))
    async with client(running) as asked:
        await asked.messages.create(**ASKED, metadata={"user_id": "customer 7"})
    assert running.scheduler.submissions[-1].tenant == "customer 7"


async def test_a_last_message_of_the_assistant_is_continued(start: Start) -> None:
    running = await start(settings={"chat_template": TEMPLATE}, **says("x"))
    history = [*CHAT, {"role": "assistant", "content": "It is"}]
    assert (await prompt_of(running, messages=history)).endswith("<|assistant|>It is")
    system = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert (await prompt_of(running, system=system)).startswith("<|system|>a\nb<|user|>")


async def test_count_tokens(start: Start) -> None:
    running = await start(settings={"chat_template": HERMES}, **says("x"))
    options: Any = {"system": "Be short.", "tools": TOOLS, "messages": CHAT, "model": MODEL}
    async with client(running) as asked:
        counted = await asked.messages.count_tokens(**options)
        used = (await asked.messages.create(**options, max_tokens=5)).usage
    assert counted.input_tokens == used.input_tokens + 3
    assert "max_tokens" not in await refused(running, f"{PATH}/count_tokens", messages=[])


async def ranges(running: Running, **options: Any) -> list[tuple[int, int, int]]:
    """The retained ranges of the request's prompt: first token, end, and duration in seconds."""
    await prompt_of(running, **options)
    kept = running.scheduler.submissions[-1].cache_retention
    assert {one.priority for one in kept} <= {70}
    return [(one.start, one.end, one.duration_ms // 1000) for one in kept]


def length(text: str) -> int:
    return len(TOKENIZER.encode(text, add_special_tokens=False))


async def test_cache_control_keeps_the_prompt_up_to_the_block(start: Start) -> None:
    running = await start(settings={"chat_template": TEMPLATE + "{# <tool_call> #}"}, **says("x"))
    ephemeral: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
    hour = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    system: list[dict[str, Any]] = [
        {"type": "text", "text": "You are a poet. ", **hour},
        {"type": "text", "text": "Rhyme always."},
    ]
    say: dict[str, Any] = {"type": "text", "text": "About the sea."}
    messages = [{"role": "user", "content": [say | ephemeral, {"type": "text", "text": "And a ship."}]}]
    kept = await ranges(running, system=system, messages=messages)
    first = length("<|system|>You are a poet. \n")
    second = length("<|system|>You are a poet. \nRhyme always.<|user|>About the sea.")
    assert kept == [(0, kept[0][1], 3600), (kept[0][1], kept[1][1], 300)]
    assert abs(kept[0][1] - first) <= 1
    assert abs(kept[1][1] - second) <= 1
    assert await ranges(running, system=system[:1]) == [(0, length("<|system|>You are a poet. <|user|>"), 3600)]
    assert await ranges(running) == []
    [whole] = await ranges(running, cache_control={"type": "ephemeral"})
    assert whole == (0, length("<|user|>Weather in Paris?"), 300)
    tools = [TOOLS[0], TOOLS[1] | ephemeral]
    shown = [
        {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
        {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {"type": "object"}}},
    ]
    assert await ranges(running, tools=tools) == [(0, length(json.dumps(shown) + "<|user|>"), 300)]
    # Only the last block of each ttl counts: it covers the earlier ones.
    several = [block | ephemeral for block in system[1:] * 3]
    assert len(await ranges(running, system=several, messages=messages)) == 1
    more = {"role": "user", "content": [say | ephemeral]}
    assert "at most 4" in await refused(running, system=several, messages=[*messages, more])
    assert "ttl" in await refused(running, system=several, messages=[{"role": "user", "content": [say | hour]}])


async def test_usage_tells_what_was_read_and_kept(start: Start) -> None:
    running = await start(settings={"chat_template": TEMPLATE}, **says("x"))
    marked: Any = [{"type": "text", "text": "Weather in Paris?", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    end = length("<|user|>Weather in Paris?")
    async with client(running) as asked:
        new = (await asked.messages.create(**ASKED | {"messages": [{"role": "user", "content": marked}]})).usage
        running.scheduler.cached_tokens = end
        read = (await asked.messages.create(**ASKED | {"messages": [{"role": "user", "content": marked}]})).usage
    rest = length("<|user|>Weather in Paris?<|assistant|>") - end
    assert (new.cache_read_input_tokens, new.cache_creation_input_tokens, new.input_tokens) == (3, end - 3, rest)
    assert new.cache_creation is not None
    assert new.cache_creation.to_dict() == {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": end - 3}
    assert (read.cache_read_input_tokens, read.cache_creation_input_tokens, read.input_tokens) == (end, 0, rest)


async def test_a_template_that_renders_only_whole_chats_keeps_the_whole_prompt(start: Start) -> None:
    picky = "{% if not add_generation_prompt %}{{ raise_exception('no') }}{% endif %}{{ messages[-1].content }}"
    running = await start(settings={"chat_template": picky}, **says("x"))
    assert await ranges(running, cache_control={"type": "ephemeral"}) == [(0, length("Weather in Paris?"), 300)]


async def test_wrong_fields_and_blocks_are_refused_by_name(start: Start) -> None:
    running = await start(settings={"chat_template": TEMPLATE})

    async def blocks(*content: dict[str, Any], role: str = "user") -> str:
        return await refused(running, messages=[{"role": role, "content": list(content)}])

    assert (await blocks({"type": "image", "source": {}})).startswith("messages.0.content.0: has the type 'image'")
    assert "'document'" in await blocks({"type": "document", "source": {}})
    inner = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": {}}]}
    assert (await blocks(inner)).startswith("messages.0.content.0.content.0: has the type 'image'")
    assert "messages.0.content.0: text is required" in await blocks({"type": "text"})
    assert "messages.0: has a block of type 'tool_use'" in await blocks(
        {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    )
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    assert "tool_result" in await blocks(call, role="assistant")
    assert "no text to continue" in await blocks({"type": "text", "text": " "}, role="assistant")
    assert await refused(running, messages=[]) == "messages must not be empty"
    assert await refused(running, max_tokens=None) == "max_tokens is required"
    assert (await refused(running, max_tokens=0)).startswith("max_tokens")
    assert "maximum context length" in await refused(running, max_tokens=100_000)
    assert (await refused(running, mcp_servers=[{}], foo=1)).startswith("mcp_servers is not supported")
    assert "Unknown parameter: 'foo'" in await refused(running, mcp_servers=[{}], foo=1)
    assert (await refused(running, tools=[{"name": "a b", "input_schema": {}}])).startswith("tools.0.name")
    assert (await refused(running, tools=[{"name": "a"}])).startswith("tools.0: input_schema is required")
    web = {"type": "web_search_20250305", "name": "web_search"}
    assert "tools.0: has the type 'web_search_20250305'" in await refused(running, tools=[web])
    assert (await refused(running, tools=[TOOLS[0], TOOLS[0]])).startswith("tools.1.name")
    assert "tools.0: defer_loading" in await refused(running, tools=[TOOLS[0] | {"defer_loading": True}])
    assert (await refused(running, tool_choice={"type": "any"})).startswith("tool_choice")
    assert (await refused(running, tools=TOOLS, tool_choice={"type": "tool"})).startswith("tool_choice: name")
    named = {"type": "tool", "name": "x"}
    assert (await refused(running, tools=TOOLS, tool_choice=named)).startswith("tool_choice.name")
    assert "--tool-call-parser" in await refused(running, tools=TOOLS)
    wrong: dict[str, Any] = {"format": {"type": "json_schema", "schema": {"$ref": "#/nowhere"}}}
    assert (await refused(running, output_config=wrong)).startswith("output_config.format.schema")
    assert (await refused(running, stop_sequences=["x"] * 17)).startswith("stop_sequences")
    assert (await refused(running, temperature=-1)).startswith("temperature")
    many = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": ""}] * 20_000}
    assert "at most 16384" in await blocks(many)
    found = await running.http.post(PATH, json=ASKED, headers={"Last-Event-ID": "1"})
    assert (found.status_code, found.json()["error"]["type"]) == (400, "invalid_request_error")
    found = await running.http.get(PATH)
    assert (found.status_code, found.json()["error"]["type"]) == (405, "invalid_request_error")


async def test_fields_without_effect_are_accepted(start: Start) -> None:
    running = await start(**says("x"))
    neutral: dict[str, Any] = {
        "container": None,
        "mcp_servers": [],
        "speed": "standard",
        "service_tier": "auto",
        "context_management": {"edits": []},
        "output_config": {"effort": "low"},
    }
    history = [
        {"role": "system", "content": "Be short."},
        *CHAT,
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "y"}]},
        *CHAT,
    ]
    found = await running.http.post(PATH, json=ASKED | neutral | {"messages": history})
    assert found.status_code == 200, found.text


async def test_a_large_body_is_parsed_in_the_process_for_large_bodies(start: Start) -> None:
    running = await start(settings={"chat_template": TEMPLATE}, **says("x"))
    thoughts = [{"type": "redacted_thinking", "data": "x" * 20}] * 9000
    turn = [*thoughts, {"type": "text", "text": "y", "cache_control": {"type": "ephemeral"}}]
    history = [*CHAT, {"role": "assistant", "content": turn}, *CHAT]
    kept = await ranges(running, messages=history)
    assert kept == [(0, length("<|user|>Weather in Paris?<|assistant|>y"), 300)]
