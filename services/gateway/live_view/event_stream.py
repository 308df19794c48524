"""A stream of server-sent events for one reader: a viewer of the live view, or a trace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Protocol

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from services.gateway.http.connection import CONNECTION, HttpConnection
from services.gateway.http.events import STREAM_HEADERS, escape_separators
from services.runtime.logs import get_logger

_log = get_logger(__name__)


class Slot(Protocol):
    """A slot for one reader. The number of slots is limited. Making the object takes the slot."""

    def items(self) -> AsyncGenerator[bytes]:
        """The JSON of the events."""

    def close(self) -> None:
        """Gives the slot back. May be called twice."""


class EventStream(StreamingResponse):
    """Sends the items of a slot and gives it back, whatever happens.

    `max_s`: the longest time that the reader may keep the slot. A reader that has not read everything by then loses
    its connection. None: only the connection's own limit.
    """

    def __init__(self, slot: Slot, *, max_s: float | None = None) -> None:
        super().__init__(_events(slot), headers={k.decode(): v.decode() for k, v in STREAM_HEADERS})
        self._slot = slot
        self._max_s = max_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        end = None
        if self._max_s is not None:
            end = asyncio.get_running_loop().call_later(self._max_s, _cut_off, scope[CONNECTION])
        try:
            await super().__call__(scope, receive, send)
        finally:
            if end is not None:
                end.cancel()
            self._slot.close()


def _cut_off(connection: HttpConnection) -> None:
    _log.info("a client has not read its stream in time", num_unsent=connection.num_unsent)
    connection.drop()  # this ends the pending send


async def _events(slot: Slot) -> AsyncIterator[bytes]:
    async with aclosing(slot.items()) as items:
        async for item in items:
            yield b"data: " + escape_separators(item) + b"\n\n"
