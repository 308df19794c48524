"""How the command learns what a server takes, and the requests that it then sends."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from services.cli.bench.client import LoadClient, ServerRefuses
from services.cli.bench.load.prompts import Endpoint
from services.cli.bench.load.sessions import LoadSession, Segment, SessionTurn
from services.cli.bench.stats.records import RequestRecord
from services.cli.bench.target import BenchTarget

SESSION = LoadSession((SessionTurn((Segment("a", 100),), 7),))


class FakeServer:
    """Counts 2 tokens per word, and 10 for its template."""

    def __init__(self, limit_field: str = "max_tokens", usage: bool = True, models: tuple[str, ...] = ("m",)) -> None:
        self.limit_field, self.usage, self.models = limit_field, usage, models
        self.bodies: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/models"):
            return httpx.Response(200, json={"data": [{"id": name} for name in self.models]})
        body = json.loads(request.content)
        self.bodies.append(body)
        if self.limit_field not in body:
            return httpx.Response(400, json={"error": {"message": f"use '{self.limit_field}' instead"}})
        if not body.get("stream"):
            text = body["messages"][0]["content"] if "messages" in body else body["prompt"]
            usage = {"prompt_tokens": 2 * len(text.split()) + 10} if self.usage else None
            return httpx.Response(200, json={"choices": [], "usage": usage})
        if "stream_options" in body and not self.usage:
            return httpx.Response(422, json={"detail": "extra field"})
        chunks: list[dict[str, Any]] = [{"choices": [{"delta": {"content": "x"}, "finish_reason": "length"}]}]
        if self.usage:
            chunks.append({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 1}})
        return httpx.Response(200, text="".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks))


def target(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, model: str = "", endpoint: Endpoint = "chat"
) -> BenchTarget:
    client = LoadClient("http://fake/v1", "key", endpoint, 5, "")
    monkeypatch.setattr(client, "_idle", [httpx.AsyncClient(transport=httpx.MockTransport(server))])
    return BenchTarget(client, model, endpoint, {"user": "bench"}, False, 0, 1)


async def test_a_server_with_usage_is_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer()
    probed = target(server, monkeypatch)
    await probed.probe()
    assert (probed.model, probed.has_usage, probed.notes) == ("m", True, [])
    assert (probed.calibration.tokens_per_word, probed.calibration.extra_tokens) == (2, 10)
    body = json.loads(probed.body(SESSION, 0, []))
    assert len(body.pop("messages")[0]["content"].split()) == 45
    assert body == {
        "model": "m",
        "max_tokens": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
        "user": "bench",
    }


async def test_a_server_that_demands_max_completion_tokens_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    probed = target(FakeServer("max_completion_tokens"), monkeypatch)
    await probed.probe()
    body = json.loads(probed.body(SESSION, 0, []))
    assert body["max_completion_tokens"] == 7
    assert "max_tokens" not in body


async def test_a_server_without_usage_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    probed = target(FakeServer(usage=False), monkeypatch)
    await probed.probe()
    assert not probed.has_usage
    assert len(probed.notes) == 3
    assert "stream_options" not in json.loads(probed.body(SESSION, 0, []))


@pytest.mark.parametrize("models", [(), ("a", "b")])
async def test_the_model_must_be_clear(models: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer(models=models)
    with pytest.raises(ServerRefuses, match=f"has {len(models)} models"):
        await target(server, monkeypatch).probe()
    await target(server, monkeypatch, model="b").probe()
    assert {body["model"] for body in server.bodies} == {"b"}


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (httpx.Response(429, json={"error": {"code": "quota", "type": "x"}}), "HTTP 429 quota"),
        (httpx.Response(503, text="<html>"), "HTTP 503"),
        (httpx.Response(200, text="data: {\n"), "bad stream: a chunk is not JSON"),
        (httpx.Response(200, text="data: {"), "the stream ended early"),
        (httpx.Response(200, text="hello"), "the stream ended early"),
        (httpx.ConnectError("no"), "cannot connect"),
        (httpx.ReadError("no"), "connection lost"),
    ],
)
async def test_a_failed_request_has_a_reason(
    response: httpx.Response | Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        if isinstance(response, Exception):
            raise response
        return response

    client = LoadClient("http://fake/v1", "", "chat", 5, "")
    monkeypatch.setattr(client, "_idle", [httpx.AsyncClient(transport=httpx.MockTransport(answer))])
    record = RequestRecord(0, 0)
    await client.stream(b"{}", record)
    assert record.error == reason
    assert record.end_s >= record.sent_s > 0


async def test_separators_in_a_text_end_no_line_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some servers send such characters unescaped."""
    text = "a\x85b\u2028c\u2029"
    chunk = json.dumps({"choices": [{"delta": {"content": text}, "finish_reason": "stop"}]}, ensure_ascii=False)
    client = LoadClient("http://fake/v1", "", "chat", 5, "")
    whole = httpx.MockTransport(lambda _: httpx.Response(200, text=f"data: {chunk}\n\ndata: [DONE]\n\n"))
    monkeypatch.setattr(client, "_idle", [httpx.AsyncClient(transport=whole)])
    record = RequestRecord(0, 0)
    assert await client.stream(b"{}", record) == text
    assert (record.error, record.finish_reason) == ("", "stop")
