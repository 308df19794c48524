"""GET /v1/live/trace: which key may record a trace, for how long, and what the records have."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from paceline.v1 import live_pb2
from services.gateway.live_view import routes
from services.gateway.live_view.trace_schema import TraceRecord
from services.gateway.live_view.traces import MAX_SECONDS
from tests.contract.gateway.conftest import Running, Start, eventually, statuses_at_once, until
from tests.contract.gateway.test_keys import Keys, bearer

TRACE = "/v1/live/trace"
COMPLETION = {"prompt": [7], "max_tokens": 5, "ignore_eos": True}


async def records(running: Running, seconds: float, headers: dict[str, str] | None = None) -> AsyncIterator[Any]:
    async with running.http.stream("GET", TRACE, params={"seconds": seconds}, headers=headers or {}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line:
                yield json.loads(line.removeprefix("data: "))


async def test_records_have_the_scheduler_s_times_and_the_gateway_s_own(start: Start) -> None:
    running = await start()
    step = live_pb2.TracedStep(worker=3, step=2**40, sent_us=1)
    running.scheduler.traced = live_pb2.TraceResponse(epoch=2**60, received_us=2**50, sent_us=2**50, steps=[step])
    found = records(running, 5)
    first = await anext(found)
    answer = await running.http.post("/v1/completions", json=COMPLETION)
    assert answer.status_code == 200
    messages: list[Any] = []
    written: list[Any] = []
    requests: list[Any] = []
    while not requests:
        of_gateway = (await anext(found))["gateway"]
        messages += of_gateway["messages"]
        written += of_gateway["written"]
        requests += of_gateway["requests"]
    await found.aclose()  # type: ignore[attr-defined]
    view = first["scheduler"]
    assert (view["epoch"], view["received_us"], view["steps"][0]["step"]) == (2**60, 2**50, 2**40)
    assert view["asked_us"] <= view["got_us"] <= first["gateway"]["at_us"]
    [request] = requests
    assert (request["answer_id"], request["output_tokens"]) == (answer.json()["id"], 5)
    assert sum(one["num_tokens"] for one in written) == 5
    assert all(first["gateway"]["at_us"] <= one["received_us"] <= one["ended_us"] for one in messages)
    assert sum(one["num_tokens"] for one in messages) >= 5


async def test_a_trace_ends_by_itself_and_nothing_is_recorded_after_it(start: Start) -> None:
    running = await start()
    began_s = asyncio.get_running_loop().time()
    assert len([one async for one in records(running, 0.3)]) >= 2
    assert 0.3 <= asyncio.get_running_loop().time() - began_s < 3
    await until(lambda: running.scheduler.num_watchers == 0)
    assert (await running.http.post("/v1/completions", json=COMPLETION)).status_code == 200
    found = records(running, 5)
    assert (await anext(found))["gateway"]["requests"] == []
    await found.aclose()  # type: ignore[attr-defined]


async def test_one_trace_at_a_time(start: Start) -> None:
    running = await start()
    found = records(running, 20)
    await anext(found)
    refused = await running.http.get(TRACE, params={"seconds": 1})
    assert (refused.status_code, refused.json()["error"]["reason"]) == (429, "too_many_traces")
    await found.aclose()  # type: ignore[attr-defined]
    await until(lambda: running.scheduler.num_watchers == 0)
    assert [one async for one in records(running, 0.1)]


async def test_two_traces_of_one_instant_are_not_both_recorded(start: Start) -> None:
    running = await start()
    assert sorted(await statuses_at_once(running, f"{TRACE}?seconds=20", 4)) == [200, 429, 429, 429]

    async def is_free() -> bool:
        return (await running.http.get(TRACE, params={"seconds": 0.1})).status_code == 200

    await eventually(is_free)


async def ask_for_much(running: Running, seconds: float) -> socket.socket:
    """Begins a trace with 700 kB in each answer of the scheduler, without reading it."""
    steps = [live_pb2.TracedStep(worker=3, step=n, name="w") for n in range(4000)]
    running.scheduler.traced = live_pb2.TraceResponse(epoch=1, steps=steps)
    assert running.addresses.http is not None
    host, port = running.addresses.http.split(":")
    loop, sock = asyncio.get_running_loop(), socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await loop.sock_connect(sock, (host, int(port)))
    await loop.sock_sendall(sock, f"GET {TRACE}?seconds={seconds} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    await until(lambda: running.scheduler.num_watchers == 1)
    assert (await running.http.get(TRACE, params={"seconds": 1})).status_code == 429
    return sock


@pytest.mark.usefixtures("small_send_buffers")
async def test_a_reader_that_reads_nothing_loses_the_trace(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MAX_BEHIND_S", 0.2)
    running = await start()
    with await ask_for_much(running, 1):
        await until(lambda: running.scheduler.num_watchers == 0)
        running.scheduler.traced = live_pb2.TraceResponse(epoch=1)
        assert [one async for one in records(running, 0.1)]


@pytest.mark.usefixtures("small_send_buffers")
async def test_a_reader_that_reads_little_loses_the_trace_some_time_after_its_end(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "MAX_BEHIND_S", 2.0)
    running = await start()
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    with await ask_for_much(running, 0.5) as sock:
        while running.scheduler.num_watchers:
            await loop.sock_recv(sock, 8192)
            await asyncio.sleep(0.03)
    assert 2.5 <= loop.time() - began_s < 6


async def test_a_large_answer_comes_in_records_of_bounded_size(start: Start) -> None:
    running = await start()
    steps = [live_pb2.TracedStep(worker=3, step=n) for n in range(1000)]
    runs = [live_pb2.TracedRun(began_us=n, event="tick") for n in range(300)]
    running.scheduler.traced = live_pb2.TraceResponse(epoch=1, steps=steps, runs=runs, num_missed=7)
    found = [one async for one in records(running, 0.05)]
    parts = [TraceRecord.model_validate(one, strict=True).scheduler for one in found]
    first = [part for part in parts if part is not None][:8]
    assert [step.step for part in first for step in part.steps] == [*range(1000)]
    assert [run.began_us for part in first for run in part.runs] == [*range(300)]
    assert [part.num_missed for part in first] == [7, *[0] * 7]


@pytest.mark.parametrize("seconds", ["0", "-1", "61", "nan", "inf", "x", ""])
async def test_a_wrong_time_is_refused(start: Start, seconds: str) -> None:
    running = await start()
    refused = await running.http.get(TRACE, params={"seconds": seconds})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "seconds")
    assert f"at most {MAX_SECONDS:g}" in refused.json()["error"]["message"]


async def test_a_trace_outlives_the_scheduler_and_does_not_hold_up_a_drain(start: Start) -> None:
    running = await start()
    found = records(running, 30)
    assert (await anext(found))["scheduler"] is not None
    await running.scheduler.stop()
    while (await anext(found))["scheduler"] is not None:
        pass
    await running.scheduler.start()
    while (await anext(found))["scheduler"] is None:
        pass
    running.stop.set()
    async with asyncio.timeout(5):
        async for _ in found:
            pass
        await running.task


async def test_only_an_admin_key_may_record_a_trace(start: Start, tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.toml")
    ann, root = keys.add("ann"), keys.add("root", admin=True)
    running = await start(settings={"keys_file": str(keys.path)})
    refused = await running.http.get(TRACE, params={"seconds": 1}, headers=bearer(ann))
    assert (refused.status_code, refused.json()["error"]["reason"]) == (403, "admin_required")
    assert (await running.http.get(TRACE, params={"seconds": 1})).status_code == 401
    assert [one async for one in records(running, 0.1, bearer(root))]
