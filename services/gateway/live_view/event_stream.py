"""A stream of server-sent events for one reader: a viewer of the live view, or a trace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Protocol

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from services.gateway.http.connection import CONNECTION, HttpConnection
from services.gateway.openai.answers import STREAM_HEADERS
from services.runtime.logs import get_logger

_log = get_logger(__name__)


class Slot(Protocol):
    """One of a limited number of readers. It is taken when the object is made."""

    def items(self) -> AsyncGenerator[bytes]:
        """The JSON of the events."""

    def close(self) -> None:
        """Gives the slot back. May be called twice."""


class EventStream(StreamingResponse):
    """Sends the items of a slot and gives it back, whatever happens.

    `max_s`: the longest time that the reader may keep the slot. `max_write_s`: the longest time that it may need to
    take one event. A reader beyond one of them loses its connection. Infinity: no limit but the connection's own.
    """

    def __init__(self, slot: Slot, *, max_s: float = float("inf"), max_write_s: float = float("inf")) -> None:
        super().__init__(_events(slot), headers={k.decode(): v.decode() for k, v in STREAM_HEADERS})
        self._slot = slot
        self._max_s, self._max_write_s = max_s, max_write_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self._max_s == self._max_write_s == float("inf"):
                await super().__call__(scope, receive, send)
            else:
                await self._call_bounded(scope, receive, send)
        finally:
            self._slot.close()

    async def _call_bounded(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop, connection = asyncio.get_running_loop(), scope[CONNECTION]
        end = loop.call_later(self._max_s, _cut_off, connection)

        async def bounded(message: Message) -> None:
            timer = loop.call_later(self._max_write_s, _cut_off, connection)
            try:
                await send(message)  # returns when the reader has taken most of what was sent before
            finally:
                timer.cancel()

        try:
            await super().__call__(scope, receive, bounded)
        finally:
            end.cancel()


def _cut_off(connection: HttpConnection) -> None:
    _log.info("a reader of a trace is too slow", num_unsent=connection.num_unsent)
    connection.drop()  # this ends the pending send


async def _events(slot: Slot) -> AsyncIterator[bytes]:
    async with aclosing(slot.items()) as items:
        async for item in items:
            yield b"data: " + item + b"\n\n"
