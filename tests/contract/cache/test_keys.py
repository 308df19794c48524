"""Admin calls of a real cache server: with keys; and without keys, from this or another machine."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from cache_svc.server import serve
from cache_svc.settings import CacheSettings
from paceline.v1 import cache_pb2 as pb
from paceline.v1 import cache_pb2_grpc
from services.cli import cache as cli
from services.runtime.keys import admin_gate
from services.runtime.keys.entries import entry_text, hash_of, make_key
from services.runtime.rpc import open_channel
from tests.contract.cache.test_server import TIMEOUT_S
from tests.support.untyped_grpc import untyped

ADMIN, USER = "admin" * 8, "user" * 8
DENIED, UNKNOWN, SERVED = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.OK


@asynccontextmanager
async def cache(**settings: Any) -> AsyncIterator[int]:
    """The port of a running cache."""
    ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    task = asyncio.create_task(
        serve(CacheSettings(port=0, metrics_port=0, **settings), stop, on_ready=ready.set_result)
    )
    await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED, timeout=TIMEOUT_S)
    if task.done():
        task.result()
    try:
        yield int(ready.result().grpc.rpartition(":")[2])
    finally:
        stop.set()
        await task


async def admin_codes(address: str, secret: str = "") -> set[grpc.StatusCode]:
    """The status codes of a read, a change and a watch."""
    metadata = (("x-api-key", secret),) if secret else ()
    codes = set()
    async with open_channel(address) as channel:
        admin, stub = cache_pb2_grpc.CacheAdminServiceStub(channel), cache_pb2_grpc.CacheServiceStub(channel)
        watch = stub.WatchEvents(pb.WatchEventsRequest(), metadata=metadata, timeout=TIMEOUT_S)
        calls = (
            admin.GetCacheStats(pb.GetCacheStatsRequest(), metadata=metadata, timeout=TIMEOUT_S),
            admin.ResetCache(pb.ResetCacheRequest(), metadata=metadata, timeout=TIMEOUT_S),
            watch.read(),
        )
        for call in calls:
            try:
                await call
                codes.add(SERVED)
            except grpc.aio.AioRpcError as error:
                codes.add(error.code())
        watch.cancel()
    return codes


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text("\n".join(
        entry_text(make_key(name, sha256=hash_of(secret), admin=name == "admin"))
        for name, secret in (("admin", ADMIN), ("user", USER))
    ))  # fmt: skip
    return path


async def test_with_keys_admin_calls_need_an_admin_key(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with cache(keys_file=str(file)) as port:
        address = f"127.0.0.1:{port}"
        assert await admin_codes(address) == {UNKNOWN}
        assert await admin_codes(address, "wrong" * 8) == {UNKNOWN}
        assert await admin_codes(address, USER) == {DENIED}
        calls: list[str] = []
        monkeypatch.setattr(admin_gate._log, "info", lambda _, **said: calls.append(f"{said['method']} {said['key']}"))
        assert await admin_codes(address, ADMIN) == {SERVED}
        assert set(calls) == {"GetCacheStats admin", "ResetCache admin", "WatchEvents admin"}
        async with open_channel(address) as channel:
            call = untyped(cache_pb2_grpc.CacheServiceStub(channel)).Link(timeout=TIMEOUT_S)  # the scheduler has no key
            await call.initial_metadata()
            call.cancel()
        argv = ["stats", "--cache", address]
        assert await asyncio.to_thread(cli.main, argv) == 1
        assert "set PACELINE_API_KEY, or give --api-key" in capsys.readouterr().err
        assert await asyncio.to_thread(cli.main, [*argv, "--api-key", USER]) == 1
        assert "the key 'user' may not use admin calls" in capsys.readouterr().err
        assert await asyncio.to_thread(cli.main, [*argv, "--api-key", ADMIN]) == 0
        monkeypatch.setenv("PACELINE_API_KEY", ADMIN)
        assert await asyncio.to_thread(cli.main, argv) == 0


async def test_a_call_without_an_admin_key_is_refused_before_its_request_arrives(file: Path) -> None:
    """Otherwise anyone could make the server receive 16 MiB a call."""
    async with cache(keys_file=str(file)) as port, open_channel(f"127.0.0.1:{port}") as channel:
        for method in ("CacheAdminService/PinPrefix", "CacheService/WatchEvents"):
            for metadata, code in (((("x-api-key", USER),), DENIED), ((), UNKNOWN)):
                call = untyped(channel).stream_stream(f"/paceline.v1.{method}")(metadata=metadata)
                async with asyncio.timeout(TIMEOUT_S):
                    assert await call.code() is code  # nothing was written
        call = untyped(channel).stream_stream("/paceline.v1.CacheAdminService/GetCacheStats")(
            metadata=(("x-api-key", ADMIN),)
        )
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "no request" in await call.details()


def own_address() -> str:
    """An address of this machine that is not loopback. A client that dials it has this address, too."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return ""
        host: str = probe.getsockname()[0]
        return "" if host.startswith("127.") else host


@pytest.mark.skipif(not own_address(), reason="this machine has no address but loopback")
async def test_without_keys_only_this_machine_may_make_admin_calls(file: Path) -> None:
    async with cache(host="0.0.0.0") as port:
        assert await admin_codes(f"{own_address()}:{port}") == {DENIED}
        assert await admin_codes(f"127.0.0.1:{port}") == {SERVED}
    async with cache(host="0.0.0.0", insecure=True) as port:
        assert await admin_codes(f"{own_address()}:{port}") == {SERVED}
    async with cache(host="0.0.0.0", keys_file=str(file)) as port:
        assert await admin_codes(f"{own_address()}:{port}", ADMIN) == {SERVED}
