"""Asks a server for its model and for answers, and puts each kind of failure into one line."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from services.cli.api_key import API_KEY_ENV
from services.cli.arguments import plain
from services.cli.chat.endpoint import Endpoint
from services.cli.chat.history import Message

CONNECT_S = 5.0
# Between two events of a stream. A request may wait long in the queue of a loaded server.
SILENCE_S = 600.0
MODELS_S = 20.0
MAX_CAUSE = 300


class ChatFailed(Exception):
    """The server did not answer the question. The message is one line that says what to do."""


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

    def model(self) -> str:
        """The name of the first model that the server has. Raises ChatFailed."""
        with self._failures(), self._client(MODELS_S) as client:
            answer = client.get("/v1/models")
            answer.read()
            self._check(answer)
            try:
                return str(answer.json()["data"][0]["id"])
            except (ValueError, LookupError, TypeError) as error:
                raise ChatFailed(
                    f"{self.endpoint.url} lists no model: it may be no OpenAI server{self._hint}"
                ) from error

    def answer(self, model: str, messages: list[Message], ending: Ending) -> Generator[AnswerPart]:
        """The pieces of the answer as they arrive. Fills `ending`. Raises ChatFailed.

        Close the iterator to stop the answer: the server cancels a request when its client is gone."""
        body = {"model": model, "messages": messages, "stream": True, **self.options}
        body["stream_options"] = {"include_usage": True}
        with (
            self._failures(),
            self._client(SILENCE_S) as client,
            client.stream("POST", "/v1/chat/completions", json=body) as answer,
        ):
            if answer.is_error:
                answer.read()
            self._check(answer)
            for event in _events(answer):
                yield from _pieces(event, ending)
        if not ending.reason:
            raise ChatFailed("the server ended the answer in the middle; ask again")

    def _client(self, silence_s: float) -> httpx.Client:
        key = self.endpoint.key
        return httpx.Client(
            base_url=self.endpoint.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(silence_s, connect=CONNECT_S),
            verify=True if self.endpoint.tls is None else self.endpoint.tls,
            trust_env=not self.endpoint.is_local,
        )

    def _check(self, answer: httpx.Response) -> None:
        """Raises ChatFailed for an error status."""
        if answer.is_success:
            return
        message = _error_message(answer)
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            message += f"; set {API_KEY_ENV}, or give --api-key"
        raise ChatFailed(message)

    @property
    def _hint(self) -> str:
        named_by = self.endpoint.named_by
        if not named_by:
            return "; no `paceline up` runs here: start one with `paceline up`, or name a server with --url"
        if named_by.startswith("server "):
            return f"; {named_by} runs, but its gateway may be starting"
        return f"; {named_by} names it"

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Raises ChatFailed for every failure of the connection."""
        url = self.endpoint.url
        try:
            yield
        except httpx.ConnectError as error:
            if "CERTIFICATE" in str(error) or "SSL" in str(error):
                raise ChatFailed(f"{url}: no TLS connection, see --tls-dir: {_cause(error)}") from error
            raise ChatFailed(f"no server answers at {url} ({_cause(error)}){self._hint}") from error
        except httpx.TimeoutException as error:
            raise ChatFailed(f"{url} did not answer in time{self._hint}") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ChatFailed(f"{url}: the connection broke: {_cause(error)}") from error
        except UnicodeEncodeError as error:
            raise ChatFailed("the question is not UTF-8") from error


def _events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream. (httpx' own lines would also end at U+2028 and the like, which may be part of a text.)"""
    rest = b""
    for chunk in answer.iter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or data == b"[DONE]":
                continue
            try:
                event = json.loads(data)
            except ValueError as error:
                raise ChatFailed(f"the server sent an event that is no JSON: {_shortened(error)}") from error
            if isinstance(event, dict):
                yield event


def _pieces(event: dict[str, Any], ending: Ending) -> Iterator[AnswerPart]:
    if event.get("error"):
        raise ChatFailed(_message_of(event) or "the server stopped with an error")
    if usage := event.get("usage"):
        ending.tokens, ending.prompt_tokens = usage.get("completion_tokens"), usage.get("prompt_tokens")
        ending.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        piece = AnswerPart(delta.get("content") or "", delta.get("reasoning_content") or delta.get("reasoning") or "")
        if piece.text or piece.reasoning:
            yield piece
        ending.reason = choice.get("finish_reason") or ending.reason


def _error_message(answer: httpx.Response) -> str:
    try:
        message = _message_of(answer.json())
    except ValueError:
        message = ""
    return message or f"{answer.url} answered {answer.status_code}: it may be no OpenAI server"


def _message_of(body: Any) -> str:
    """The message of OpenAI's error object, in one line; empty if there is none."""
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return plain(" ".join(message.split())) if isinstance(message, str) else ""


def _cause(error: Exception) -> str:
    return _shortened(error) or type(error).__name__


def _shortened(error: Exception) -> str:
    return plain(" ".join(str(error).split()))[:MAX_CAUSE]
