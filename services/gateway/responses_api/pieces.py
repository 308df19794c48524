"""What the events of a response are made of: one or more pieces for each token that shows something.

A response generated again gives the same tokens, and so the same pieces. Tokens may arrive together in one run and
apart in another, so they are read one by one. Then the events and their numbers agree between all gateways.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple

import orjson

from paceline.v1 import common_pb2
from services.gateway.engine.generation import Generation
from services.gateway.engine.logprobs import LogprobFormat, ScoredToken
from services.gateway.engine.timings import timings
from services.gateway.openai.format import usage
from services.gateway.openai.message import call_id
from services.gateway.parsing.delta import MessageDelta
from services.gateway.store.records import Status

# A call begins with a `name`, and `arguments` follow.
Kind = Literal["text", "reasoning", "name", "arguments"]
# A token with its log probabilities: as JSON, if it comes from the store.
Logprob = dict[str, Any] | orjson.Fragment
_RUNNING = common_pb2.FINISH_REASON_UNSPECIFIED
# Tokens that have arrived are read without a wait, so other requests get a turn after this many.
_TURN = 64


class OutputPiece(NamedTuple):
    """A part of the output. `logprobs`: of the tokens of a text, if the request asks for them. `call_id`: with a
    name."""

    kind: Kind
    text: str
    logprobs: Sequence[Logprob] = ()
    call_id: str = ""


class Outcome(NamedTuple):
    """How a response ended. `reason`: why it is incomplete. `error`: why it failed. `usage` and `timings` None:
    unknown."""

    status: Status
    usage: dict[str, Any] | None = None
    reason: str | None = None
    error: dict[str, Any] | None = None
    timings: dict[str, Any] | None = None


class PieceReader:
    """Reads a generation into `pieces` and `token_ids`."""

    def __init__(self, generation: Generation) -> None:
        job = generation.job
        self.pieces: list[OutputPiece] = []
        self.token_ids = array("i")
        self._generation = generation
        self._parser = job.reply.parser() if job.reply is not None else None
        self._format = LogprobFormat(True, job.token_bytes, job.shown_bytes) if job.logprobs else None
        self._scored: list[ScoredToken] = []  # of tokens that no text has shown yet
        self._num_tokens = 0

    async def read(self) -> bool:
        """Read one token. False: the output is over, and `outcome` says how. Raises what Generation.next raises."""
        generation = self._generation
        self._num_tokens += 1
        text = await generation.next(self._num_tokens)
        self.token_ids.extend(generation.token_ids)
        self._scored += generation.scored
        is_over = generation.finish_reason != _RUNNING
        if self._parser is None:
            delta = MessageDelta(text)
        else:
            delta = self._parser.push_last(text) if is_over else self._parser.push(text)
        self._add(delta)
        if self._num_tokens % _TURN == 0:
            await asyncio.sleep(0)
        return not is_over

    @property
    def outcome(self) -> Outcome:
        """How the output ended."""
        of_chat = usage([self._generation])
        cached = of_chat.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        used = {
            "input_tokens": of_chat["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": of_chat["completion_tokens"],
            "output_tokens_details": of_chat.get("completion_tokens_details", {"reasoning_tokens": 0}),
            "total_tokens": of_chat["total_tokens"],
        }
        took = timings([self._generation])
        if self._generation.finish_reason == common_pb2.FINISH_REASON_LENGTH:
            return Outcome("incomplete", used, reason="max_output_tokens", timings=took)
        return Outcome("completed", used, timings=took)

    def _add(self, delta: MessageDelta) -> None:
        if delta.continued:  # first: content behind the call is another item
            self.pieces.append(OutputPiece("arguments", delta.continued))
        if delta.reasoning:
            self.pieces.append(OutputPiece("reasoning", delta.reasoning))
        if delta.content:
            self.pieces.append(OutputPiece("text", delta.content, self._take_logprobs()))
        for call in delta.calls:
            if call.name is None:
                continue
            self.pieces.append(OutputPiece("name", call.name, call_id=self._call_id(call.index)))
            if call.arguments:
                self.pieces.append(OutputPiece("arguments", call.arguments))

    def _call_id(self, index: int) -> str:
        job = self._generation.job
        assert job.reply is not None
        return call_id(job.reply, job.metadata.answer_id, 0, index)

    def _take_logprobs(self) -> list[Logprob]:
        if self._format is None:
            return []
        shaped: list[Logprob] = self._format.shape(self._scored)["content"]
        self._scored.clear()
        return shaped


def merged(pieces: Iterable[OutputPiece]) -> list[OutputPiece]:
    """The same output in as few pieces as possible."""
    together: list[OutputPiece] = []
    for kind, run in groupby(pieces, key=lambda piece: piece.kind):
        parts = list(run)
        if kind == "name":
            together += parts
        else:
            logprobs = [entry for part in parts for entry in part.logprobs]
            together.append(OutputPiece(kind, "".join(part.text for part in parts), logprobs))
    return together
