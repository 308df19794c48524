"""The client that docs/resuming.md shows, with scripted answers that a real server gives only rarely."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from examples.resuming_stream import resuming_stream


def error_event(code: int) -> httpx.Response:
    return httpx.Response(200, text=f"data: {json.dumps({'error': {'code': code, 'message': 'no'}})}\n\n")


FINAL = {"x-should-retry": "false"}
ANSWER = httpx.Response(200, text='id: 1.2.3\ndata: {"choices": []}\n\ndata: [DONE]\n\n')


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> list[httpx.Response]:
    """The server's next answers, one for each request."""
    answers: list[httpx.Response] = []
    client = httpx.Client(transport=httpx.MockTransport(lambda _: answers.pop(0)))

    def stream(method: str, url: str, *, timeout: float, **options: Any) -> Any:
        return client.stream(method, url, **options)

    monkeypatch.setattr(httpx, "stream", stream)
    monkeypatch.setattr("time.sleep", lambda _: None)
    return answers


def chunks() -> list[Any]:
    return list(resuming_stream(["http://x"], "/v1/completions", {}))


@pytest.mark.parametrize(
    "refusal", [httpx.Response(503), httpx.Response(429), httpx.Response(504), error_event(503)], ids=str
)
def test_the_example_retries_after_a_refusal(server: list[httpx.Response], refusal: httpx.Response) -> None:
    server += [refusal, ANSWER]
    assert chunks() == [{"choices": []}]
    assert not server


@pytest.mark.parametrize(
    "verdict", [httpx.Response(500), httpx.Response(504, headers=FINAL), httpx.Response(400)], ids=str
)
def test_the_example_does_not_retry_a_final_error(server: list[httpx.Response], verdict: httpx.Response) -> None:
    server += [verdict, ANSWER]
    with pytest.raises(httpx.HTTPStatusError):
        chunks()
    assert server == [ANSWER]


@pytest.mark.parametrize("code", [500, 504])
def test_the_example_does_not_retry_a_final_error_event(server: list[httpx.Response], code: int) -> None:
    server += [error_event(code), ANSWER]
    with pytest.raises(RuntimeError, match="no"):
        chunks()
    assert server == [ANSWER]
