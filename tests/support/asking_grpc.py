"""Asks a question over gRPC. The Python client resumes by itself, and its messages are recorded as events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import aclosing
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal

import services.client.client as client_module
from paceline.v1.inference_pb2 import GenerateRequest
from services.client import AsyncPacelineClient, PacelineError, Piece
from services.client.continuation import Continuation
from tests.support.sse import Event

if TYPE_CHECKING:
    from tests.support.asking import Answer, Gateway

# The client leaves a frozen server after 1.4 times this timeout.
PING_TIMEOUT_S = 1.5
RETRY_FOR_S = 60.0
HEAD = {"id": "", "created": 0, "model": "", "object": "grpc"}


# Parts of gRPC's messages about a connection that it gave up, and about a connection that was lost or never opened.
GAVE_UP = ("ping timeout", "keepalive", "timed out")
LOST = ("failed to connect", "Socket closed", "Connection reset", "Connection refused", "GOAWAY", "RST_STREAM")


class _Ear:
    """Notes the calls that the client makes, and how they break."""

    def __init__(self, gateways: Sequence[Gateway], answer: Answer) -> None:
        self._gateways, self._answer = gateways, answer
        self._asked_s = 0.0

    def called(self) -> None:
        self._asked_s = asyncio.get_running_loop().time()

    def broke(self, error: PacelineError) -> None:
        gateway = self._gateways[len(self._answer.breaks) % len(self._gateways)]  # the client takes them by turns
        why = f"{error.code.name}: {error}"
        self._answer.broke(_kind(why), why, gateway, self._asked_s)


# None: the call belongs to another test in this process.
_ear: ContextVar[_Ear | None] = ContextVar("_ear", default=None)


class _HeardContinuation(Continuation):
    """Also records the errors from which the client recovers by itself."""

    def call(self, now_s: float) -> tuple[GenerateRequest, float | None]:
        if ear := _ear.get():
            ear.called()
        return super().call(now_s)

    def pause_s(self, error: PacelineError, now_s: float) -> float:
        if ear := _ear.get():
            ear.broke(error)
        return super().pause_s(error, now_s)


client_module.Continuation = _HeardContinuation  # type: ignore[attr-defined]


async def ask_grpc(gateways: Sequence[Gateway], answer: Answer) -> None:
    """Asks until the answer is whole. With one gateway there is no retry: a broken stream raises PacelineError."""
    question = answer.question
    retry_for_s = RETRY_FOR_S if len(gateways) > 1 else 0.0
    options: dict[str, Any] = {name: value for name, value in question.body.items() if name != "stream"}
    _ear.set(_Ear(gateways, answer))
    client = AsyncPacelineClient(
        [gateway.target for gateway in gateways], retry_for_s=retry_for_s, ping_timeout_s=PING_TIMEOUT_S
    )
    async with client, aclosing(client.stream(**options)) as pieces:  # type: ignore[type-var]
        async for piece in pieces:
            answer.add(_event(piece))
            if question.cancel_after is not None and len(answer.events) >= question.cancel_after:
                answer.is_cancelled = True
                return
    assert piece.usage is not None
    usage = {"prompt_tokens": piece.usage.prompt_tokens, "completion_tokens": piece.usage.completion_tokens}
    answer.add(Event("", json.dumps(HEAD | {"choices": [], "usage": usage})))
    answer.add(Event("", "[DONE]"))
    answer.is_done = True


def _kind(why: str) -> Literal["gave up", "lost", "sent"]:
    if any(words in why for words in GAVE_UP):
        return "gave up"
    return "lost" if any(words in why for words in LOST) else "sent"


def _event(piece: Piece) -> Event:
    """Puts the tokens, with their log probabilities if there are any, into logprobs.content."""
    scores: Sequence[Any] = piece.logprobs or [None] * len(piece.token_ids)
    tokens = [[token, score and score.logprob] for token, score in zip(piece.token_ids, scores, strict=True)]
    choice = {"index": 0, "text": piece.text, "finish_reason": piece.finish_reason, "logprobs": {"content": tokens}}
    return Event("", json.dumps(HEAD | {"choices": [choice]}))
