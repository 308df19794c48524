"""Asks a server for its model and for answers, and puts each kind of failure into one line."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

from services.cli.chat.history import Message
from services.cli.http.client import HttpApi, RequestFailed, events, message_of
from services.cli.http.endpoint import Endpoint

# Between two events of a stream. A request may wait long in the queue of a loaded server.
SILENCE_S = 600.0
MODELS_S = 20.0


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A part of an answer."""

    text: str = ""
    reasoning: str = ""


@dataclass(slots=True)
class Ending:
    """What is known at the end of an answer. A number is None if the server does not report it."""

    reason: str = ""  # OpenAI's finish_reason; empty while the answer is not complete
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ChatServer:
    """An OpenAI server. `options`: fields of each request, such as temperature."""

    endpoint: Endpoint
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def _server(self) -> HttpApi:
        return HttpApi(self.endpoint)

    def model(self) -> str:
        """The name of the first model that the server has. Raises RequestFailed."""
        with self._server.failures(), self._server.client(MODELS_S) as client:
            answer = client.get("/v1/models")
            answer.read()
            self._server.check(answer)
            try:
                return str(answer.json()["data"][0]["id"])
            except (ValueError, LookupError, TypeError) as error:
                raise RequestFailed(
                    f"{self.endpoint.url} lists no model: it may be no OpenAI server{self._server.hint}"
                ) from error

    def answer(self, model: str, messages: list[Message], ending: Ending) -> Generator[AnswerPart]:
        """The pieces of the answer as they arrive. Fills `ending`. Raises RequestFailed.

        Close the iterator to stop the answer: the server cancels a request when its client is gone."""
        body = {"model": model, "messages": messages, "stream": True, **self.options}
        body["stream_options"] = {"include_usage": True}
        with (
            self._server.failures(),
            self._server.client(SILENCE_S) as client,
            client.stream("POST", "/v1/chat/completions", json=body) as answer,
        ):
            if answer.is_error:
                answer.read()
            self._server.check(answer)
            for event in events(answer):
                yield from _pieces(event, ending)
        if not ending.reason:
            raise RequestFailed("the server ended the answer in the middle; ask again")


def _pieces(event: dict[str, Any], ending: Ending) -> Iterator[AnswerPart]:
    if event.get("error"):
        raise RequestFailed(message_of(event) or "the server stopped with an error")
    if usage := event.get("usage"):
        ending.tokens, ending.prompt_tokens = usage.get("completion_tokens"), usage.get("prompt_tokens")
        ending.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        piece = AnswerPart(delta.get("content") or "", delta.get("reasoning_content") or delta.get("reasoning") or "")
        if piece.text or piece.reasoning:
            yield piece
        ending.reason = choice.get("finish_reason") or ending.reason
