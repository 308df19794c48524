"""Web pages of other origins: what the browser asks beforehand, and what it needs to show them an answer."""

from __future__ import annotations

import asyncio

import pytest

from tests.contract.gateway.conftest import MODEL, Running, Start, until

PAGE = "https://page.example"
ASKS = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,idempotency-key,x-stainless-lang",
}
HEADERS = {"Origin": PAGE, "Content-Type": "application/json"}
BODY = {"model": MODEL, "prompt": "x", "max_tokens": 3}


async def test_a_page_may_ask(running: Running) -> None:
    before = await running.http.options("/v1/completions", headers=ASKS)
    assert before.status_code == 200
    assert before.headers["access-control-allow-origin"] == "*"
    assert "POST" in before.headers["access-control-allow-methods"]
    assert before.headers["access-control-allow-headers"] == ASKS["Access-Control-Request-Headers"]


@pytest.mark.parametrize(("more", "status"), [({}, 200), ({"stream": True}, 200), ({"n": 0}, 400)])
async def test_a_page_may_read_every_answer(running: Running, more: dict[str, object], status: int) -> None:
    answer = await running.http.post("/v1/completions", headers=HEADERS, json={**BODY, **more})
    assert answer.status_code == status
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert answer.text.endswith("data: [DONE]\n\n") == ("stream" in more)
    without = await running.http.post("/v1/completions", json={**BODY, **more})
    assert not [name for name in without.headers if name.startswith("access-control")]


async def test_a_page_may_read_that_there_is_no_room(start: Start) -> None:
    running = await start(settings={"max_live_requests": 1})
    running.scheduler.paused = True
    task = asyncio.create_task(running.http.post("/v1/completions", json=BODY))
    await until(lambda: running.scheduler.num_running == 1)
    refused = await running.http.post("/v1/completions", headers=HEADERS, json=BODY)
    assert refused.status_code == 429
    assert refused.headers["access-control-allow-origin"] == "*"
    assert "retry-after" in refused.headers["access-control-expose-headers"]
    running.scheduler.paused = False
    assert (await task).status_code == 200


@pytest.mark.parametrize("allowed", ["", "https://other.example, https://third.example:8443"])
async def test_other_pages_may_not(start: Start, allowed: str) -> None:
    running = await start(settings={"allowed_origins": allowed})
    assert (await running.http.options("/v1/completions", headers=ASKS)).status_code == 400
    answer = await running.http.post("/v1/completions", headers=HEADERS, json=BODY)
    assert "access-control-allow-origin" not in answer.headers
    for origin in filter(None, allowed.split(", ")):
        answer = await running.http.get("/v1/models", headers={"Origin": origin})
        assert answer.headers["access-control-allow-origin"] == origin
        assert answer.headers["vary"] == "Origin"
