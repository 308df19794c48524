"""The live view of a real server agrees with its metrics, and goes on when the scheduler is killed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx

from services.gateway.live_view.schema import LiveSnapshot
from tests.support.stack import Stack


def snapshots(url: str) -> Iterator[dict[str, Any]]:
    with httpx.stream("GET", f"{url}/v1/live?stream=true", timeout=30) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line:
                yield json.loads(line.removeprefix("data: "))


def complete(url: str, max_tokens: int, name: str = "") -> None:
    body = {"prompt": "Once there was a fox", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    headers = {"X-Request-ID": name} if name else {}
    assert httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60).status_code == 200


def test_the_figures_are_those_of_the_metrics(stack: Stack) -> None:
    found = snapshots(stack.url)
    before = next(shown for shown in found if shown["scheduler"])
    working = threading.Thread(target=complete, args=(stack.url, 200, "watched"))
    working.start()
    steps: list[dict[str, Any]] = []
    for shown in found:
        steps += shown["scheduler"]["steps"]
        if sum(step["num_decodes"] for step in steps) >= 199 and not shown["gateway"]["live_requests"]:
            break
    working.join()
    found.close()  # type: ignore[attr-defined]
    assert shown["cache"]["tree"]["nodes"]
    assert LiveSnapshot.model_validate(shown, strict=True).model_dump() == shown, "the document's shape, and no more"
    view = shown["scheduler"]
    # Without other clients all tokens between the two snapshots are those of this request.
    assert view["num_generated_tokens"] - before["scheduler"]["num_generated_tokens"] == 200
    series = 'paceline_gateway_generation_tokens_total{model_name="paceline-demo"}'
    assert f"{series} {shown['gateway']['generation_tokens']}.0" in httpx.get(f"{stack.url}/metrics").text
    assert shown["gateway"]["itl_s"]["p50"] > 0
    assert sum(step["num_prefills"] for step in steps) >= 1
    for step in steps:
        assert step["planned_s"] <= step["sent_s"] <= step["ended_s"]
        assert 0 < step["computed_s"] <= step["ended_s"] - step["planned_s"]
    assert {step["worker"] for step in steps} <= {worker["worker"] for worker in view["workers"]}
    timeline = httpx.get(f"{stack.url}/v1/requests/watched/timeline").json()
    [sequence] = timeline["sequences"]
    assert [span["reason"] for span in sequence["spans"]][-2:] == ["running", "ended"]
    assert httpx.get(f"{stack.url}/v1/requests/unknown/timeline").status_code == 404


def test_the_view_goes_on_when_the_scheduler_is_killed(own_stack: Stack) -> None:
    stack = own_stack.up()
    found = snapshots(stack.url)
    epoch = next(shown for shown in found if shown["scheduler"])["scheduler"]["epoch"]
    stack.kill("scheduler")
    next(shown for shown in found if not (shown["scheduler"] or shown["gateway"]["ready"]))
    stack.start("scheduler")
    back = next(shown for shown in found if shown["scheduler"] and shown["scheduler"]["workers"])
    assert back["scheduler"]["epoch"] > epoch
    complete(stack.url, 5)
    found.close()  # type: ignore[attr-defined]
