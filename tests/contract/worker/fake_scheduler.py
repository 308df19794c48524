"""The scheduler's side of a worker link, played by hand over loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from paceline.v1.worker_pb2 import (
    StepFailure,
    StepPlan,
    StepResult,
    WorkerRegistered,
    WorkerRegistration,
    WorkerReleased,
    WorkerServiceLinkRequest,
    WorkerServiceLinkResponse,
)
from paceline.v1.worker_pb2_grpc import WorkerServiceServicer, add_WorkerServiceServicer_to_server
from tests.support.ports import free_port


class WorkerLink:
    """One accepted link. What the worker sends waits in `inbox` until the test reads it."""

    def __init__(self, context: grpc.aio.ServicerContext, registration: WorkerRegistration, fence: int) -> None:
        self.registration = registration
        self.fence = fence  # the epoch sent to the worker
        self.context: Any = context
        self.inbox: asyncio.Queue[WorkerServiceLinkRequest] = asyncio.Queue()
        self.over = asyncio.Event()
        self.lost = asyncio.Event()

    async def send(self, **message: Any) -> None:
        await self.context.write(WorkerServiceLinkResponse(**message))

    async def plan(self, step: int, **fields: Any) -> None:
        await self.send(plan=StepPlan(step=step, **fields))

    async def result(self) -> StepResult:
        """The next result. Skips the messages before it."""
        while True:
            message = await self.next()
            if message.WhichOneof("message") == "result":
                return message.result

    async def failure(self) -> StepFailure:
        """The report of a failed step. Skips the messages before it."""
        while True:
            message = await self.next()
            if message.WhichOneof("message") == "failure":
                return message.failure

    async def next(self, timeout_s: float = 30.0) -> WorkerServiceLinkRequest:
        return await asyncio.wait_for(self.inbox.get(), timeout_s)

    async def release(self) -> None:
        await self.send(released=WorkerReleased())
        self.over.set()

    def cut(self) -> None:
        """End the call without a release."""
        self.over.set()


class FakeScheduler(WorkerServiceServicer):
    def __init__(self) -> None:
        self.links: asyncio.Queue[WorkerLink] = asyncio.Queue()
        self.reading = asyncio.Event()
        self.reading.set()
        # The kernel gives this port to no other process while this scheduler is stopped.
        self.port = free_port()
        self.fence = 0
        self._epoch = 0

    async def Link(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        first = await anext(request_iterator)
        assert first.WhichOneof("message") == "registration"
        link = WorkerLink(context, first.registration, self.fence)
        self._epoch += 1
        await link.send(registered=WorkerRegistered(worker=self._epoch, epoch=1, window=2, fence=link.fence))
        reader = asyncio.ensure_future(self._read(request_iterator, link))
        self.links.put_nowait(link)
        try:
            await link.over.wait()
        finally:
            link.lost.set()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[WorkerServiceLinkRequest], link: WorkerLink) -> None:
        async for message in requests:
            await self.reading.wait()
            link.inbox.put_nowait(message)
            if message.HasField("failure"):
                link.over.set()  # like the real scheduler, which sends nothing after that

    async def accept(self, timeout_s: float = 30.0) -> WorkerLink:
        return await asyncio.wait_for(self.links.get(), timeout_s)

    async def start(self) -> grpc.aio.Server:
        """Listen; each time on the same port."""
        server = grpc.aio.server()
        add_WorkerServiceServicer_to_server(self, server)
        server.add_insecure_port(f"127.0.0.1:{self.port}")
        await server.start()
        return server
