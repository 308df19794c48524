"""Request ids, and errors in OpenAI's shape."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from paceline.v1.inference_pb2 import SchedulerLoad
from services.gateway.errors import Gone, invalid
from services.gateway.http.connection import CONNECTION
from services.gateway.openai.middleware import ERROR_HANDLERS, RequestMiddleware


class ClientSocket:
    dropped = False

    def drop(self) -> None:
        self.dropped = True


class Broken(Response):
    """A response that fails after its start."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise KeyError("x")


async def ask(outcome: Response | Exception, path: str = "/") -> tuple[list[Message], ClientSocket]:
    """The messages that the client gets when its handler returns or raises `outcome`."""
    sent: list[Message] = []
    peer = ClientSocket()

    async def handler(request: Request) -> Response:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    app = Starlette(routes=[Route("/", handler)], exception_handlers=ERROR_HANDLERS)
    headers = [(b"x-request-id", b"mine")]
    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": path, "headers": headers, CONNECTION: peer}
    try:
        await RequestMiddleware(app)(scope, receive, send)
    except KeyError:
        sent.append({"type": "raised"})
    return sent, peer


def statuses(sent: list[Message]) -> list[int]:
    return [message["status"] for message in sent if message["type"] == "http.response.start"]


@pytest.mark.parametrize(("path", "status"), [("/", 200), ("/other", 404)])
async def test_every_answer_has_the_requests_id(path: str, status: int) -> None:
    (start, _), _ = await ask(Response(b"x"), path)
    assert (b"x-request-id", b"mine") in start["headers"]
    assert start["status"] == status


async def test_errors_have_openais_shape() -> None:
    sent, _ = await ask(invalid("n", "n is wrong"))
    assert statuses(sent) == [400]
    assert orjson.loads(sent[1]["body"])["error"]["param"] == "n"


async def test_a_bug_is_a_500_and_reaches_the_log() -> None:
    sent, _ = await ask(KeyError("x"))
    assert statuses(sent) == [500]
    assert orjson.loads(sent[1]["body"])["error"]["reason"] == "internal_error"
    assert sent[-1]["type"] == "raised"


async def test_an_error_after_an_answer_has_begun_starts_no_second_answer() -> None:
    sent, _ = await ask(Broken())
    assert statuses(sent) == [200]
    assert sent[-1]["type"] == "raised"


async def test_a_client_that_has_gone_gets_no_answer() -> None:
    assert statuses((await ask(ClientDisconnect()))[0]) == [499]
    _, peer = await ask(Gone())
    assert peer.dropped, "the server closes the connection of a client that has gone"


@pytest.mark.parametrize("may_know", [False, True])
async def test_a_load_report_goes_to_callers_that_may_know_the_load(may_know: bool) -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    load = SchedulerLoad(num_waiting=3, num_blocks=10, num_used_blocks=4)
    app = RequestMiddleware(
        Starlette(routes=[Route("/", lambda _: Response(b"x"))]), load=lambda _: load if may_know else None
    )
    headers = [(b"endpoint-load-metrics-format", b"TEXT")]
    await app({"type": "http", "method": "GET", "path": "/", "headers": headers}, receive, send)
    report = b"TEXT named_metrics.kv_cache_usage_perc=0.4, named_metrics.num_requests_waiting=3.0"
    assert dict(sent[0]["headers"]).get(b"endpoint-load-metrics") == (report if may_know else None)
