"""GET /v1/live and GET /v1/requests/{id}/timeline: which caller sees what, and what it costs without viewers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from paceline.v1 import admin_pb2, cache_pb2_grpc, live_pb2
from paceline.v1.inference_pb2 import SchedulerLoad
from services.gateway.live_view import cache_watch, feed
from services.gateway.live_view.figures import RecentFigures
from services.gateway.live_view.schema import LiveSnapshot
from tests.contract.cache.test_server import A, ask
from tests.contract.cache.test_server import running as cache_running
from tests.contract.gateway.conftest import Running, Start, eventually, statuses_at_once, until
from tests.contract.gateway.test_keys import Keys, bearer
from tests.unit.cache import driver as d

LIVE = "/v1/live"
COMPLETION = {"prompt": [7], "max_tokens": 5, "ignore_eos": True}


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys.toml")


async def snapshots(running: Running, headers: dict[str, str] | None = None) -> AsyncIterator[dict[str, Any]]:
    async with running.http.stream("GET", LIVE, params={"stream": "true"}, headers=headers or {}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line:
                yield json.loads(line.removeprefix("data: "))


async def test_snapshots_have_the_figures_of_scheduler_and_metrics(start: Start) -> None:
    running = await start()
    running.scheduler.view = live_pb2.WatchResponse(
        epoch=2**60,
        load=SchedulerLoad(num_running=3),
        policies=admin_pb2.PolicyChoice(preset="paceline"),
        workers=[live_pb2.LiveWorker(worker=7, num_slots=8, name="w")],
        steps=[live_pb2.LiveStep(worker=7, step=9, computed_s=0.5)],
    )
    found = snapshots(running)
    assert (await anext(found))["gateway"]["ttft_s"] == {"p50": None, "p90": None, "p99": None}
    for _ in range(3):
        assert (await running.http.post("/v1/completions", json=COMPLETION)).status_code == 200
    shown = await anext(found)
    while shown["gateway"]["generation_tokens"] < 15 or shown["scheduler"] is None:
        shown = await anext(found)
    assert (
        f'paceline_gateway_generation_tokens_total{{model_name="{shown["gateway"]["model"]}"}} 15.0'
        in (await running.http.get("/metrics")).text
    )
    assert shown["gateway"]["tokens_per_s"] == pytest.approx(15 / shown["gateway"]["window_s"])
    assert 0 < shown["gateway"]["ttft_s"]["p50"] <= shown["gateway"]["ttft_s"]["p99"]
    view = shown["scheduler"]
    assert LiveSnapshot.model_validate(shown, strict=True).model_dump() == shown, "the document's shape, and no more"
    assert (view["epoch"], view["load"]["num_running"], view["load"]["num_waiting"]) == (2**60, 3, 0)
    assert [(one["worker"], one["name"], one["num_slots"]) for one in view["workers"]] == [(7, "w", 8)]
    assert [(one["step"], one["computed_s"]) for one in view["steps"]] == [(9, 0.5)]
    await found.aclose()  # type: ignore[attr-defined]


async def test_snapshots_have_the_blocks_of_the_cache(start: Start) -> None:
    async with cache_running() as cache:
        running = await start(settings={"cache": cache.addresses.grpc})
        running.scheduler.view = live_pb2.WatchResponse(
            load=SchedulerLoad(), policies=admin_pb2.PolicyChoice(), workers=[live_pb2.LiveWorker(worker=3, name="w")]
        )
        link = cache.link()
        await ask(link, 1, d.add_worker_op(3, 8, 4), d.match_op(1, A), d.admit_op(1, 3), d.commit_op([(1, [], 16)]))
        shown = (await running.http.get(LIVE)).json()
        assert shown["cache"]["maps"] == [
            {
                "worker": 3,
                "name": "w",
                "num_blocks": 8,
                "blocks_per_cell": 1,
                "cells": "uuuu....",
                "num_host_blocks": 0,
                "host_blocks_per_cell": 1,
                "host_cells": "",
            }
        ]
        [node] = shown["cache"]["tree"]["nodes"]
        assert (node["parent"], node["num_tokens"], node["workers"], node["num_users"]) == (None, 16, [3], 1)
        assert shown["cache"]["prefix_query_tokens"] == 16
        assert [(one["kind"], one["name"], one["state"]) for one in shown["services"]] == [
            ("gateway", "gateway", "ready"),
            ("scheduler", "scheduler", "ready"),
            ("cache", "cache", "ready"),
            ("worker", "w", "ready"),
        ]
        link.cancel()
    shown = (await running.http.get(LIVE)).json()
    assert shown["cache"] is None
    assert [one["state"] for one in shown["services"] if one["kind"] == "cache"] == ["down"]


class OlderCache(cache_pb2_grpc.CacheServiceServicer):
    """A cache service that has no WatchBlocks."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def WatchBlocks(self, request: object, context: Any) -> None:  # type: ignore[override]
        self.num_calls += 1
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


async def test_an_older_cache_is_up_without_block_maps_and_is_rarely_asked(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_watch, "_RETRY_S", 0.01)
    monkeypatch.setattr(feed, "INTERVAL_S", 0.1)
    server, older = grpc.aio.server(), OlderCache()
    cache_pb2_grpc.add_CacheServiceServicer_to_server(older, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        running = await start(settings={"cache": f"127.0.0.1:{port}"})
        view = live_pb2.WatchResponse(load=SchedulerLoad(), policies=admin_pb2.PolicyChoice(), cache_connected=True)
        running.scheduler.view = view
        found = snapshots(running)
        for _ in range(4):
            shown = await anext(found)
            assert shown["cache"] is None
            assert [one["state"] for one in shown["services"] if one["kind"] == "cache"] == ["ready"]
        assert older.num_calls == 1
        view.cache_connected = False
        shown = await anext(found)
        while [one["state"] for one in shown["services"] if one["kind"] == "cache"] != ["down"]:
            shown = await anext(found)
        await found.aclose()  # type: ignore[attr-defined]
        for _ in range(2):
            assert (await running.http.get("/v1/live")).json()["cache"] is None
        assert older.num_calls == 1  # also viewers that come later do not ask it again at once
    finally:
        await server.stop(None)


async def test_an_older_cache_that_is_replaced_is_watched(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_watch, "_RETRY_OLDER_S", 0.05)
    async with cache_running() as cache:
        running = await start(settings={"cache": cache.addresses.grpc})
        read, refusals = cache_watch.CacheWatch._read, iter([True, True])

        async def older_at_first(watch: cache_watch.CacheWatch) -> None:
            if next(refusals, False):
                nothing = grpc.aio.Metadata()
                raise grpc.aio.AioRpcError(grpc.StatusCode.UNIMPLEMENTED, nothing, nothing, "", "")
            await read(watch)

        monkeypatch.setattr(cache_watch.CacheWatch, "_read", older_at_first)
        found = snapshots(running)
        assert (await anext(found))["cache"] is None
        while (await anext(found))["cache"] is None:
            pass
        await found.aclose()  # type: ignore[attr-defined]


async def test_the_cache_is_watched_only_while_a_viewer_looks(start: Start) -> None:
    async with cache_running() as cache:
        running = await start(settings={"cache": cache.addresses.grpc})
        labels = 'grpc_method="/paceline.v1.CacheService/WatchBlocks"'
        started, ended = (
            f"grpc_server_started_total{{{labels}}}",
            f'grpc_server_handled_total{{grpc_code="CANCELLED",{labels}}}',
        )
        before = await cache.metrics()  # counted since this process started
        viewers = [snapshots(running) for _ in range(3)]
        for viewer in viewers:
            assert (await anext(viewer))["cache"] is not None
        assert (await cache.metrics())[started] == before.get(started, 0) + 1
        for viewer in viewers:
            await viewer.aclose()  # type: ignore[attr-defined]

        async def is_over() -> bool:
            return (await cache.metrics()).get(ended, 0) == before.get(ended, 0) + 1

        await eventually(is_over)


async def test_one_snapshot_needs_no_stream(start: Start) -> None:
    running = await start()
    assert (await running.http.get(LIVE)).json()["scheduler"] is not None
    await until(lambda: running.scheduler.num_watchers == 0)
    refused = await running.http.get(LIVE, params={"stream": "yes"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")
    await running.scheduler.stop()
    await running.until_ready(503)
    assert (await running.http.get(LIVE)).json()["scheduler"] is None


async def test_a_live_view_that_fails_does_not_say_that_the_server_stops(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start()

    def fail(figures: RecentFigures, now_s: float) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(RecentFigures, "take", fail)
        failed = await running.http.get(LIVE)
    assert failed.status_code == 503
    assert "the live view has failed" in failed.json()["error"]["message"]
    assert (await running.http.get(LIVE)).status_code == 200


async def test_all_viewers_share_one_stream_that_ends_with_the_last_one(start: Start) -> None:
    running = await start()
    viewers = [snapshots(running) for _ in range(3)]
    for viewer in viewers:
        await anext(viewer)
    assert (running.scheduler.num_watchers, running.scheduler.num_watches) == (1, 1)
    for viewer in viewers[1:]:
        await viewer.aclose()  # type: ignore[attr-defined]
    await anext(viewers[0])
    assert running.scheduler.num_watchers == 1
    await viewers[0].aclose()  # type: ignore[attr-defined]
    await until(lambda: running.scheduler.num_watchers == 0)


async def test_viewers_see_that_the_scheduler_is_gone_and_back(start: Start) -> None:
    running = await start()
    found = snapshots(running)
    assert (await anext(found))["scheduler"] is not None
    await running.scheduler.stop()
    while (await anext(found))["scheduler"] is not None:
        pass
    await running.scheduler.start()
    shown = await anext(found)
    while shown["scheduler"] is None or not shown["gateway"]["ready"]:
        shown = await anext(found)
    await found.aclose()  # type: ignore[attr-defined]


async def test_viewers_go_on_when_the_session_closes_its_channel(start: Start) -> None:
    """Closing a channel cancels its calls."""
    running = await start()
    found = snapshots(running)
    assert (await anext(found))["scheduler"] is not None
    running.scheduler.break_streams()  # the session's stream ends, and its channel is closed under the call of Watch
    await until(lambda: running.scheduler.num_watchers == 0)
    while (await anext(found))["scheduler"] is None:
        pass
    await found.aclose()  # type: ignore[attr-defined]


async def test_viewers_are_bounded_and_do_not_hold_up_a_drain(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MAX_VIEWERS", 1)
    running = await start()
    found = snapshots(running)
    await anext(found)
    refused = await running.http.get(LIVE)
    assert (refused.status_code, refused.json()["error"]["reason"]) == (429, "too_many_viewers")
    assert int(refused.headers["retry-after"]) > 0
    running.stop.set()
    async with asyncio.timeout(5):
        async for _ in found:
            pass
        await running.task


async def test_viewers_of_one_instant_do_not_exceed_the_limit(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MAX_VIEWERS", 1)
    running = await start()
    assert sorted(await statuses_at_once(running, f"{LIVE}?stream=true", 4)) == [200, 429, 429, 429]

    async def is_free() -> bool:
        return (await running.http.get(LIVE)).status_code == 200

    await eventually(is_free)


async def test_only_an_admin_key_sees_all_tenants(start: Start, keys: Keys) -> None:
    ann, root = keys.add("ann"), keys.add("root", admin=True)
    running = await start(settings={"keys_file": str(keys.path)})
    refused = await running.http.get(LIVE, headers=bearer(ann))
    assert (refused.status_code, refused.json()["error"]["reason"]) == (403, "admin_required")
    assert (await running.http.get(LIVE)).status_code == 401
    found = snapshots(running, bearer(root))
    assert (await anext(found))["scheduler"] is not None
    await found.aclose()  # type: ignore[attr-defined]


async def test_a_key_sees_the_timeline_of_its_own_requests(start: Start, keys: Keys) -> None:
    ann, root = keys.add("ann"), keys.add("root", admin=True)
    running = await start(settings={"keys_file": str(keys.path)})
    spans = [
        admin_pb2.Explanation(request_id="a", reason="waiting", detail="10 tokens"),
        admin_pb2.Explanation(
            request_id="a", reason="order", detail="behind b, which waits for slots", behind="b", from_s=1, to_s=2
        ),
        admin_pb2.Explanation(request_id="a.1", reason="running", worker=3, first_decision=4, last_decision=5),
    ]
    reuse = admin_pb2.PrefixReuse(request_id="a.1", num_tokens=20, num_cached_tokens=16)
    reuse.missed.add(reason="block_border", num_tokens=4, detail="blocks have 16 tokens")
    running.scheduler.explanation = admin_pb2.ExplainResponse(explanations=spans, num_sequences=2, prefixes=[reuse])
    own = (await running.http.get("/v1/requests/cmpl-a/timeline", headers=bearer(ann))).json()
    assert (own["id"], own["object"], own["num_sequences"]) == ("cmpl-a", "request.timeline", 2)
    assert [(one["request_id"], len(one["spans"])) for one in own["sequences"]] == [("a", 2), ("a.1", 1)]
    assert [one["prefix"] for one in own["sequences"]] == [
        None,
        {
            "prompt_tokens": 20,
            "cached_tokens": 16,
            "missed": [{"reason": "block_border", "num_tokens": 4, "detail": "blocks have 16 tokens"}],
        },
    ]
    behind = own["sequences"][0]["spans"][1]
    assert (behind["detail"], behind["behind"]) == ("behind another request, which waits for slots", None)
    assert (behind["from_s"], behind["to_s"], behind["worker"]) == (1, 2, None)
    of_all = (await running.http.get("/v1/requests/cmpl-a/timeline?tenant=t", headers=bearer(root))).json()
    behind = of_all["sequences"][0]["spans"][1]
    assert (behind["detail"], behind["behind"]) == ("behind b, which waits for slots", "b")
    first, second = running.scheduler.explained
    assert (first.request_id, first.key, first.HasField("tenant")) == ("cmpl-a", "ann", False)
    assert (second.HasField("key"), second.tenant) == (False, "t")


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        (grpc.StatusCode.NOT_FOUND, 404, "request_not_found"),
        (grpc.StatusCode.FAILED_PRECONDITION, 409, "several_owners"),
        (grpc.StatusCode.INTERNAL, 503, None),
    ],
)
async def test_a_timeline_that_the_scheduler_refuses(
    start: Start, code: grpc.StatusCode, status: int, reason: str | None
) -> None:
    running = await start()
    running.scheduler.explanation = code
    answer = await running.http.get("/v1/requests/x/timeline")
    assert (answer.status_code, answer.json()["error"]["reason"]) == (status, reason or "service_unavailable")


async def test_without_a_scheduler_a_timeline_is_unavailable(start: Start) -> None:
    running = await start(scheduler_up=False)
    answer = await running.http.get("/v1/requests/x/timeline")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
