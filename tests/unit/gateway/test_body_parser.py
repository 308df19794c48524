"""Large JSON bodies are parsed in a process of their own, with the same results."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from array import array
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from services.gateway.errors import ApiError, Gone
from services.gateway.http.body import default_max_body_bytes
from services.gateway.openai import body_parser, schema
from services.gateway.openai.body_parser import BodyParser, is_small, parse_body

CONTEXT = 100_000
MANY_IDS = {"prompt": list(range(50_000)), "max_tokens": 3}
JUNK = {"prompt": [5], "metadata": {"junk": [{}] * 50_000}}


def encoded(body: Any) -> bytes:
    return orjson.dumps(body)


@pytest.fixture
async def parser() -> AsyncIterator[BodyParser]:
    parser = BodyParser()
    yield parser
    parser.close()


@pytest.fixture
def only_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every parse in this process fail."""
    monkeypatch.setattr(body_parser, "parse_body", None)


def parse(parser: BodyParser, cls: type[schema.R], body: Any, **options: Any) -> Any:
    return parser.parse(cls, encoded(body), CONTEXT, **{"gone": lambda: False, **options})


@pytest.mark.parametrize(
    ("body", "small"),
    [
        (JUNK, False),
        (MANY_IDS, False),
        ({"logit_bias": {str(i): 1 for i in range(9000)}}, False),
        ({"prompt": "a long text, " * 8000}, True),  # one value, whatever its length
        ({"prompt": [7] * 2000}, True),
        ({"prompt": [[]] * 20_000}, True),  # below 64 KiB
    ],
)
def test_the_number_of_values_decides_where_a_body_is_parsed(body: Any, small: bool) -> None:
    assert is_small(encoded(body)) is small


@pytest.mark.usefixtures("only_elsewhere")
async def test_the_parser_process_returns_the_same_as_this_process(parser: BodyParser) -> None:
    chat = {"messages": [{"role": "user", "content": f"text {i}"} for i in range(9000)]}
    for cls, body in ((schema.CompletionRequest, MANY_IDS), (schema.ChatRequest, chat)):
        assert await parse(parser, cls, body, kind="completion") == parse_body(
            cls, encoded(body), CONTEXT, "completion"
        )
    request, fingerprint = await parse(parser, schema.DetokenizeRequest, {"tokens": list(range(40_000))})
    assert (request.tokens, fingerprint) == (array("i", range(40_000)), b"")


@pytest.mark.usefixtures("only_elsewhere")
@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        (encoded(JUNK | {"max_tokens": "many"}), "max_tokens", "invalid_type"),
        (encoded(JUNK)[:-1], None, "invalid_json"),
        (encoded({"prompt": [7] * (CONTEXT + 1)}), "prompt", "context_length_exceeded"),
        (json.dumps({"prompt": [7] * 50_000 + [2**40]}).encode(), "prompt", "invalid_type"),
    ],
)
async def test_errors_of_the_parser_process_name_the_field(
    parser: BodyParser, body: bytes, param: str | None, code: str
) -> None:
    with pytest.raises(ApiError) as caught:
        await parser.parse(schema.CompletionRequest, body, CONTEXT, gone=lambda: False)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)


async def test_the_event_loop_goes_on_meanwhile(parser: BodyParser) -> None:
    order = []

    async def large() -> None:
        await parse(parser, schema.CompletionRequest, JUNK)
        order.append("large")

    async def small() -> None:
        await parse(parser, schema.CompletionRequest, {"prompt": [5]})
        order.append("small")

    await asyncio.gather(large(), large(), small())
    assert order == ["small", "large", "large"]


async def test_a_client_that_has_gone_costs_the_process_nothing(parser: BodyParser) -> None:
    with pytest.raises(Gone):
        await parse(parser, schema.CompletionRequest, JUNK, gone=lambda: True)
    assert parser._executor is None


async def test_a_new_process_follows_one_that_has_died(parser: BodyParser) -> None:
    await parse(parser, schema.CompletionRequest, JUNK)
    assert parser._executor is not None
    [pid] = parser._executor._processes
    os.kill(pid, signal.SIGKILL)
    await parse(parser, schema.CompletionRequest, JUNK)
    assert pid not in parser._executor._processes


def die(*_: object) -> None:
    os._exit(1)


async def test_a_body_that_kills_the_parser_process_gets_an_answer(
    parser: BodyParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    await parse(parser, schema.CompletionRequest, JUNK)
    with monkeypatch.context() as patch:
        patch.setattr(body_parser, "_parse_in_process", die)
        with pytest.raises(ApiError) as caught:
            await parse(parser, schema.CompletionRequest, JUNK)
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1.0)
    await parse(parser, schema.CompletionRequest, JUNK)


def test_the_default_limit_follows_the_context() -> None:
    sizes = [default_max_body_bytes(tokens) for tokens in (2048, 131_072, 2**31 - 1)]
    assert sizes == [2**20, 4 * 2**20, 16 * 2**20]
