"""Finds the leader among several schedulers: the scheduler that reports SERVING for the wanted service.

A standby reports NOT_SERVING, and SERVING as soon as it is elected. All schedulers are watched at once, so a frozen,
dead or starting scheduler causes no delay."""

from __future__ import annotations

import asyncio

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.runtime.logs import get_logger
from services.runtime.rpc import Options, open_channel
from services.runtime.settings import split_addresses
from services.runtime.tls.files import TlsFiles

log = get_logger(__name__)

RETRY_S = 0.1
# How often the log says that there is no leader.
REMIND_S = 15.0


async def find_leader(addresses: str, service: str, transport: Options, tls: TlsFiles | None = None) -> str:
    """The first serving address of `host:port,host:port`; waits until one serves. A single address is not checked."""
    targets = split_addresses(addresses)
    if len(targets) == 1:
        return targets[0]
    over = asyncio.Event()
    watches = {asyncio.create_task(_until_serving(target, service, transport, tls, over)): target for target in targets}
    try:
        while True:
            done, _ = await asyncio.wait(watches, timeout=REMIND_S, return_when=asyncio.FIRST_COMPLETED)
            for watch in done:
                watch.result()
                return watches[watch]
            log.warning("none of the schedulers leads, waiting", schedulers=addresses)
    finally:
        over.set()  # gRPC may swallow a cancellation during a failing call
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)


async def _until_serving(
    target: str, service: str, transport: Options, tls: TlsFiles | None, over: asyncio.Event
) -> None:
    serving = health_pb2.HealthCheckResponse.SERVING
    while not over.is_set():
        try:
            # A new channel per attempt: a failed channel waits for gRPC's back-off of seconds.
            async with open_channel(target, transport, tls) as channel:
                request = health_pb2.HealthCheckRequest(service=service)
                async for answer in health_pb2_grpc.HealthStub(channel).Watch(request):
                    if answer.status == serving:
                        return
        except grpc.aio.AioRpcError as error:
            log.debug("scheduler does not answer", scheduler=target, code=error.code().name)
        await asyncio.sleep(RETRY_S)
