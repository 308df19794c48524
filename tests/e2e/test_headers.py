"""Sessions and timings with real processes."""

from __future__ import annotations

from typing import Any

import httpx

from tests.support.stack import Stack

BODY: dict[str, Any] = {"prompt": "Once there was a fox that", "max_tokens": 24, "ignore_eos": True}


def test_a_session_finds_its_blocks_and_ends(stack: Stack) -> None:
    session = {"x-session-id": "e2e"}
    with httpx.Client(base_url=stack.url, timeout=60) as http:
        first = http.post("/v1/completions", json=BODY, headers=session).json()
        longer = BODY | {"prompt": BODY["prompt"] + first["choices"][0]["text"]}
        second = http.post("/v1/completions", json=longer, headers=session)
        took = second.json()["timings"]
        assert took["cache_n"] == took["cache_device_n"] + took["cache_host_n"] > 0
        assert took["predicted_n"] == 24
        assert took["prompt_ms"] > 0
        assert took["predicted_per_second"] > 0
        assert second.headers["server-timing"].startswith("queue;dur=")
        assert [http.delete("/v1/sessions/e2e").status_code for _ in range(2)] == [204, 404]
