"""Texts with characters at which Python's `str.splitlines`, and so httpx' `iter_lines`, would end a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.contract.gateway.conftest import MODEL, Start
from tests.contract.gateway.test_anthropic import says
from tests.contract.gateway.test_batches import begin, jsonl, launch, line, results, until_status

TEXT = "a\x85b\u2028c\u2029d\vé"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 50}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 50},
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/responses": {"input": "x", "max_output_tokens": 50},
}


def text_of(event: dict[str, Any]) -> str:
    """The new text in an event of any of the APIs."""
    for choice in event.get("choices", ()):
        return str(choice["text"] if "text" in choice else choice["delta"].get("content", ""))
    delta = event.get("delta", "")
    return str(delta.get("text", "") if isinstance(delta, dict) else delta)


@pytest.mark.parametrize("path", BODIES)
async def test_separators_in_a_text_end_no_line_of_a_stream(start: Start, path: str) -> None:
    running = await start(**says(TEXT))
    async with running.http.stream("POST", path, json=BODIES[path] | {"stream": True}) as answer:
        assert answer.status_code == 200
        data = [one[6:] async for one in answer.aiter_lines() if one.startswith("data: {")]
    assert "".join(text_of(json.loads(one)) for one in data) == TEXT


async def test_separators_in_a_text_end_no_line_of_a_batch(start: Start, tmp_path: Path) -> None:
    running = await launch(start, tmp_path, **says(TEXT))
    ended = await until_status(
        running, await begin(running, jsonl(line("r", max_tokens=50, ignore_eos=False))), "completed"
    )
    body = (await results(running, ended["output_file_id"]))["r"]["response"]["body"]
    assert body["choices"][0]["message"]["content"] == TEXT
