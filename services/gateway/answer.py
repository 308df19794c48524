"""ASGI responses that run generations: streamed or whole, and ended at once when the client goes away."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from paceline.v1 import common_pb2
from services.gateway.errors import ApiError
from services.gateway.generation import ClientGone, Generation
from services.gateway.logprobs import LogprobFormat, ScoredToken, prompt_logprobs
from services.gateway.openai_format import Choice, Envelope, StreamFormat, error_event, usage
from services.runtime.logs import get_logger

_log = get_logger(__name__)

# The server's own `send`, put into the scope by the outermost middleware: a chunk need not climb through all of them.
RAW_SEND = "paceline.send"
_RUNNING = common_pb2.FINISH_REASON_UNSPECIFIED


class JsonResponse(Response):
    """A body that is JSON already."""

    media_type = "application/json"


def error_response(error: ApiError) -> JsonResponse:
    """An error as OpenAI shapes it."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    return JsonResponse(orjson.dumps(error.body()), error.status, headers)


class _Answer(Response):
    """Runs generations while it watches the connection. The request's body must have been read."""

    def __init__(self, generations: Sequence[Generation], envelope: Envelope) -> None:
        self.background = None
        self._generations = generations
        self._envelope = envelope
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        try:
            # A task of its own: else each of its steps, one per token, would climb through the stack of middleware.
            await asyncio.create_task(self._run(scope, receive, send))
        except ClientGone:
            _log.debug("client went away", id=self._envelope.id)
        except ApiError as error:
            await self._fail(error, scope, receive, send)
        finally:
            watcher.cancel()
            for generation in self._generations:
                generation.close()

    def _logprob_format(self, generation: Generation) -> LogprobFormat | None:
        if not generation.job.logprobs:
            return None
        return LogprobFormat(self._envelope.kind == "chat", generation.job.token_bytes)

    def _run(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        raise NotImplementedError

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        for generation in self._generations:
            generation.abandon()

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        _log.info("request failed", id=self._envelope.id, status=error.status, message=error.message)
        if not self._started:
            await error_response(error)(scope, receive, send)
        else:
            await send({"type": "http.response.body", "body": error_event(error.body()), "more_body": False})


class WholeAnswer(_Answer):
    """One JSON body when everything is done: of each prompt's samples the `keep` most likely ones."""

    def __init__(self, generations: Sequence[Generation], envelope: Envelope, *, keep: int = 1) -> None:
        super().__init__(generations, envelope)
        self._keep = keep

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        collected = await asyncio.gather(*[self._collect(generation) for generation in self._generations])
        choices = []
        for i in self._best():
            generation = self._generations[i]
            if generation.job.beam is not None:
                choices += [Choice(found.text, found.finish_reason) for found in generation.hypotheses]
            else:
                text, logprobs = collected[i]
                choices.append(Choice(text, generation.finish_reason, logprobs, self._prompt_logprobs(i)))
        await JsonResponse(self._envelope.whole(choices, usage(self._generations)))(scope, receive, send)

    def _prompt_logprobs(self, index: int) -> list[dict[str, Any] | None] | None:
        """Of the prompt of this sample; the first of its samples has asked for them."""
        while self._generations[index].job.sample:
            index -= 1
        generation = self._generations[index]
        if not generation.job.prompt_logprobs:
            return None
        return prompt_logprobs(generation.prompt_scored, generation.job.token_bytes)

    def _best(self) -> list[int]:
        """Which samples to answer with, those of one prompt with the highest log probability per token first (as OpenAI
        defines `best_of`)."""
        best: list[int] = []
        start = 0
        for end in range(1, len(self._generations) + 1):
            if end < len(self._generations) and self._generations[end].job.sample:
                continue
            samples = list(range(start, end))
            if len(samples) > self._keep:
                samples.sort(key=lambda i: -self._generations[i].mean_logprob)
            best += samples[: self._keep]
            start = end
        return best

    async def _collect(self, generation: Generation) -> tuple[str, dict[str, Any] | None]:
        """The text, and the log probabilities if the client wants them."""
        parts, tokens = [], []
        while generation.finish_reason == _RUNNING:
            parts.append(await generation.next())
            tokens += generation.scored
        shape = self._logprob_format(generation)
        return "".join(parts), shape.shape(tokens) if shape else None


async def _not_yet(message: Message) -> None:
    raise RuntimeError("the answer has not begun")


class StreamAnswer(_Answer):
    """Server-sent events. The status line waits for the first token, so a request that is refused gets a real
    status."""

    def __init__(
        self,
        generations: Sequence[Generation],
        envelope: Envelope,
        *,
        include_usage: bool = False,
        continuous_usage: bool = False,
    ) -> None:
        super().__init__(generations, envelope)
        self._format = StreamFormat(
            envelope, generations, include_usage=include_usage, continuous_usage=continuous_usage
        )
        self._send: Send = _not_yet
        self._raw_send: Send = _not_yet

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        self._raw_send = scope.get(RAW_SEND, send)
        if len(self._generations) == 1:
            rest = await self._pump(0)
        else:
            await asyncio.gather(*[self._pump_all(i) for i in range(len(self._generations))])
            rest = b""
        await self._emit(rest + self._format.end(), more_body=False)

    async def _pump_all(self, index: int) -> None:
        await self._emit(await self._pump(index))

    async def _pump(self, index: int) -> bytes:
        """Stream one choice; returns its last chunk unsent."""
        generation, formatted = self._generations[index], self._format
        beginning: bytes | None = formatted.first(index)
        scores = self._logprob_format(generation)
        waiting: list[ScoredToken] = []  # whose text has not been shown

        def logprobs() -> dict[str, Any] | None:
            if scores is None:
                return None
            shaped = scores.shape(waiting)
            waiting.clear()
            return shaped

        text = await generation.next()
        while generation.finish_reason == _RUNNING:
            waiting += generation.scored
            if text and beginning is not None:
                await self._emit(beginning + formatted.text(index, text, logprobs()))
                beginning = None
            elif text:
                # Past the middleware, which has seen the start of the answer and need not see every token.
                chunk = formatted.text(index, text, logprobs())
                await self._raw_send({"type": "http.response.body", "body": chunk, "more_body": True})
            text = await generation.next()
        waiting += generation.scored
        return (beginning or b"") + formatted.last(index, text, logprobs())

    async def _emit(self, body: bytes, *, more_body: bool = True) -> None:
        if not self._started:
            self._started = True
            await self._send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [
                        (b"content-type", b"text/event-stream; charset=utf-8"),
                        (b"cache-control", b"no-cache"),
                        (b"x-accel-buffering", b"no"),
                    ],
                }
            )
        await self._send({"type": "http.response.body", "body": body, "more_body": more_body})
