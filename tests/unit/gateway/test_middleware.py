"""The straight way past the framework answers as the framework does."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from services.gateway.errors import Gone, invalid
from services.gateway.http.connection import CONNECTION
from services.gateway.openai.middleware import RequestMiddleware


class ClientSocket:
    dropped = False

    def drop(self) -> None:
        self.dropped = True


class Broken(Response):
    """A response that fails after its start."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise KeyError("x")


async def ask(outcome: Response | Exception, path: str = "/direct") -> tuple[list[Message], ClientSocket]:
    """The messages that the client gets when its handler returns or raises `outcome`."""
    sent: list[Message] = []
    peer = ClientSocket()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(b"framework")(scope, receive, send)

    async def handler(request: Request) -> Response:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"x-request-id", b"mine")]
    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": path, "headers": headers, CONNECTION: peer}
    try:
        await RequestMiddleware(app, {("GET", "/direct"): handler})(scope, receive, send)
    except KeyError:
        sent.append({"type": "raised"})
    return sent, peer


def statuses(sent: list[Message]) -> list[int]:
    return [message["status"] for message in sent if message["type"] == "http.response.start"]


@pytest.mark.parametrize("path", ["/direct", "/other"])
async def test_every_answer_has_the_requests_id(path: str) -> None:
    (start, body), _ = await ask(Response(b"direct"), path)
    assert (b"x-request-id", b"mine") in start["headers"]
    assert body["body"] == (b"direct" if path == "/direct" else b"framework")


async def test_errors_have_openais_shape() -> None:
    sent, _ = await ask(invalid("n", "n is wrong"))
    assert statuses(sent) == [400]
    assert orjson.loads(sent[1]["body"])["error"]["param"] == "n"


async def test_a_bug_is_a_500_and_reaches_the_log() -> None:
    sent, _ = await ask(KeyError("x"))
    assert statuses(sent) == [500]
    assert orjson.loads(sent[1]["body"])["error"]["code"] == "internal_error"
    assert sent[-1]["type"] == "raised"


async def test_a_bug_behind_the_beginning_of_an_answer_begins_no_other() -> None:
    sent, _ = await ask(Broken())
    assert statuses(sent) == [200]
    assert sent[-1]["type"] == "raised"


async def test_a_client_that_has_gone_gets_no_answer() -> None:
    assert statuses((await ask(ClientDisconnect()))[0]) == [499]
    sent, peer = await ask(Gone())
    assert not sent
    assert peer.dropped
