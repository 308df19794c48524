"""The live view of a real server agrees with its metrics, and goes on when the scheduler is killed."""

from __future__ import annotations

import concurrent.futures
import itertools
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


def until_state(found: Iterator[dict[str, Any]], name: str, state: str, restarts: int) -> dict[str, Any]:
    """The first snapshot in which a service has this state and number of restarts."""
    for shown in itertools.islice(found, 120):  # a minute
        services = {one["name"]: one for one in shown["services"]}
        if name in services and (services[name]["state"], services[name]["num_restarts"]) == (state, restarts):
            return shown
    raise AssertionError(f"{name} was not seen as {state} with {restarts} restarts; at last {services}")


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
    until_state(found, "scheduler", "down", 0)
    stack.start("scheduler")
    back = next(shown for shown in found if shown["scheduler"] and shown["scheduler"]["workers"])
    assert back["scheduler"]["epoch"] > epoch
    until_state(found, "scheduler", "ready", 1)
    until_state(found, "worker-1", "ready", 0)
    complete(stack.url, 5)
    found.close()  # type: ignore[attr-defined]


def test_a_killed_worker_and_a_killed_cache_go_down_and_come_back(own_stack: Stack) -> None:
    stack = own_stack.up()
    found = snapshots(stack.url)
    until_state(found, "worker-1", "ready", 0)
    stack.kill("worker-1")
    until_state(found, "worker-1", "down", 0)
    stack.start("worker-1")
    until_state(found, "worker-1", "ready", 1)
    complete(stack.url, 5)
    stack.kill("cache")
    assert until_state(found, "cache", "down", 0)["cache"] is None
    stack.start("cache")
    assert until_state(found, "cache", "ready", 1)["cache"] is not None
    complete(stack.url, 5)
    found.close()  # type: ignore[attr-defined]


def ask(url: str, prompt: list[int], name: str, max_tokens: int = 2) -> dict[str, Any]:
    """Completes the prompt, and returns what the request's timeline says about the prefix cache."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "user": "ann"}
    headers = {"X-Request-ID": name}
    assert httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60).status_code == 200
    [sequence] = httpx.get(f"{url}/v1/requests/{name}/timeline").json()["sequences"]
    prefix = sequence["prefix"]
    assert prefix["cached_tokens"] + sum(one["num_tokens"] for one in prefix["missed"]) == len(prompt)
    return {"cached": prefix["cached_tokens"], **{one["reason"]: one["num_tokens"] for one in prefix["missed"]}}


def test_shared_and_evicted_prefixes_show(own_stack: Stack) -> None:
    own_stack.worker_flags = ["--threads", "1", "--num-blocks", "160"]
    stack = own_stack.up()
    shared = list(range(10, 110))  # six whole blocks and a part of one
    assert ask(stack.url, shared, "first") == {"cached": 0, "new": 96, "block_border": 4}
    assert ask(stack.url, shared, "again") == {"cached": 99, "block_border": 1}
    found = snapshots(stack.url)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        asked = [pool.submit(ask, stack.url, [*shared[:96], n], f"r{n}", 900) for n in (7, 8)]
        maps = ((one, one["cache"]["maps"][0]["cells"]) for one in itertools.islice(found, 60) if one["cache"])
        shown = next(one for one, cells in maps if cells.count("s") >= 6)
        for one in asked:
            assert one.result()["cached"] >= 96
    [blocks], tree = shown["cache"]["maps"], shown["cache"]["tree"]
    assert (blocks["name"], blocks["num_blocks"], len(blocks["cells"])) == ("worker-1", 160, 160)
    top = max(tree["nodes"], key=lambda node: node["saved_tokens"])
    assert (top["tenant"], top["parent"], top["num_tokens"], top["num_users"]) == ("ann", None, 96, 2)
    assert top["saved_tokens"] == 96 * top["num_hits"] >= 3 * 96
    for n in range(15):
        ask(stack.url, [n + 1] * 200, f"other-{n}")
    evicted = ask(stack.url, shared, "evicted")
    assert evicted["evicted"] == 96 - evicted["cached"] > 90
    found.close()  # type: ignore[attr-defined]
