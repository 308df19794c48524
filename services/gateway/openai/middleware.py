"""The outermost ASGI layer: request ids, and a direct call of the most frequent handlers."""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.errors import CLIENT_CLOSED_REQUEST, ApiError, Gone
from services.gateway.http.connection import CONNECTION
from services.gateway.openai.responses import RAW_SEND, error_response
from services.runtime.logs import bind_request_id

_NOT_REQUEST_ID = re.compile(r"[^A-Za-z0-9._:\-]")
_REQUEST_ID_CHARS = 128

Handler = Callable[[Request], Awaitable[Response]]
Direct = Mapping[tuple[str, str], Handler]


def sanitised_request_id(value: str) -> str:
    """A client's request id without characters that could confuse a log or a header. A new id if nothing is left."""
    return _NOT_REQUEST_ID.sub("", value[: 4 * _REQUEST_ID_CHARS])[:_REQUEST_ID_CHARS] or uuid.uuid4().hex


def internal_error() -> Response:
    """The answer to a request that has hit a bug."""
    return error_response(ApiError(500, "internal error; the log has the details", code="internal_error"))


class RequestMiddleware:
    """Gives each request an id, adds the id to its log lines, and returns it as X-Request-ID.

    `direct`: handlers by method and path. They are called without `app`, because the dozen layers of `app` take longer
    than the rest of a short answer.
    """

    def __init__(self, app: ASGIApp, direct: Direct) -> None:
        self._app = app
        self._direct = direct

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = sanitised_request_id(given.decode("latin-1"))
        scope.setdefault("state", {})["request_id"] = request_id
        scope[RAW_SEND] = send
        bind_request_id(request_id)
        header = (b"x-request-id", request_id.encode())
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        handler = self._direct.get((scope["method"], scope["path"]))
        if handler is None:
            await self._app(scope, receive, send_with_id)
            return
        try:
            response = await self._response(handler, Request(scope, receive))
            await response(scope, receive, send_with_id)
        except Gone:
            scope[CONNECTION].drop()
            while (await receive())["type"] != "http.disconnect":  # then the server expects no answer
                pass
        except Exception:
            if not started:
                await internal_error()(scope, receive, send_with_id)
            raise  # the server logs it

    async def _response(self, handler: Handler, request: Request) -> Response:
        try:
            return await handler(request)
        except ApiError as error:
            return error_response(error)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
