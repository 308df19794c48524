"""ASGI responses in Anthropic's shape: a whole message, or a stream of events."""

from __future__ import annotations

import asyncio

import orjson
from starlette.types import Receive, Scope, Send

from paceline.v1 import common_pb2
from services.gateway.anthropic.errors import error_body
from services.gateway.anthropic.events import PING, BlockEvents, ContentReader, event, message, stop, usage
from services.gateway.engine.request_store import Reading
from services.gateway.engine.timings import SERVER_TIMING, first_token_timing, server_timing, timings
from services.gateway.errors import ApiError
from services.gateway.http.events import STREAM_HEADERS, events_message
from services.gateway.openai.answers import RAW_SEND, JsonResponse, RunningAnswer
from services.gateway.openai.format import Envelope

_RUNNING = common_pb2.FINISH_REASON_UNSPECIFIED
_NOT_ENDED: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}
# Checked this often: a stream without events since the last check gets a ping. Otherwise a proxy may close it.
PING_S = 15.0


class _MessageAnswer(RunningAnswer):
    """`max_tokens`: the limit that the request sets. The generation's limit is lower if the context ends before."""

    def __init__(self, reading: Reading, envelope: Envelope, *, max_tokens: int, request_id: str) -> None:
        super().__init__(reading, envelope)
        self._generation = self._generations[0]
        self._reader = ContentReader(self._generation.job.reply, envelope.id)
        self._max_tokens = max_tokens
        self._request_id = request_id

    def _stop(self) -> dict[str, str | None]:
        return stop(self._generation, self._max_tokens, self._reader.num_calls)

    def _error_event(self, error: ApiError) -> bytes:
        return b"event: error\ndata: %b\n\n" % orjson.dumps(error_body(error, self._request_id))


class WholeMessage(_MessageAnswer):
    """One JSON body after the generation has ended."""

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation, parts = self._generation, []
        while generation.finish_reason == _RUNNING:
            parts.append(await generation.next())
        content = self._reader.whole("".join(parts))
        used = usage(generation, generation.num_tokens)
        took = timings(self._generations)
        body = message(self._envelope, content, self._stop(), used) | {"timings": took}
        headers = {SERVER_TIMING: header} if (header := server_timing(took)) else None
        await JsonResponse(orjson.dumps(body), headers=headers)(scope, receive, send)


class MessageStream(_MessageAnswer):
    """Events of a message. The status line waits for the first token, so that a refused request gets its own status."""

    def __init__(self, reading: Reading, envelope: Envelope, *, max_tokens: int, request_id: str) -> None:
        super().__init__(reading, envelope, max_tokens=max_tokens, request_id=request_id)
        self._writing = asyncio.Lock()
        self._was_idle = False

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation, events = self._generation, BlockEvents(self._reader)
        text = await generation.next()
        headers = list(STREAM_HEADERS)
        if header := first_token_timing(self._generations):
            headers.append((SERVER_TIMING.encode(), header.encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._started = True
        raw_send = scope.get(RAW_SEND, send)  # skips the middleware, which has seen the start of the answer
        begun = message(self._envelope, [], _NOT_ENDED, usage(generation, 0))
        pings = asyncio.create_task(self._ping(raw_send))
        try:
            await self._emit(raw_send, event("message_start", message=begun) + PING)
            while generation.finish_reason == _RUNNING:
                if body := events.delta(text):
                    await self._emit(raw_send, body)
                text = await generation.next()
            rest = events.last(text)
            used = usage(generation, generation.num_tokens)
            took = timings(self._generations)
            rest += event("message_delta", delta=self._stop(), usage=used, timings=took) + event("message_stop")
            async with self._writing:
                await send(events_message(rest, more_body=False))
        finally:
            pings.cancel()

    async def _emit(self, raw_send: Send, body: bytes) -> None:
        self._was_idle = False
        async with self._writing:
            await raw_send(events_message(body))

    async def _ping(self, raw_send: Send) -> None:
        while True:
            self._was_idle = True
            await asyncio.sleep(PING_S)
            if self._was_idle and not self._writing.locked():
                await self._emit(raw_send, PING)
