"""ASGI responses that run generations, streamed or whole, and end at once when the client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from paceline.v1 import common_pb2
from services.gateway.engine.generation import EndedEarlier, Generation
from services.gateway.engine.logprobs import LogprobFormat, ScoredToken, echoed_logprobs, prompt_logprobs
from services.gateway.engine.request_store import Reading
from services.gateway.engine.timings import SERVER_TIMING, first_token_timing, server_timing, timings
from services.gateway.errors import ApiError
from services.gateway.http.events import STREAM_HEADERS, events_message
from services.gateway.openai.event_ids import ChoicePosition, EventId, StreamProgress, cannot_resume
from services.gateway.openai.format import DONE, AnswerChoice, Envelope, StreamFormat, error_event, usage
from services.gateway.openai.message import writers
from services.runtime.logs import get_logger

_log = get_logger(__name__)

# The scope key of the server's own `send`, set by the outermost middleware. A chunk sent with it skips other layers.
RAW_SEND = "paceline.send"
# Writes the answer to an error. Gets the error and the request's id.
WriteError = Callable[[ApiError, str], Response]
# The key in the scope's state for the WriteError of a path. The path's errors do not have OpenAI's shape.
WRITE_ERROR = "write_error"
T = TypeVar("T")
# Writes an event. Gets a choice's index, text, log probabilities and token ids.
_Shape = Callable[[int, str, dict[str, Any] | None, Sequence[int]], bytes]
_RUNNING = common_pb2.FINISH_REASON_UNSPECIFIED


class JsonResponse(Response):
    """A response with a body that is already JSON."""

    media_type = "application/json"


def error_response(error: ApiError, scope: Scope) -> Response:
    """An error in the shape of the API that has the request's path: OpenAI's, or that of WRITE_ERROR."""
    state = scope["state"]
    write: WriteError | None = state.get(WRITE_ERROR)
    if write is not None:
        return write(error, state["request_id"])
    return JsonResponse(orjson.dumps(error.body()), error.status, error.headers)


class ClientGone(Exception):
    """The client has closed its connection, so no client reads the answer."""


class RunningAnswer(Response):
    """Runs generations and watches the connection. The request's body must be read before."""

    def __init__(self, reading: Reading, envelope: Envelope) -> None:
        self.background = None
        self._reading = reading
        self._generations = reading.generations
        self._envelope = envelope
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        try:
            # A separate task: otherwise each step, one per token, would run through the stack of middleware.
            await asyncio.create_task(self._run(scope, receive, send))
        except ClientGone as gone:
            _log.debug("client went away", id=self._envelope.id)
            gone.__traceback__ = None  # its frames and the generation hold each other, and with them the prompt
        except ApiError as error:
            await self._fail(error, scope, receive, send)
            error.__traceback__ = None
        finally:
            watcher.cancel()
            self._reading.close()

    def _logprob_format(self, generation: Generation) -> LogprobFormat | None:
        job = generation.job
        if not job.logprobs:
            return None
        offset = len(job.echo.text) if job.echo is not None else 0
        as_ids = self._envelope.shown.tokens_as_ids
        return LogprobFormat(self._envelope.kind == "chat", job.token_bytes, job.shown_bytes, offset, as_ids=as_ids)

    def _first_sample(self, index: int) -> int:
        """The index of the prompt's first sample, which has asked for the prompt's log probabilities."""
        while self._generations[index].job.sample:
            index -= 1
        return index

    def _echo(self, index: int) -> tuple[str | None, dict[str, Any] | None]:
        """The prompt's text if the choice begins with it, and the prompt's log probabilities if the client wants them.

        The first sample of the prompt must have a token.
        """
        job = self._generations[index].job
        if job.echo is None or not job.logprobs or self._envelope.kind == "chat":
            return job.echo.text if job.echo else None, None
        tokens = self._generations[self._first_sample(index)].prompt_scored
        # An echo of token ids shows special tokens.
        shape = LogprobFormat(False, job.token_bytes, job.token_bytes, as_ids=self._envelope.shown.tokens_as_ids)
        return job.echo.text, echoed_logprobs(shape, job.prompt_ids[0], tokens, job.echo)

    def _run(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        raise NotImplementedError

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._reading.interrupt(ClientGone())
        self._reading.close()

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        _log.debug("request failed", id=self._envelope.id, status=error.status, message=error.message)
        if not self._started:
            await error_response(error, scope)(scope, receive, send)
        else:
            await send(events_message(self._error_event(error), more_body=False))

    def _error_event(self, error: ApiError) -> bytes:
        """The event for a failure inside a stream."""
        return error_event(error.body())


class WholeAnswer(RunningAnswer):
    """One JSON body after all generations have ended, with the `keep` most likely samples of each prompt."""

    def __init__(self, reading: Reading, envelope: Envelope, *, keep: int = 1) -> None:
        super().__init__(reading, envelope)
        self._keep = keep

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        collected = await together([self._collect(generation) for generation in self._generations])
        choices = []
        for i in self._best():
            generation = self._generations[i]
            echo, logprobs = self._echo(i)
            prompt_ids = generation.job.prompt_ids
            if generation.job.beam is not None:
                for found in generation.hypotheses:
                    ended = found.finish_reason == common_pb2.FINISH_REASON_STOP
                    stop_reason = generation.stop_token_of(found.token_ids) if ended else None
                    choices.append(
                        AnswerChoice(
                            found.text,
                            found.finish_reason,
                            stop_reason=stop_reason,
                            token_ids=found.token_ids,
                            prompt_ids=prompt_ids,
                            echo=echo or "",
                            reply=generation.job.reply,
                        )
                    )
                continue
            text, tokens, token_ids = collected[i]
            if (shape := self._logprob_format(generation)) is not None:
                shaped = shape.shape(tokens)
                logprobs = shaped if logprobs is None else {name: logprobs[name] + shaped[name] for name in shaped}
            choices.append(
                AnswerChoice(
                    text,
                    generation.finish_reason,
                    logprobs,
                    self._prompt_logprobs(i),
                    generation.stop_reason,
                    token_ids,
                    prompt_ids,
                    echo or "",
                    generation.job.reply,
                )
            )
        took = timings(self._generations)
        headers = {SERVER_TIMING: header} if (header := server_timing(took)) else None
        body = self._envelope.whole(choices, usage(self._generations), took)
        await JsonResponse(body, headers=headers)(scope, receive, send)

    def _prompt_logprobs(self, index: int) -> list[dict[str, Any] | None] | None:
        generation = self._generations[self._first_sample(index)]
        if not generation.job.prompt_logprobs:
            return None
        return prompt_logprobs(generation.prompt_scored, generation.job.token_bytes)

    def _best(self) -> list[int]:
        """The samples to answer with, at most `keep` of each prompt. If a prompt has more samples than that, the ones
        with the highest log probability per token come, the highest first, as OpenAI defines `best_of`. Otherwise all
        come, in the order of their indices."""
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

    async def _collect(self, generation: Generation) -> tuple[str, list[ScoredToken], list[int]]:
        """The text of a generation, its scored tokens if the client wants log probabilities, and all its
        token ids."""
        parts, tokens, token_ids = [], [], []
        while generation.finish_reason == _RUNNING:
            parts.append(await generation.next())
            tokens += generation.scored
            token_ids += generation.token_ids
        return "".join(parts), tokens, token_ids


def _ignore(_: str) -> None:
    pass


async def _not_yet(message: Message) -> None:
    raise RuntimeError("the answer has not begun")


class StreamAnswer(RunningAnswer):
    """Server-sent events. The status line waits for the first token, so that a refused request gets its own status.

    `after`: the last event that the client has. The output up to this event is generated again but not sent. If it
    differs from what the client has, the answer is a 400. `event_ids`: whether events have an `id:` line. `interval`:
    an event between a choice's first and last one has at least this many tokens.
    """

    def __init__(
        self,
        reading: Reading,
        envelope: Envelope,
        *,
        include_usage: bool = False,
        continuous_usage: bool = False,
        after: EventId | None = None,
        event_ids: bool = False,
        interval: int = 1,
    ) -> None:
        super().__init__(reading, envelope)
        generations = self._generations
        self._format = StreamFormat(
            envelope, generations, include_usage=include_usage, continuous_usage=continuous_usage
        )
        self._progress = StreamProgress(envelope.created, len(generations), wanted=event_ids or after is not None)
        self._scores = [self._logprob_format(generation) for generation in generations]
        self._writers = writers([generation.job.reply for generation in generations], envelope.id)
        self._interval = interval
        self._after = after
        self._positions = after.positions if after is not None else (ChoicePosition(),) * len(generations)
        # Choices of which no event was sent.
        self._fresh = [position.tokens is None for position in self._positions]
        # Set when the first token of a choice has arrived.
        self._has_begun = [asyncio.Event() for _ in generations]
        # Events must leave in the order of their ids.
        self._writing = asyncio.Lock()
        self._send: Send = _not_yet
        self._raw_send: Send = _not_yet

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        self._raw_send = scope.get(RAW_SEND, send)
        if self._after is not None:
            await self._catch_up(self._after)
        running = [i for i, position in enumerate(self._positions) if not position.ended]
        self._format.num_open = len(running)
        rest = b""
        if len(running) == 1:
            rest = self._with_id(running[0], await self._pump(running[0], alone=True), ended=True)
        else:
            await together([self._pump_all(i) for i in running])
        await self._emit(rest + self._end(), more_body=False)

    async def _catch_up(self, after: EventId) -> None:
        """Generate everything up to this event without sending it. Raises ApiError 400 if it differs from what the
        client has."""
        await together([self._skip(i, position) for i, position in enumerate(after.positions)])
        if self._progress.checksum != after.checksum:
            raise cannot_resume("the output before it is not what this request generates")

    async def _skip(self, index: int, position: ChoicePosition) -> None:
        generation, scores = self._generations[index], self._scores[index]
        if position.tokens is None:
            return
        if position.ended:
            while generation.finish_reason == _RUNNING:
                await generation.next()
                self._progress.read(index, generation.token_ids)
        else:
            try:
                writer = self._writers[index]
                tokens = await generation.skip(position.tokens, writer.skip if writer is not None else _ignore)
            except EndedEarlier:
                raise cannot_resume(f"choice {index} has ended within its first {position.tokens} tokens") from None
            self._progress.read(index, tokens)
            if scores is not None:
                scores.skip(tokens)
        self._progress.line(index, ended=position.ended)
        if position.tokens or position.ended:
            self._has_begun[index].set()

    async def _pump_all(self, index: int) -> None:
        last = await self._pump(index, alone=False)
        async with self._writing:
            await self._emit(self._with_id(index, last, ended=True))

    async def _pump(self, index: int, *, alone: bool) -> bytes:
        """Stream one choice, and return its last event unsent. `alone`: this is the only streamed choice."""
        generation, scores = self._generations[index], self._scores[index]
        progress, interval, (show, show_last) = self._progress, self._interval, self._shapes(index)
        with_ids = self._envelope.shown.token_ids
        waiting: list[ScoredToken] = []  # tokens with text that was not sent yet
        waiting_ids: list[int] = []  # the same, if the client wants to see ids
        kept, num_kept = "", 0  # text and token count of an event that has too few tokens so far

        def logprobs() -> dict[str, Any] | None:
            if scores is None:
                return None
            shaped = scores.shape(waiting)
            waiting.clear()
            return shaped

        text = await generation.next()
        while generation.finish_reason == _RUNNING:
            progress.read(index, generation.token_ids)
            waiting += generation.scored
            if with_ids:
                waiting_ids += generation.token_ids
            if interval > 1 and self._has_begun[index].is_set():
                kept, num_kept = kept + text, num_kept + len(generation.token_ids)
                if num_kept < interval:
                    text = await generation.next()
                    continue
                text, kept, num_kept = kept, "", 0
            if text or generation.token_ids:  # an event without text tells the client that generation goes on
                if not self._has_begun[index].is_set():
                    await self._begin(index)
                event = show(index, text, logprobs(), waiting_ids)
                if with_ids:
                    waiting_ids = []
                if alone and self._started:
                    # The most frequent case. It skips the middleware, which has seen the start of the answer.
                    await self._raw_send(events_message(progress.line(index) + event))
                else:
                    async with self._writing:
                        await self._emit(self._with_id(index, event))
            text = await generation.next()
        if not self._has_begun[index].is_set():
            await self._begin(index)
        progress.read(index, generation.token_ids)
        waiting += generation.scored
        return show_last(index, kept + text, logprobs(), [*waiting_ids, *generation.token_ids])

    def _shapes(self, index: int) -> tuple[_Shape, _Shape]:
        """The functions that write a choice's events, and its last one."""
        formatted, writer = self._format, self._writers[index]
        if writer is None:
            return formatted.text, formatted.last

        def show(index: int, text: str, logprobs: dict[str, Any] | None, token_ids: Sequence[int]) -> bytes:
            return formatted.delta(index, writer.delta(text), logprobs, token_ids)

        def show_last(index: int, text: str, logprobs: dict[str, Any] | None, token_ids: Sequence[int]) -> bytes:
            delta, name = writer.last_delta(text), writer.finish_name(self._generations[index].finish_reason)
            return formatted.delta(index, delta, logprobs, token_ids, name)

        return show, show_last

    async def _begin(self, index: int) -> None:
        """The first token of a choice has arrived. An echo waits for the prompt's first sample, which has the
        prompt's log probabilities."""
        self._has_begun[index].set()
        if self._fresh[index] and self._generations[index].job.echo is not None:
            await self._has_begun[self._first_sample(index)].wait()

    def _with_id(self, index: int, event: bytes, *, ended: bool = False) -> bytes:
        """An event of a choice with its id. Before the choice's first event come the role or the echo."""
        beginning = b""
        if self._fresh[index]:
            self._fresh[index] = False
            beginning = self._format.first(index, *self._echo(index))
            if beginning:
                beginning = self._progress.first_line(index) + beginning
        return beginning + self._progress.line(index, ended=ended) + event

    def _end(self) -> bytes:
        total = self._format.total()
        if total and (self._after is None or self._after.after != "u"):
            total = self._progress.end_line("u") + total
        else:
            total = b""
        return total + self._progress.end_line("d") + DONE

    async def _emit(self, body: bytes, *, more_body: bool = True) -> None:
        send = self._send
        if not self._started:
            self._started = True
            headers = list(STREAM_HEADERS)
            if header := first_token_timing(self._generations):
                headers.append((SERVER_TIMING.encode(), header.encode()))
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        elif more_body:
            send = self._raw_send
        await send(events_message(body, more_body=more_body))


async def together(parts: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all parts at once. If one part fails, cancel the others."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
