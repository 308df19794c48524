"""Clients without a valid certificate are refused by a server with TLS: the table of attacks in docs/security.md."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from paceline.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    cache_pb2,
    cache_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from tests.support.certificates import (
    ask_https,
    authority_of,
    credentials,
    issue,
    make_certificates,
    raw_credentials,
    stranger,
    wait_for,
)
from tests.support.stack import Stack

PATIENCE_S = 15.0
HOUR = dt.timedelta(hours=1)
Shown = grpc.ChannelCredentials | None


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    certificates = make_certificates(tmp_path_factory.mktemp("certificates"))
    running = Stack(tmp_path_factory.mktemp("stack"), tls_dir=certificates)
    try:
        yield running.up()
    finally:
        running.down()


@pytest.fixture(scope="module")
def certificates(stack: Stack) -> Path:
    assert stack.tls_dir is not None
    return stack.tls_dir


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> dict[str, Shown]:
    folder, ca = tmp_path_factory.mktemp("strangers"), (certificates / "ca.pem").read_bytes()
    expired = issue(authority_of(certificates), folder / "expired", lifetime=HOUR, ago=2 * HOUR)
    return {
        "plain text": None,
        "no certificate": grpc.ssl_channel_credentials(ca),
        "another CA's certificate": credentials(stranger(folder / "other", certificates)),
        "an expired certificate": raw_credentials(expired),
    }


async def then_silence(*messages: Any) -> AsyncIterator[Any]:
    """The requests of a stream that stays open."""
    for message in messages:
        yield message
    await asyncio.sleep(PATIENCE_S)


async def register(channel: grpc.aio.Channel) -> None:
    registration = worker_pb2.WorkerRegistration(name="stranger")
    first = worker_pb2.WorkerServiceLinkRequest(registration=registration)
    await anext(aiter(worker_pb2_grpc.WorkerServiceStub(channel).Link(then_silence(first))))


async def open_session(channel: grpc.aio.Channel) -> None:
    await anext(aiter(inference_pb2_grpc.InferenceServiceStub(channel).Session(then_silence())))


async def generate(channel: grpc.aio.Channel) -> None:
    request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[50, 60]))
    await anext(aiter(inference_pb2_grpc.InferenceServiceStub(channel).Generate(request)))


async def set_policy(channel: grpc.aio.Channel) -> None:
    request = admin_pb2.SetPolicyRequest(choice=admin_pb2.PolicyChoice(order="fcfs"))
    await admin_pb2_grpc.AdminServiceStub(channel).SetPolicy(request)


async def take_cache_link(channel: grpc.aio.Channel) -> None:
    await anext(aiter(cache_pb2_grpc.CacheServiceStub(channel).Link(then_silence())))


async def watch_events(channel: grpc.aio.Channel) -> None:
    await anext(aiter(cache_pb2_grpc.CacheServiceStub(channel).WatchEvents(cache_pb2.WatchEventsRequest())))


async def reset_cache(channel: grpc.aio.Channel) -> None:
    await cache_pb2_grpc.CacheAdminServiceStub(channel).ResetCache(cache_pb2.ResetCacheRequest())


ATTACKS = {
    "register as a worker": ("scheduler_port", register),
    "open a session": ("scheduler_port", open_session),
    "generate at the scheduler": ("scheduler_port", generate),
    "set the policy": ("scheduler_port", set_policy),
    "take the link of the cache": ("cache_port", take_cache_link),
    "watch the tokens of all clients": ("cache_port", watch_events),
    "reset the cache": ("cache_port", reset_cache),
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize(
    "shown", ["plain text", "no certificate", "another CA's certificate", "an expired certificate"]
)
async def test_a_stranger_cannot(stack: Stack, strangers: dict[str, Shown], attack: str, shown: str) -> None:
    port, attempt = ATTACKS[attack]
    target, with_what = f"127.0.0.1:{getattr(stack, port)}", strangers[shown]
    channel = grpc.aio.insecure_channel(target) if with_what is None else grpc.aio.secure_channel(target, with_what)
    async with channel, asyncio.timeout(PATIENCE_S):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await attempt(channel)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert stack.metric("paceline_scheduler_num_workers") == 1


async def test_the_same_calls_with_a_certificate_get_past_the_handshake(stack: Stack, certificates: Path) -> None:
    async with grpc.aio.secure_channel(stack.scheduler, credentials(certificates)) as channel:
        await generate(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await register(channel)
    assert "block_size" in str(refused.value.details())  # the scheduler has read the registration


@pytest.mark.parametrize("kind", ["of another CA", "without TLS"])
def test_a_worker_of_a_stranger_gets_no_request(stack: Stack, certificates: Path, tmp_path: Path, kind: str) -> None:
    shown = ["--tls-dir", str(stranger(tmp_path / "stranger", certificates))] if kind == "of another CA" else []
    flags = ["--scheduler", stack.scheduler, "--threads", "1", "--metrics-port", "0"]
    log = tmp_path / "worker.log"
    with log.open("wb") as out:
        words = [sys.executable, "-m", "services.cli", "serve", "worker", *flags, *shown]
        process = subprocess.Popen(words, stdout=out, stderr=out)
    try:
        wait_for(lambda: "no link to the scheduler" in log.read_text(), log)
        for _ in range(4):
            assert ask_https(stack.url, certificates / "ca.pem")
        assert stack.metric("paceline_scheduler_num_workers") == 1
    finally:
        process.kill()
        process.wait()


def test_a_client_without_tls_gets_400_on_the_https_port(stack: Stack) -> None:
    with socket.create_connection(("127.0.0.1", stack.http_port)) as client:
        client.settimeout(PATIENCE_S)
        client.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert error.pop("message") == "this port speaks HTTPS only"
    assert error == {"type": "BadRequestError", "param": None, "code": 400, "reason": "needs_tls"}


async def test_a_client_without_tls_gets_no_answer_on_the_grpc_port(stack: Stack) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{stack.grpc_port}") as channel, asyncio.timeout(PATIENCE_S):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await generate(channel)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
