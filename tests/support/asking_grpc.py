"""The same over gRPC: the Python client goes on by itself, and what it brings is noted as if it were events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from services.client import AsyncPacelineClient, Piece
from tests.support.sse import Event

if TYPE_CHECKING:
    from tests.support.asking import Answer

# So that a frozen server is left after three seconds, as the HTTP clients leave it.
PING_TIMEOUT_S = 1.5
RETRY_FOR_S = 60.0
HEAD = {"id": "", "created": 0, "model": "", "object": "grpc"}


async def ask_grpc(targets: Sequence[str], answer: Answer) -> None:
    """Until the answer is whole. With one target alone nothing is tried again: raises PacelineError where it breaks."""
    question = answer.question
    retry_for_s = RETRY_FOR_S if len(targets) > 1 else 0.0
    options: dict[str, Any] = {name: value for name, value in question.body.items() if name != "stream"}
    client = AsyncPacelineClient(targets, retry_for_s=retry_for_s, ping_timeout_s=PING_TIMEOUT_S)
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


def _event(piece: Piece) -> Event:
    """Its tokens, with their log probabilities if there are any, stand where logprobs.content does."""
    scores: Sequence[Any] = piece.logprobs or [None] * len(piece.token_ids)
    tokens = [[token, score and score.logprob] for token, score in zip(piece.token_ids, scores, strict=True)]
    choice = {"index": 0, "text": piece.text, "finish_reason": piece.finish_reason, "logprobs": {"content": tokens}}
    return Event("", json.dumps(HEAD | {"choices": [choice]}))
