"""CacheAdminService and `paceline cache` against a real server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.v1 import admin_pb2, admin_pb2_grpc, cache_pb2_grpc
from paceline.v1 import cache_pb2 as pb
from scheduler_svc.core.cache.namespaces import CacheNamespaces
from services.cli import cache as cli
from services.gateway.text.tokenizer import TextTokenizer
from tests.contract.cache.test_events import event_of, kinds, run_ops, watch
from tests.contract.cache.test_server import TIMEOUT_S, A, Running, ask, running
from tests.contract.gateway.test_openai import CHECKPOINT
from tests.support.ports import free_port
from tests.unit.cache import driver as d

IDS = ",".join(map(str, A))
NAMESPACES = CacheNamespaces("tenant", b"0123456789abcdef")


@pytest.fixture
async def cache() -> AsyncIterator[Running]:
    async with running() as server:
        yield server


@pytest.fixture
async def link(cache: Running) -> AsyncIterator[grpc.aio.StreamStreamCall]:
    """A link of a scheduler, with prompt A cached on worker 3."""
    call = cache.link()
    await ask(call, 1, d.add_worker_op(3, 8, 4), *run_ops(1, A, 3))
    yield call
    call.cancel()


def stub(cache: Running) -> cache_pb2_grpc.CacheAdminServiceAsyncStub:
    return cache_pb2_grpc.CacheAdminServiceStub(cache.channel)


class NamingScheduler(admin_pb2_grpc.AdminServiceServicer):
    async def GetCacheNamespace(self, request: Any, context: Any) -> admin_pb2.GetCacheNamespaceResponse:
        name = NAMESPACES.name(request.tenant, request.cache_salt)
        return admin_pb2.GetCacheNamespaceResponse(cache_salt=name)


@contextlib.asynccontextmanager
async def naming_scheduler() -> AsyncIterator[str]:
    """Yields the address of a fake scheduler that names cache namespaces."""
    server = grpc.aio.server()
    admin_pb2_grpc.add_AdminServiceServicer_to_server(NamingScheduler(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def paceline_cache(cache: Running, *argv: str) -> int:
    return await asyncio.to_thread(cli.main, [*argv, "--cache", str(cache.addresses.grpc)])


async def test_pin_list_unpin_reset(cache: Running, link: grpc.aio.StreamStreamCall) -> None:
    answer = await stub(cache).PinPrefix(
        pb.PinPrefixRequest(name="system", token_ids=d.pack(A[:9]), ttl_s=100), timeout=TIMEOUT_S
    )
    assert [(place.worker, place.num_tokens) for place in answer.pin.workers] == [(3, 8)]
    (pin,) = (await stub(cache).ListPins(pb.ListPinsRequest())).pins
    assert pin.name == "system"
    assert 90 < pin.expires_in_s <= 100
    (worker,) = (await stub(cache).GetCacheStats(pb.GetCacheStatsRequest())).workers
    assert (worker.pinned_blocks, worker.max_pinned_blocks) == (2, 4)
    assert (worker.pool.free_blocks, worker.pool.cached_blocks, worker.pool.used_blocks) == (4, 2, 2)
    (forgotten,) = (await stub(cache).ResetCache(pb.ResetCacheRequest())).workers
    assert (forgotten.worker, forgotten.num_blocks) == (3, 2)
    (pool,) = (await ask(link, 2)).pools
    assert (pool.free_blocks, pool.cached_blocks, pool.used_blocks) == (6, 0, 2)
    await stub(cache).UnpinPrefix(pb.UnpinPrefixRequest(name="system"))
    assert not (await stub(cache).ListPins(pb.ListPinsRequest())).pins
    (pool,) = (await ask(link, 3)).pools
    assert (pool.free_blocks, pool.cached_blocks, pool.used_blocks) == (6, 2, 0)


async def test_a_pin_ends_with_its_time_and_the_next_exchange_reports_its_end(
    cache: Running, link: grpc.aio.StreamStreamCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ms = 1_000_000
    for module in ("server", "admin"):
        monkeypatch.setattr(f"cache_svc.{module}.now_ms", lambda: now_ms)
    await stub(cache).PinPrefix(pb.PinPrefixRequest(name="x", token_ids=d.pack(A), ttl_s=1))
    now_ms += 999
    assert [pool.used_blocks for pool in (await ask(link, 2)).pools] == [4]
    now_ms += 1
    assert [pool.used_blocks for pool in (await ask(link, 3)).pools] == [0]


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"name": ""}, grpc.StatusCode.INVALID_ARGUMENT, "name: has 0 characters"),
        ({"token_ids": b"123"}, grpc.StatusCode.INVALID_ARGUMENT, "token_ids: 3 bytes"),
        ({"token_ids": d.pack([1])}, grpc.StatusCode.INVALID_ARGUMENT, "token_ids: has 1 tokens"),
        ({"token_ids": d.pack([1] * 9)}, grpc.StatusCode.NOT_FOUND, "token_ids: no block"),
        ({"workers": [9]}, grpc.StatusCode.NOT_FOUND, "workers: 9 not known"),
        ({"token_ids": d.pack([5] * 20)}, grpc.StatusCode.RESOURCE_EXHAUSTED, "5 more blocks of worker 4"),
        ({"name": "taken"}, grpc.StatusCode.ALREADY_EXISTS, "name: 'taken' is pinned already"),
    ],
)
async def test_a_bad_pin_is_refused_with_the_wrong_field(
    cache: Running, link: grpc.aio.StreamStreamCall, fields: dict[str, Any], code: grpc.StatusCode, words: str
) -> None:
    await ask(link, 2, d.add_worker_op(4, 8, 4), *run_ops(2, [5] * 20, 4))
    await stub(cache).PinPrefix(pb.PinPrefixRequest(name="taken", token_ids=d.pack(A)))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub(cache).PinPrefix(pb.PinPrefixRequest(**{"name": "x", "token_ids": d.pack(A), **fields}))
    assert error.value.code() is code
    assert words in (error.value.details() or "")


async def test_an_unknown_pin_cannot_be_unpinned(cache: Running) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="name: nothing is pinned as 'x'") as error:
        await stub(cache).UnpinPrefix(pb.UnpinPrefixRequest(name="x"))
    assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_the_command_line(
    cache: Running, link: grpc.aio.StreamStreamCall, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert await paceline_cache(cache, "pins") == 0
    assert await paceline_cache(cache, "pin", "system", "--tokens", IDS) == 0
    ids = tmp_path / "ids"
    ids.write_text(" ".join(map(str, A[:8])))
    assert await paceline_cache(cache, "pin", "short", "--tokens-file", str(ids), "--ttl-s", "50", "--worker", "3") == 0
    assert await paceline_cache(cache, "pins") == 0
    assert await paceline_cache(cache, "stats") == 0
    assert await paceline_cache(cache, "unpin", "system") == 0
    async with naming_scheduler() as scheduler:
        assert await paceline_cache(cache, "reset", "--salt", "unused", "--scheduler", scheduler) == 0
    assert await paceline_cache(cache, "reset") == 0
    lines = capsys.readouterr().out.splitlines(keepends=True)
    out = "".join(line for line in lines if not line.startswith("20"))  # the server logs here, too
    assert out.startswith("nothing is pinned\npinned: 16 tokens on worker 3\npinned: 8 tokens on worker 3\n")
    assert "blocks of 4 tokens; 0 of 16 prompt tokens reused (0.0%)\n" in out
    assert out.endswith("unpinned: system\nforgotten: 0 blocks of worker 3\nforgotten: 2 blocks of worker 3\n")


async def test_the_beginning_of_chats_is_pinned_by_its_messages(
    cache: Running, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Two chats with the same system prompt share its tokens and a few of the template. The pin covers them all."""
    system = {"role": "system", "content": "You are a helpful assistant. " * 5}
    tokenizer = TextTokenizer.from_folder(CHECKPOINT)
    ran, other, alone = (
        tokenizer.encode_chat([system, *more], add_generation_prompt=bool(more))
        for more in ([{"role": "user", "content": "hello"}], [{"role": "user", "content": "bye"}], [])
    )
    common = next(i for i, (one, two) in enumerate(zip(ran, other, strict=False)) if one != two)
    link = cache.link()
    await ask(link, 1, d.add_worker_op(0, 400, 1), *run_ops(1, ran))
    file = tmp_path / "messages.json"
    argv = ["pin", "system", "--model", str(CHECKPOINT), "--messages-file", str(file)]
    file.write_text(json.dumps([{**system, "role": "developer"}]))
    assert await paceline_cache(cache, *argv) == 0
    (pin,) = (await stub(cache).ListPins(pb.ListPinsRequest())).pins
    assert [place.num_tokens for place in pin.workers] == [common]
    assert common > len(alone) - 3
    for written in ("{", "[7]", '[{"role": "system"}]', "7"):
        file.write_text(written)
        assert await paceline_cache(cache, *argv) == 2
        assert "--messages-file: " in capsys.readouterr().err
    link.cancel()


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        (["pin", "x", "--tokens", "1,-2"], 2, "--tokens: '-2' is not a token id, 0..2147483647"),
        (["pin", "x", "--tokens", "1"], 2, "token_ids: has 1 tokens, but only whole blocks of 4 tokens can be pinned"),
        (["pin", "x", "--tokens", IDS, "--ttl-s", "-1"], 2, "--ttl-s: -1 is not within 0..4294967295"),
        (["pin", "x", "--tokens", IDS, "--worker", "-1"], 2, "--worker: [-1] are not all ids of workers"),
        (["pin", "x", "--text-file", "/nowhere"], 2, "--text-file: --model is needed, for its tokenizer"),
        (["pin", "x", "--messages-file", "/nowhere"], 2, "--messages-file: --model is needed"),
        (["pin", "x", "--tokens-file", "/nowhere"], 2, "/nowhere"),
        (["events", "--after", "-1"], 2, "--after: -1 is not the number of an event"),
        (["unpin", "x"], 1, "name: nothing is pinned as 'x'"),
    ],
)
async def test_the_command_line_says_what_is_wrong(
    cache: Running,
    link: grpc.aio.StreamStreamCall,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    status: int,
    words: str,
) -> None:
    assert await paceline_cache(cache, *argv) == status
    assert words in capsys.readouterr().err


async def test_pins_and_resets_of_a_tenant(
    cache: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator gives tenant and salt. The scheduler maps them to the namespace that the cache knows."""
    link = cache.link()
    match = d.match_op(1, A, salt=NAMESPACES.name("acme", "pepper"))
    await ask(link, 1, d.add_worker_op(3, 8, 4), match, *run_ops(1, A, 3)[1:])
    async with naming_scheduler() as scheduler:
        monkeypatch.setenv("PACELINE_SCHEDULER", scheduler)
        pin = ["pin", "x", "--tokens", IDS]
        for others in ([], ["--tenant", "acme"], ["--salt", "pepper"], ["--tenant", "other", "--salt", "pepper"]):
            assert await paceline_cache(cache, *pin, *others) == 1
        assert await paceline_cache(cache, *pin, "--tenant", "acme", "--salt", "pepper") == 0
        assert await paceline_cache(cache, "unpin", "x") == 0
        for argv in (["--tenant", "acme"], ["--salt", "pepper"], ["--tenant", "acme", "--salt", "pepper"]):
            assert await paceline_cache(cache, "reset", *argv) == 0
    out = capsys.readouterr().out
    assert "pinned: 16 tokens on worker 3\n" in out
    assert [line for line in out.splitlines() if line.startswith("forgotten")] == [
        f"forgotten: {count} blocks of worker 3" for count in (0, 0, 4)
    ]
    monkeypatch.setenv("PACELINE_SCHEDULER", f"127.0.0.1:{free_port()}")
    assert await paceline_cache(cache, "reset", "--tenant", "acme") == 1
    assert "no scheduler answers at 127.0.0.1:" in capsys.readouterr().err
    link.cancel()


async def test_events_as_json() -> None:
    async with running(event_tokens=True) as cache:
        link = cache.link()
        await ask(link, 1, d.add_worker_op(3, 8, 4), *run_ops(1, A, 3))
        await _check_events_as_json(cache)
        link.cancel()


async def _check_events_as_json(cache: Running) -> None:
    call = watch(cache)
    await kinds(call, 1)
    event = await event_of(call)
    stored = cli.event_fields(event)
    assert stored["event"] == "stored"
    assert (stored["worker"], stored["tier"], stored["block_ids"]) == (3, "device", [1, 2, 3, 4])
    assert (stored["token_ids"], stored["start_block"], stored["block_size"], stored["lora"]) == (A, 0, 4, "")
    event.stored.token_ids = b""
    assert cli.event_fields(event) == {name: value for name, value in stored.items() if name != "token_ids"}
    assert all(len(prefix) == 16 for prefix in [*stored["prefix_ids"], stored["parent_prefix_id"]])
    assert json.loads(json.dumps(stored)) == stored
    done = cli.event_fields(await event_of(call))
    assert done == {"number": stored["number"], "event": "snapshot", "complete": True}
    cleared = pb.WatchEventsResponse(sequence_number=9, cleared=pb.WorkerCleared(worker=2))
    assert cli.event_fields(cleared) == {"number": 9, "event": "cleared", "worker": 2}
    call.cancel()
