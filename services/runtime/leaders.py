"""Which of several schedulers is the master: the one whose health says SERVING for the service that is wanted.

A standby says NOT_SERVING, and SERVING as soon as it is elected. All of them are watched at once, so that one that is
frozen, dead or on its way up holds up nobody.
"""

from __future__ import annotations

import asyncio

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.runtime.logs import get_logger
from services.runtime.rpc import Options, open_channel
from services.runtime.settings import split_addresses

log = get_logger(__name__)

RETRY_S = 0.1
# That there is no master is mentioned this often.
REMIND_S = 15.0


async def find_leader(addresses: str, service: str, transport: Options) -> str:
    """The first of `host:port,host:port` that serves; waits until there is one. Who stands alone is not asked."""
    targets = split_addresses(addresses)
    if len(targets) == 1:
        return targets[0]
    over = asyncio.Event()
    watches = {asyncio.create_task(_until_serving(target, service, transport, over)): target for target in targets}
    try:
        while True:
            done, _ = await asyncio.wait(watches, timeout=REMIND_S, return_when=asyncio.FIRST_COMPLETED)
            for watch in done:
                watch.result()
                return watches[watch]
            log.warning("none of the schedulers is the master, waiting", schedulers=addresses)
    finally:
        over.set()  # a cancellation that meets a failing call may be lost in gRPC
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)


async def _until_serving(target: str, service: str, transport: Options, over: asyncio.Event) -> None:
    serving = health_pb2.HealthCheckResponse.SERVING
    while not over.is_set():
        try:
            # A channel of its own per attempt: a channel that failed sits out gRPC's back-off of seconds.
            async with open_channel(target, transport) as channel:
                request = health_pb2.HealthCheckRequest(service=service)
                async for answer in health_pb2_grpc.HealthStub(channel).Watch(request):
                    if answer.status == serving:
                        return
        except grpc.aio.AioRpcError as error:
            log.debug("scheduler does not answer", scheduler=target, code=error.code().name)
        await asyncio.sleep(RETRY_S)
