"""After kill -9 of a gateway, the openai package continues at another gateway and gets the same events."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from examples.resuming_responses import resuming_events
from tests.support.stack import Stack

NUM_TOKENS = 600
ASKED: dict[str, Any] = {
    "model": "paceline-demo",
    "input": "Tell me of a fox.",
    "instructions": "Be brief.",
    "max_output_tokens": NUM_TOKENS,
    "temperature": 1.0,
    "extra_body": {"ignore_eos": True, "seed": 11},
}
RUNNING = "paceline_scheduler_num_requests_running"


def client_of(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def without_ids(events: list[Any]) -> list[Any]:
    """The events without ids. Of each response, only its status and its output texts are left."""
    told = []
    for event in events:
        data = json.loads(event.model_dump_json())
        shown = data.get("response")
        if shown is not None:
            data["response"] = shown["status"], [item["content"][0]["text"] for item in shown["output"]]
        for holder in (data, data.get("item") or {}):
            holder.pop("id", None)
            holder.pop("item_id", None)
        told.append(data)
    return told


def eventually(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not become true within 120 s"
        time.sleep(0.05)


def test_a_stream_of_a_killed_gateway_goes_on_at_another(
    own_stack: Stack, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    own_stack.gateway_flags = ["--response-store", store_url]
    stack = own_stack.up()
    first, second = client_of(stack.url), client_of(stack.start_gateway("gateway-2"))
    right = list(second.responses.create(**ASKED, stream=True))
    assert [event.sequence_number for event in right] == list(range(len(right)))
    assert right[-1].type == "response.incomplete"

    streams = [
        iter(first.responses.create(**ASKED, stream=True, background=background)) for background in (False, True)
    ]
    polled = first.responses.create(**ASKED, background=True)
    got = [[next(stream) for _ in range(20)] for stream in streams]
    stack.kill("gateway")
    for response_id in (*(events[0].response.id for events in got), polled.id):
        assert second.responses.retrieve(response_id).status == "in_progress", (
            "it had ended before the gateway was killed"
        )

    for events in got:
        seen = events[-1].sequence_number
        response_id = events[0].response.id
        events += second.responses.retrieve(response_id, stream=True, starting_after=seen)
        assert without_ids(events) == without_ids(right)
        stored = second.responses.retrieve(response_id)
        assert stored.output_text == "".join(e.delta for e in right if e.type == "response.output_text.delta")
        # A finished response is replayed from the store.
        replayed = list(second.responses.retrieve(response_id, stream=True))
        assert without_ids(replayed) == without_ids(right)
    # No client streams this one. The other gateway takes it over by itself, or when a client polls it.
    eventually(lambda: second.responses.retrieve(polled.id).status == "incomplete")
    assert second.responses.retrieve(polled.id).output_text == stored.output_text
    follow_up = second.responses.create(model="paceline-demo", input="Go on.", previous_response_id=polled.id)
    assert follow_up.usage is not None
    assert follow_up.usage.input_tokens > NUM_TOKENS / 2, "the conversation is in the prompt"
    assert stack.metric(RUNNING) == 0


def test_the_example_gives_each_event_once(own_stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    own_stack.gateway_flags = ["--response-store", f"sqlite:///{tmp_path}/responses.db"]
    stack = own_stack.up()
    first, second = client_of(stack.url), client_of(stack.start_gateway("gateway-2"))
    right = list(second.responses.create(**ASKED, stream=True))
    got = []
    for event in resuming_events([first, second], **ASKED):
        got.append(event)
        if len(got) == 30:
            stack.kill("gateway")
    assert without_ids(got) == without_ids(right)


def test_a_response_is_cancelled_at_another_gateway(
    own_stack: Stack, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    own_stack.gateway_flags = ["--response-store", store_url]
    stack = own_stack.up()
    first, second = client_of(stack.url), client_of(stack.start_gateway("gateway-2"))
    asked = ASKED | {"max_output_tokens": 1500}
    stream = iter(first.responses.create(**asked, stream=True, background=True))
    response_id = next(stream).response.id
    assert second.responses.cancel(response_id).status == "cancelled"
    last = list(stream)[-1]
    assert last.type == "response.incomplete"
    assert last.response.status == "cancelled"
    stack.wait_metric(RUNNING, 0)
    assert first.responses.retrieve(response_id).status == "cancelled"
