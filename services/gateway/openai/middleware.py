"""The outermost layer of the API, apart from CORS: request ids, and errors in the shape of the path's API."""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.v1.inference_pb2 import SchedulerLoad
from services.gateway.access.caller import ANYONE, Caller
from services.gateway.access.headers import LOAD_REPORT_FORMAT
from services.gateway.errors import CLIENT_CLOSED_REQUEST, ApiError, Gone
from services.gateway.http.connection import CONNECTION
from services.gateway.openai.answers import RAW_SEND, WRITE_ERROR, WriteError, error_response
from services.gateway.telemetry.load_report import LOAD_REPORT, load_report
from services.runtime.logs import bind_request_id
from services.runtime.tracing.context import bind_context, context_of

_NOT_REQUEST_ID = re.compile(r"[^A-Za-z0-9._:\-]")
_REQUEST_ID_CHARS = 128
_CODES = {404: "not_found", 405: "method_not_allowed"}


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, request.scope)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    refused = ApiError(error.status_code, error.detail, code=_CODES.get(error.status_code))
    response = error_response(refused, request.scope)
    response.headers.update(error.headers or {})
    return response


async def _client_gone(request: Request, error: Exception) -> Response:
    if isinstance(error, Gone):
        request.scope[CONNECTION].drop()
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _bug(request: Request, error: Exception) -> Response:
    bug = ApiError(500, "internal error; the log has the details", code="internal_error")
    return error_response(bug, request.scope)


ERROR_HANDLERS: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
    ApiError: _api_error,
    HTTPException: _http_error,
    ClientDisconnect: _client_gone,
    Gone: _client_gone,
    Exception: _bug,
}


# The key in the scope's state for the request's Caller.
CALLER = "caller"


def caller_of(request: Request) -> Caller:
    """The caller of a request that the middleware has let in."""
    caller: Caller = request.scope["state"].get(CALLER, ANYONE)
    return caller


def sanitised_request_id(value: str) -> str:
    """A client's request id without characters that could confuse a log or a header, cut to 128 characters. A new id if
    nothing is left."""
    return _NOT_REQUEST_ID.sub("", value[: 4 * _REQUEST_ID_CHARS])[:_REQUEST_ID_CHARS] or uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class OtherApi:
    """An API beside OpenAI's: the path `path` and all below it.

    `kinds`: the paths that generate, with their names in metrics. `write_error`: for another shape of errors than
    OpenAI's. `id_header`: a header that has the request's id besides X-Request-ID.
    """

    path: str
    routes: Sequence[Route]
    kinds: Mapping[str, str]
    write_error: WriteError | None = None
    id_header: bytes = b""

    def has(self, path: str) -> bool:
        """Whether the path belongs to this API."""
        return path.startswith(self.path) and path[len(self.path) :][:1] in ("", "/")


class RequestMiddleware:
    """Gives each request an id, adds the id to its log lines, and returns it as X-Request-ID.

    `admit`: the caller of a request, by its head; raises ApiError 401 and 403. `refusal`: the error for a request that
    may not enter (429, or 403 for a wrong host or a foreign origin). Both errors are sent before the body is read and
    before routing. Routing would take most of the time. `root_path`: a prefix that paths may have. `apis`: those with
    routes in other packages. `load`: the scheduler's, for a caller that asks for a report; None while it is unknown, or
    if the caller may not know it.
    """

    def __init__(
        self,
        app: ASGIApp,
        refusal: Callable[[Scope], ApiError | None] = lambda scope: None,
        admit: Callable[[Scope], Caller] = lambda scope: ANYONE,
        root_path: str = "",
        apis: Sequence[OtherApi] = (),
        load: Callable[[Caller], SchedulerLoad | None] = lambda caller: None,
    ) -> None:
        self._app = app
        self._refusal, self._admit, self._load = refusal, admit, load
        self._root_path = root_path
        self._apis = apis

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = sanitised_request_id(given.decode("latin-1"))
        scope.setdefault("state", {})["request_id"] = request_id
        scope[RAW_SEND] = send
        if self._root_path:
            scope["root_path"] = self._root_path  # Starlette routes by the rest of the path, if the path begins with it
        bind_request_id(request_id)
        bind_context(context_of(scope["headers"]))
        headers = [(b"x-request-id", request_id.encode())]
        for api in self._apis:
            if api.has(scope["path"].removeprefix(self._root_path)):
                scope["state"][WRITE_ERROR] = api.write_error
                headers += [(api.id_header, request_id.encode())] if api.id_header else []

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *headers, *self._load_report(scope)]
            await send(message)

        error: ApiError | None
        try:
            scope["state"][CALLER] = self._admit(scope)
            error = self._refusal(scope)
        except ApiError as refused:
            error = refused
        await (self._app if error is None else error_response(error, scope))(scope, receive, send_with_id)

    def _load_report(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """The header with the server's load, if the request asks for it and its caller may know it."""
        wanted = next((value for name, value in scope["headers"] if name == LOAD_REPORT_FORMAT.encode()), b"")
        caller: Caller | None = scope["state"].get(CALLER)
        if not wanted or caller is None or (load := self._load(caller)) is None:
            return []
        report = load_report(wanted, load)
        return [(LOAD_REPORT.encode(), report)] if report is not None else []
