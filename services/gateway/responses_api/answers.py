"""HTTP answers (ASGI) that send a RunningResponse of /v1/responses to a client: as events, or as one object after its
end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.engine.timings import SERVER_TIMING, server_timing
from services.gateway.errors import ApiError
from services.gateway.http.events import STREAM_HEADERS, events_message
from services.gateway.openai.answers import RAW_SEND, JsonResponse, error_response
from services.gateway.responses_api.events import EventWriter, whole_response
from services.gateway.responses_api.long_work import with_pieces
from services.gateway.responses_api.running import RunningResponse

# At most this many pieces are written in one turn of the event loop. Old pieces need no wait, so without this limit
# other requests would get no turn.
_BATCH = 64


class _Reader(Response):
    """Reads a response until its end or until the client goes away. The request's body must be read before."""

    def __init__(self, response: RunningResponse) -> None:
        self.background = None
        self._response = response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._response.being_read():
            reading = asyncio.create_task(self._run(scope, receive, send))
            watching = asyncio.create_task(_until_gone(receive))
            try:
                await asyncio.wait([reading, watching], return_when=asyncio.FIRST_COMPLETED)
                if reading.done():
                    reading.result()
            except ApiError as error:
                error.__traceback__ = None
                await error_response(error, scope)(scope, receive, send)
            finally:
                reading.cancel()
                watching.cancel()
                await asyncio.gather(reading, watching, return_exceptions=True)

    def _run(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        raise NotImplementedError


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class WholeResponse(_Reader):
    """The response object, after the end of the response."""

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = self._response
        while not response.is_over:
            await response.change()
        if response.broken is not None:
            raise response.broken
        assert response.outcome is not None
        head, pieces, outcome = response.head, response.pieces, response.outcome
        body = await with_pieces(pieces, lambda: orjson.dumps(whole_response(head, pieces, outcome)))
        header = server_timing(outcome.timings) if outcome.timings is not None else ""
        await JsonResponse(body, headers={SERVER_TIMING: header} if header else None)(scope, receive, send)


class ResponseEvents(_Reader):
    """The events with numbers above `after`. `at_once`: begin before there is output. Otherwise the status line waits
    for output, so that a refused request gets its own status."""

    def __init__(self, response: RunningResponse, *, after: int = -1, at_once: bool = False) -> None:
        super().__init__(response)
        self._after = after
        self._at_once = at_once
        self._num_written = 0  # events, sent or left out

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        response, writer, num_read = self._response, EventWriter(self._response.head), 0
        raw_send: Send = scope.get(RAW_SEND, send)
        while not (self._at_once or response.pieces or response.is_over):
            await response.change()
        if response.broken is not None and not response.pieces:
            raise response.broken
        await send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})
        await self._emit(raw_send, writer.begin())
        while True:
            while num_read < len(response.pieces):
                batch = response.pieces[num_read : num_read + _BATCH]
                num_read += len(batch)
                await self._emit(raw_send, [event for piece in batch for event in writer.add(piece)])
                if len(batch) == _BATCH:
                    await asyncio.sleep(0)
            if response.is_over:
                break
            await response.change()
        if response.outcome is not None:
            last = writer.end(response.outcome, self._after)
        else:
            assert response.broken is not None
            last = writer.error(response.broken.code, response.broken.message, self._after)
        # The number of an error or a cancellation depends on `after`, so it does not tell whether the client has the
        # event. The event is sent in any case.
        is_cut = response.outcome is None or response.outcome.status == "cancelled"
        await self._emit(raw_send, last, with_last=is_cut)
        await send(events_message(b"", more_body=False))

    async def _emit(self, send: Send, events: list[bytes], *, with_last: bool = False) -> None:
        """Send the events that the client does not have. `with_last`: the last one in any case."""
        left_out = max(0, self._after + 1 - self._num_written)
        if with_last:
            left_out = min(left_out, len(events) - 1)
        self._num_written += len(events)
        if body := b"".join(events[left_out:]):
            await send(events_message(body))
