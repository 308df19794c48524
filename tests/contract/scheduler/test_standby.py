"""A standby scheduler, and the requests of an election, against a real etcd."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from paceline.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from scheduler_svc.etcd import Etcd, EtcdError, LeaderRecord
from scheduler_svc.server import serve
from scheduler_svc.settings import SchedulerSettings
from services.runtime.rpc import open_channel
from services.runtime.service import Addresses
from services.runtime.settings import load_settings
from tests.support.etcd import EtcdProcess, needs_etcd
from tests.support.ports import free_port
from tests.support.proxy import Proxy
from tests.support.untyped_grpc import untyped
from tests.unit.runtime.test_rpc import NOT_SERVING, SERVING, health

TIMEOUT_S = 30.0
NO_CACHE = "127.0.0.1:1"  # a cache of a server that runs beside the tests must not learn of this election
INFERENCE, WORKER = "paceline.v1.InferenceService", "paceline.v1.WorkerService"
pytestmark = needs_etcd


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    process = EtcdProcess(tmp_path_factory.mktemp("etcd")).start()
    yield process
    process.stop()


@pytest.fixture
async def etcd(process: EtcdProcess, request: pytest.FixtureRequest) -> AsyncIterator[Etcd]:
    """A client of an election that only this test uses. The first of its endpoints is dead."""
    client = Etcd([f"http://127.0.0.1:{free_port()}", process.url], request.node.name, timeout_s=10.0)
    with pytest.raises(EtcdError, match="All connection attempts failed"):
        await client.read_leader()
    yield client
    await client.close()


async def test_one_scheduler_takes_the_lead_and_loses_it_with_its_lease(etcd: Etcd) -> None:
    free = await etcd.read_leader()
    assert (free.lease, free.address, free.epoch, free.epoch_revision) == (None, "", 0, 0)
    lease, ttl_s = await etcd.grant(60)
    assert ttl_s == 60
    assert await etcd.claim(free, lease, "a:1", 17)
    assert not await etcd.claim(free, lease, "b:1", 18)
    taken = await etcd.read_leader()
    assert (taken.lease, taken.address, taken.epoch) == (lease, "a:1", 17)
    assert taken.epoch_revision == taken.revision == free.revision + 1
    waiting = asyncio.create_task(etcd.wait_until_left(taken, TIMEOUT_S))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    assert await etcd.renew(lease) == 60
    await etcd.revoke(lease)
    await asyncio.wait_for(waiting, TIMEOUT_S / 2)
    left = await etcd.read_leader()
    assert (left.lease, left.epoch) == (None, 17)
    # A claim on an old record fails: another scheduler has led since, although there is no leader now.
    lease, _ = await etcd.grant(60)
    assert not await etcd.claim(free, lease, "b:1", 18)
    assert await etcd.claim(left, lease, "b:1", 18)


async def test_all_schedulers_use_the_first_offered_secret(etcd: Etcd) -> None:
    found = await asyncio.gather(*(etcd.shared_secret(b"\0 secret of %d" % i) for i in range(5)))
    assert len(set(found)) == 1
    assert found[0].startswith(b"\0 secret of ")
    assert await etcd.shared_secret(b"another") == found[0]


async def test_schedulers_of_one_election_name_cache_namespaces_alike(process: EtcdProcess) -> None:
    """Two schedulers lead one after the other. The second finds the KV that workers kept under the first one's
    names."""

    def settings(key: str) -> SchedulerSettings:
        return SchedulerSettings(port=free_port(), cache=NO_CACHE, metrics_port=0, etcd=process.url, etcd_key=key)

    asked = admin_pb2.GetCacheNamespaceRequest(tenant="acme", cache_salt="pepper")
    names = []
    for one in (settings("alike"), settings("alike"), settings("another-server")):
        async with running(one), open_channel(f"127.0.0.1:{one.port}") as channel:
            await until_health(channel, WORKER, SERVING)
            names.append((await admin_pb2_grpc.AdminServiceStub(channel).GetCacheNamespace(asked)).cache_salt)
    assert names[0] == names[1] != names[2]


async def test_a_lease_ends_by_itself(etcd: Etcd) -> None:
    lease, ttl_s = await etcd.grant(1)
    assert ttl_s == 2  # the least that etcd grants
    assert await etcd.claim(await etcd.read_leader(), lease, "a:1", 1)
    await etcd.wait_until_left(await etcd.read_leader(), TIMEOUT_S)
    assert (await etcd.read_leader()).lease is None
    assert await etcd.renew(lease) == 0
    with pytest.raises(EtcdError, match="lease not found"):
        await etcd.revoke(lease)


async def test_a_watch_from_a_compacted_revision_ends(etcd: Etcd, process: EtcdProcess) -> None:
    lease, _ = await etcd.grant(60)
    seen = await etcd.read_leader()
    assert await etcd.claim(seen, lease, "a:1", 1)
    await etcd.revoke(lease)
    lease, _ = await etcd.grant(60)
    assert await etcd.claim(await etcd.read_leader(), lease, "b:1", 2)
    now = await etcd.read_leader()
    body = json.dumps({"revision": str(now.revision)}).encode()
    await asyncio.to_thread(urllib.request.urlopen, f"{process.url}/v3/kv/compaction", body)
    async with asyncio.timeout(TIMEOUT_S / 2):
        await etcd.wait_until_left(seen, TIMEOUT_S)


async def test_a_watch_ends_when_its_time_is_over(etcd: Etcd) -> None:
    seen = await etcd.read_leader()
    async with asyncio.timeout(TIMEOUT_S / 2):
        await etcd.wait_until_left(seen, 0.1)
    assert await etcd.read_leader() == seen, "no leader has come or gone"


async def test_endpoints_that_fail_at_the_same_time_are_passed_over_together(process: EtcdProcess) -> None:
    etcd = Etcd([f"http://127.0.0.1:{free_port()}", process.url], "x", timeout_s=3.0)
    failed = await asyncio.gather(etcd.read_leader(), etcd.read_leader(), return_exceptions=True)
    assert [type(error) for error in failed] == [EtcdError, EtcdError]
    assert (await etcd.read_leader()).lease is None
    await etcd.close()


async def test_a_connection_that_is_reset_at_once_is_an_etcd_error() -> None:
    """Also if the error of the HTTP client has no text."""
    proxy = Proxy(free_port())
    proxy.cut()
    etcd = Etcd([f"http://127.0.0.1:{proxy.port}"], "x", timeout_s=3.0)
    for _ in range(30):
        with pytest.raises(EtcdError):
            await etcd.read_leader()
    with pytest.raises(EtcdError):
        await etcd.wait_until_left(LeaderRecord(1, None, "", 0, 0), 3.0)
    await etcd.close()
    proxy.close()


@pytest.mark.parametrize("body", [b"", b"nonsense", b"[]", b'{"header": {}, "responses": [1, 2]}'])
async def test_an_answer_of_another_server_is_an_etcd_error(body: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    etcd = Etcd([f"http://127.0.0.1:{port}"], "x", timeout_s=3.0)
    for ask in (etcd.read_leader(), etcd.grant(3), etcd.renew(1), etcd.shared_secret(b"x")):
        with pytest.raises(EtcdError, match=r"not an answer of etcd|disconnected|Error"):
            await ask
    await etcd.close()
    server.close()
    await server.wait_closed()


async def test_a_scheduler_stands_by_until_there_is_no_leader(etcd: Etcd, process: EtcdProcess) -> None:
    lease, _ = await etcd.grant(60)
    assert await etcd.claim(await etcd.read_leader(), lease, "elsewhere:50051", 2**50)
    settings = SchedulerSettings(
        port=free_port(),
        cache=NO_CACHE,
        metrics_port=0,
        etcd=process.url,
        etcd_key="test_a_scheduler_stands_by_until_there_is_no_leader",
    )
    async with running(settings) as addresses, open_channel(f"127.0.0.1:{settings.port}") as channel:
        await until_health(channel, "", SERVING)
        assert [await health(channel, name) for name in (INFERENCE, WORKER)] == [NOT_SERVING, NOT_SERVING]
        await until_metric(addresses, "is_master", 0)
        assert await metric(addresses, "epoch") == 0
        while "elsewhere:50051" not in await refusal(channel):  # noqa: ASYNC110 - until it has asked etcd
            await asyncio.sleep(0.02)
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        registration = worker_pb2.WorkerServiceLinkRequest(registration=worker_pb2.WorkerRegistration())
        link = worker_pb2_grpc.WorkerServiceStub(channel).Link(iter_of(registration))
        for call in (admin.GetPolicy(admin_pb2.GetPolicyRequest()), link.read()):
            with pytest.raises(grpc.aio.AioRpcError, match="standby; the leader is elsewhere:50051") as error:
                await call
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE

        await etcd.revoke(lease)
        await until_health(channel, WORKER, SERVING)
        assert (await etcd.read_leader()).address == f"127.0.0.1:{settings.port}"
        await until_metric(addresses, "is_master", 1)
        # Later epochs are higher, independent of the time of day.
        assert await metric(addresses, "epoch") == 2**50 + 1
        session = untyped(inference_pb2_grpc.InferenceServiceStub(channel)).Session()
        await session.write(
            inference_pb2.SessionRequest(open=inference_pb2.SessionOpen(session_id="s", response_window=4))
        )
        opened = (await session.read()).opened
        assert opened.fence == opened.epoch == 2**50 + 1
    left = await etcd.read_leader()
    assert (left.lease, left.epoch) == (None, 2**50 + 1)


async def test_a_standby_can_be_stopped(etcd: Etcd, process: EtcdProcess) -> None:
    lease, _ = await etcd.grant(60)
    assert await etcd.claim(await etcd.read_leader(), lease, "elsewhere:50051", 5)
    settings = SchedulerSettings(
        port=0, metrics_port=0, cache=NO_CACHE, etcd=process.url, etcd_key="test_a_standby_can_be_stopped"
    )
    async with running(settings):
        pass
    assert (await etcd.read_leader()).lease == lease


@pytest.mark.parametrize(
    "etcd", ["localhost:2379", "http://", "http://etcd", "http://a:1,", "ftp://a:1", "http://a:1/x"]
)
def test_bad_endpoints_are_named(etcd: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_settings(SchedulerSettings, ["--etcd", etcd])
    assert "--etcd: must be http://host:port" in capsys.readouterr().err


@asynccontextmanager
async def running(settings: SchedulerSettings) -> AsyncIterator[Addresses]:
    ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    serving = asyncio.create_task(serve(settings, stop, on_ready=ready.set_result))
    try:
        await asyncio.wait([serving, ready], return_when=asyncio.FIRST_COMPLETED, timeout=TIMEOUT_S)
        if serving.done():
            serving.result()
        yield ready.result()
    finally:
        stop.set()
        await asyncio.wait_for(serving, TIMEOUT_S)


async def refusal(channel: grpc.aio.Channel) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest()).read()
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    return error.value.details() or ""


async def iter_of(*messages: Any) -> AsyncIterator[Any]:
    for message in messages:
        yield message


async def until_health(channel: grpc.aio.Channel, service: str, status: int) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while await health(channel, service) != status:  # noqa: ASYNC110 - asked for over gRPC
            await asyncio.sleep(0.02)


async def metric(addresses: Addresses, name: str) -> float:
    def read() -> str:
        with urllib.request.urlopen(f"http://{addresses.metrics}/metrics", timeout=TIMEOUT_S) as answer:
            return answer.read().decode()

    lines = (await asyncio.to_thread(read)).splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"paceline_scheduler_{name} "))


async def until_metric(addresses: Addresses, name: str, value: float) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while await metric(addresses, name) != value:  # noqa: ASYNC110 - asked for over HTTP
            await asyncio.sleep(0.02)
