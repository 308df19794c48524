"""Calls an endpoint of the HTTP API as a function, with a request that came from no network."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, NamedTuple

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message

from services.gateway.access.caller import Caller
from services.gateway.errors import ApiError
from services.gateway.http.connection import CONNECTION
from services.gateway.openai.middleware import CALLER
from services.runtime.logs import get_logger

_log = get_logger(__name__)

CallEndpoint = Callable[[Request], Awaitable[Response]]


class LineAnswer(NamedTuple):
    """`body` is JSON. `retry_after_s`: what a refusal says."""

    status: int
    body: bytes
    retry_after_s: float | None = None

    @property
    def is_refused(self) -> bool:
        """The server may answer later. After any other error the request would fail again."""
        return self.status in (429, 503)


class _NoConnection:
    """Stands for the connection of a call that has none. Cancelling the call ends it."""

    def has_gone(self) -> bool:
        return False

    def drop(self) -> None: ...


def endpoints_of(routes: Iterable[Route]) -> dict[str, CallEndpoint]:
    """The endpoints of routes that take a POST, by their paths."""
    return {route.path: route.endpoint for route in routes if "POST" in (route.methods or ())}


async def call_endpoint(endpoint: CallEndpoint, path: str, body: bytes, caller: Caller, request_id: str) -> LineAnswer:
    """What the endpoint answers to the body, without a network. `caller`: as access control would find it."""
    given = {"type": "http.request", "body": body, "more_body": False}
    scope: dict[str, Any] = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())],
        "state": {"request_id": request_id, CALLER: caller},
        CONNECTION: _NoConnection(),
    }
    messages = iter([given])

    async def receive() -> Message:
        if (message := next(messages, None)) is not None:
            return message
        await asyncio.Event().wait()  # the client does not go away
        raise AssertionError("the event is never set")

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    try:
        response = await endpoint(Request(scope, receive, send))
        await response(scope, receive, send)
    except ApiError as error:
        return error_answer(error)
    except Exception as error:
        _log.error("a line of a batch failed", request=request_id, exc_info=error)
        return error_answer(ApiError(500, "internal error; the log has the details", code="internal_error"))
    body = b"".join(message.get("body", b"") for message in sent)
    return LineAnswer(sent[0]["status"], body, _retry_after_s(dict(sent[0]["headers"])))


def error_answer(error: ApiError) -> LineAnswer:
    """The answer of a request that fails."""
    error.__traceback__ = None
    return LineAnswer(error.status, orjson.dumps(error.body()), error.retry_after_s)


def _retry_after_s(headers: Mapping[bytes, bytes]) -> float | None:
    milliseconds = headers.get(b"retry-after-ms", b"")
    return int(milliseconds) / 1000 if milliseconds.isdigit() else None
