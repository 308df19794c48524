"""Learns what the server is: its model, how it counts tokens, and which of OpenAI's fields it takes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import orjson

from services.cli.bench.client import LoadClient, ServerRefuses
from services.cli.bench.load.prompts import Calibration, Endpoint, PromptWriter
from services.cli.bench.load.sessions import LoadSession
from services.cli.bench.stats.records import RequestRecord

# Words of the two prompts that show how the server counts.
SHORT_WORDS, LONG_WORDS = 16, 144


@dataclass(slots=True)
class BenchTarget:
    """A server, and how to write a request for it."""

    client: LoadClient
    model: str
    endpoint: Endpoint
    extra_body: dict[str, Any]
    ignore_eos: bool
    vocabulary: int
    seed: int
    calibration: Calibration = field(default_factory=Calibration)
    has_usage: bool = True
    limit_field: str = "max_tokens"
    notes: list[str] = field(default_factory=list)
    _writer: PromptWriter = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._writer = self._new_writer()

    def body(self, session: LoadSession, turn: int, replies: list[str]) -> bytes:
        """The JSON of a streamed request."""
        fields = self._fields(session.turns[turn].output_tokens)
        stream: dict[str, Any] = {"stream": True}
        if self.has_usage:
            stream["stream_options"] = {"include_usage": True}
        return orjson.dumps(fields | stream | self._writer.body(session, turn, replies) | self.extra_body)

    async def probe(self) -> None:
        """Find out the model, how the server counts tokens, and which fields it takes. These requests are not measured.

        Raises ServerRefuses."""
        if not self.model:
            self.model = await self._only_model()
        short = await self._count(SHORT_WORDS)
        long = await self._count(LONG_WORDS)
        if short is None or long is None:
            words = f"{self.calibration.tokens_per_word:g} tokens per word"
            self.notes.append(f"The server does not count prompt tokens: prompt lengths assume {words}.")
        elif not self.vocabulary:
            try:
                self.calibration = Calibration.of((SHORT_WORDS, short), (LONG_WORDS, long))
            except ValueError as error:
                self.notes.append(f"Prompt lengths are guesses, because the server's counts make no sense: {error}.")
        self._writer = self._new_writer()
        await self._check_stream()

    def _new_writer(self) -> PromptWriter:
        return PromptWriter(self.seed, self.endpoint, self.calibration, self.vocabulary)

    def _fields(self, output_tokens: int) -> dict[str, Any]:
        fields: dict[str, Any] = {"model": self.model, self.limit_field: output_tokens}
        if self.ignore_eos:
            fields |= {"ignore_eos": True, "min_tokens": output_tokens}
        return fields

    def _sample(self, words: int) -> dict[str, Any]:
        text = self._writer.words(f"probe{words}", words)
        if self.endpoint == "chat":
            return {"messages": [{"role": "user", "content": text}]}
        if self.vocabulary:
            return {"prompt": [self.vocabulary - 1] * words}
        return {"prompt": text}

    async def _only_model(self) -> str:
        models = await self.client.models()
        if len(models) != 1:
            raise ServerRefuses(f"the server has {len(models)} models; choose with --model: {', '.join(models[:20])}")
        return models[0]

    async def _count(self, words: int) -> int | None:
        """The server's count of a prompt of so many words."""
        body = self._sample(words) | self.extra_body
        try:
            answer = await self.client.ask(self._fields(1) | body)
        except ServerRefuses as error:
            # OpenAI's reasoning models refuse the older field, and name the newer.
            if error.status != 400 or "max_completion_tokens" not in str(error) or self.limit_field != "max_tokens":
                raise
            self.limit_field = "max_completion_tokens"
            answer = await self.client.ask(self._fields(1) | body)
        usage = answer.get("usage")
        count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        return count if isinstance(count, int) and count > 0 else None

    async def _check_stream(self) -> None:
        record = await self._try_stream()
        if record.error.startswith(("HTTP 400", "HTTP 422")):
            self.has_usage = False
            record = await self._try_stream()
            self.notes.append("The server refuses `stream_options`, so the stream has no usage.")
        if record.error:
            raise ServerRefuses(f"a streamed request failed: {record.error}")
        if not record.is_counted:
            self.notes.append(
                "The stream has no usage: output tokens are pieces of the stream, and prompt tokens are not counted."
            )

    async def _try_stream(self) -> RequestRecord:
        options = {"stream": True} | ({"stream_options": {"include_usage": True}} if self.has_usage else {})
        now = time.perf_counter()
        record = RequestRecord(now, now)
        await self.client.stream(
            orjson.dumps(self._fields(4) | options | self._sample(SHORT_WORDS) | self.extra_body), record
        )
        return record
