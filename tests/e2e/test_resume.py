"""After kill -9 of a gateway, its clients continue their streams at another gateway and get the same tokens."""

from __future__ import annotations

import asyncio
import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import pytest

from examples.resuming_stream import resuming_stream
from services.client import AsyncPacelineClient, Piece, Unavailable
from services.client.types import result_from
from tests.support import load
from tests.support.sse import Event, Told, alike, parse_events, told
from tests.support.stack import Stack

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
RUNNING, USED = "paceline_scheduler_num_requests_running", "paceline_scheduler_kv_cache_usage_ratio"
DECODED = 'paceline_worker_tokens_total{phase="decode"}'
USED_BLOCKS = 'paceline_cache_blocks{state="used",worker="1"}'
NUM_TOKENS = 240
LONG = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "stream_options": {"include_usage": True}}
MESSAGES = [{"role": "user", "content": "Tell me of a fox."}]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (COMPLETION, {"prompt": "Once there was", "temperature": 0}),
    "sampled": (COMPLETION, {"prompt": "Once there was", "temperature": 1.0}),
    "several": (COMPLETION, {"prompt": "One day", "temperature": 1.0, "n": 3, "stop": ["no such end", "e no such"]}),
    "scored": (COMPLETION, {"prompt": "One day", "temperature": 1.0, "logprobs": 2, "presence_penalty": 0.5}),
    "chat": (CHAT, {"messages": MESSAGES, "temperature": 0.7, "logprobs": True, "top_logprobs": 1, "n": 2}),
    "prompts": (COMPLETION, {"prompt": ["A fox", "A fox"], "temperature": 1.0}),
}


def knowledge(chunks: list[Any]) -> Told:
    known = told(Event("", json.dumps(chunk)) for chunk in chunks)
    for usage in known.rest:  # what was found in the cache is no part of the answer
        usage.pop("prompt_tokens_details")
    assert len(known.heads) == 1
    known.heads.clear()
    return known


async def answers(cases: dict[str, tuple[str, dict[str, Any]]], gateways: list[str], got: dict[str, list[Any]]) -> None:
    """Every case's chunks go into `got` as they come."""

    def read(name: str) -> None:
        path, body = cases[name]
        for chunk in resuming_stream(gateways, path, LONG | body, key=name):
            got[name].append(chunk)

    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(len(cases)) as threads:
        await asyncio.gather(*(loop.run_in_executor(threads, read, name) for name in cases))


async def test_streams_of_a_killed_gateway_go_on_at_another(own_stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    own_stack.gateway_flags = ["--resume-keep-s", "0"]  # nothing is left of the undisturbed run
    stack = await asyncio.to_thread(own_stack.up)
    other = await asyncio.to_thread(stack.start_gateway, "gateway-2")
    right: dict[str, list[Any]] = {name: [] for name in CASES}
    await answers(CASES, [other], right)
    # A stream that a stop string ends. The stop string is near the end of the text.
    text = "".join(chunk["choices"][0]["text"] for chunk in right["greedy"] if chunk["choices"])
    stopping = COMPLETION, CASES["greedy"][1] | {"stop": [text[-60:-50]]}
    right["stopping"] = []
    await answers({"stopping": stopping}, [other], right)
    assert [chunk["choices"][0]["finish_reason"] for chunk in right["stopping"] if chunk["choices"]][-1] == "stop"

    cases = CASES | {"stopping": stopping}
    targets = [f"127.0.0.1:{grpc_port}" for _, grpc_port in stack.gateway_ports.values()]
    right_pieces: list[Piece] = []
    await over_grpc(targets[1:], right_pieces)

    got: dict[str, list[Any]] = {name: [] for name in cases}
    pieces: list[Piece] = []
    serving = asyncio.gather(answers(cases, [stack.url, other], got), over_grpc(targets, pieces))
    async with asyncio.timeout(200):
        while min(map(len, [pieces, *got.values()])) < 4:  # noqa: ASYNC110 - other threads' state
            await asyncio.sleep(0.01)
    await asyncio.to_thread(stack.kill, "gateway")
    seen = {name: len(chunks) for name, chunks in got.items()}
    seen_pieces = len(pieces)
    await serving
    assert seen_pieces < len(pieces)
    mine, whole = result_from(pieces), result_from(right_pieces)
    assert (mine.text, mine.token_ids, mine.finish_reason) == (whole.text, whole.token_ids, whole.finish_reason)
    assert len(mine.logprobs) == mine.usage.completion_tokens == NUM_TOKENS
    for name in cases:
        ours, theirs = knowledge(got[name]), knowledge(right[name])
        assert ours.texts == theirs.texts, name
        assert alike(asdict(ours), asdict(theirs)), (name, ours, theirs)
        assert seen[name] < len(got[name]), "it had ended before the gateway was killed"
    await killed_and_nothing_left(stack, "gateway-2", other)


async def killed_and_nothing_left(stack: Stack, name: str, url: str) -> None:
    """The clients of a gateway do not come back: its requests are aborted, and their blocks are free."""
    await asyncio.to_thread(stack.wait_metric, RUNNING, 0)
    wanted = [load.Wanted(prompt, 1000) for prompt in load.random_prompts(12, 3, 1000)]
    serving = asyncio.create_task(load.stream_all(url, wanted))
    await asyncio.to_thread(stack.wait_metric, RUNNING, len(wanted))
    assert (stack.metric(USED) or 0) > 0
    await asyncio.to_thread(stack.kill, name)
    await asyncio.to_thread(stack.wait_metric, RUNNING, 0)
    await asyncio.to_thread(stack.wait_metric, USED_BLOCKS, 0, of="cache")
    assert all(got.errors for got in await serving)


async def over_grpc(targets: list[str], pieces: list[Piece]) -> None:
    """The pieces of one answer, from one gateway after the other."""
    options: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 1.0, "logprobs": 0}
    for target in targets:
        seen = sum(len(piece.token_ids) for piece in pieces)
        async with AsyncPacelineClient(target, retry_for_s=1) as client:
            stream = client.stream("Once there was", **options, idempotency_key="grpc", resume_after=seen)
            with contextlib.suppress(Unavailable):
                async for piece in stream:
                    pieces.append(piece)  # noqa: PERF401 - they are counted while they come
                return


async def test_a_client_that_reconnects_to_the_same_gateway_gets_every_event(stack: Stack) -> None:
    num_tokens = 2 * NUM_TOKENS  # so that there is a rest, however many tokens come in one event
    body = LONG | {"max_tokens": num_tokens, "prompt": "Once there was", "temperature": 1.0, "stream": True}
    headers = {"Idempotency-Key": "k"}
    events: list[Event] = []
    before = stack.metric(DECODED, "worker-1") or 0
    async with load.client(stack.url) as http:
        for wanted in (5, 10, None):
            lines: list[str] = []
            async with http.stream("POST", COMPLETION, json=body, headers=headers) as answer:
                assert answer.status_code == 200
                async for line in answer.aiter_lines():
                    lines.append(line)
                    if lines.count("") == wanted:
                        break
            events += parse_events(lines)
            headers["Last-Event-ID"] = events[-1].id
        del headers["Last-Event-ID"]
        again = await http.post(COMPLETION, json=body, headers=headers)
        other = await http.post(COMPLETION, json=body | {"max_tokens": 5}, headers=headers)
    assert told(events) == told(parse_events(again.text.splitlines()))
    assert (other.status_code, other.json()["error"]["param"]) == (422, "Idempotency-Key")
    assert (stack.metric(DECODED, "worker-1") or 0) - before < 1.5 * num_tokens
