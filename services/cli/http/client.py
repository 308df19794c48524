"""Calls a server's HTTP API, and puts each kind of failure into one line."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from services.cli.api_key import API_KEY_ENV
from services.cli.arguments import plain
from services.cli.http.endpoint import Endpoint
from services.cli.http.event_lines import EventLines

CONNECT_S = 5.0
MAX_CAUSE = 300


class RequestFailed(Exception):
    """The server did not answer, or refused the request. The message is one line."""


class ServerAway(RequestFailed):
    """No server answers at the address, or the connection broke: it may be back soon."""


@dataclass(frozen=True, slots=True)
class HttpApi:
    """A server with an HTTP API."""

    endpoint: Endpoint

    def client(self, silence_s: float) -> httpx.Client:
        """`silence_s`: the longest time between two pieces of an answer."""
        key = self.endpoint.key
        return httpx.Client(
            base_url=self.endpoint.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(silence_s, connect=CONNECT_S),
            verify=True if self.endpoint.tls is None else self.endpoint.tls,
            trust_env=not self.endpoint.is_local,
        )

    def stream(self, path: str, silence_s: float) -> Generator[dict[str, Any]]:
        """The server-sent events of a GET. Raises RequestFailed. Close the iterator to end the stream."""
        with self.failures(), self.client(silence_s) as client, client.stream("GET", path) as answer:
            if answer.is_error:
                answer.read()
            self.check(answer)
            yield from events(answer)

    def check(self, answer: httpx.Response) -> None:
        """Raises RequestFailed for an error status."""
        if answer.is_success:
            return
        message = _error_message(answer)
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            message += f"; set {API_KEY_ENV}, or give --api-key"
        raise RequestFailed(message)

    @property
    def hint(self) -> str:
        named_by = self.endpoint.named_by
        if not named_by:
            return "; no `paceline up` runs here: start one with `paceline up`, or name a server with --url"
        if named_by.startswith("server "):
            return f"; {named_by} runs, but its gateway may be starting"
        return f"; the address is that of {named_by}"

    @contextlib.contextmanager
    def failures(self) -> Iterator[None]:
        """Raises RequestFailed for every failure of the connection."""
        url = self.endpoint.url
        try:
            yield
        except httpx.ConnectError as error:
            if "CERTIFICATE" in str(error) or "SSL" in str(error):
                raise RequestFailed(f"{url}: no TLS connection, see --tls-dir: {_cause(error)}") from error
            raise ServerAway(f"no server answers at {url} ({_cause(error)}){self.hint}") from error
        except httpx.TimeoutException as error:
            raise ServerAway(f"{url} did not answer in time{self.hint}") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerAway(f"{url}: the connection broke: {_cause(error)}") from error
        except UnicodeEncodeError as error:
            raise RequestFailed("the question is not UTF-8") from error


def events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream."""
    lines = EventLines()
    for chunk in answer.iter_bytes():
        for line in lines.add(chunk):
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or data == b"[DONE]":
                continue
            try:
                event = json.loads(data)
            except ValueError as error:
                raise RequestFailed(f"the server sent an event that is no JSON: {_shortened(error)}") from error
            if isinstance(event, dict):
                yield event


def _error_message(answer: httpx.Response) -> str:
    try:
        message = message_of(answer.json())
    except ValueError:
        message = ""
    return message or f"{answer.url} answered {answer.status_code}: it may be no OpenAI server"


def message_of(body: Any) -> str:
    """The message of OpenAI's error object, in one line; empty if there is none."""
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return plain(" ".join(message.split())) if isinstance(message, str) else ""


def _cause(error: Exception) -> str:
    return _shortened(error) or type(error).__name__


def _shortened(error: Exception) -> str:
    return plain(" ".join(str(error).split()))[:MAX_CAUSE]
