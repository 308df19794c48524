"""Structured outputs over HTTP and gRPC: the grammar that reaches the scheduler, and refused requests."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from paceline.v1 import inference_pb2
from services.client import AsyncPacelineClient, InvalidRequest
from services.gateway.engine import request
from services.gateway.engine.request import RequestBuilder
from services.gateway.errors import ApiError
from services.gateway.grammars import structure
from services.gateway.grammars.checks import GrammarChecks
from services.gateway.grammars.trial import TrialLimits
from services.gateway.grpc.inference_service import _structure
from services.gateway.text.id_tokenizer import IdTokenizer
from services.gateway.text.model_files import ModelFiles
from tests.contract.gateway.conftest import MODEL, Running, Start
from tests.contract.gateway.test_openai import CHAT, CHECKPOINT

TOKENIZER = LLTokenizer(str(CHECKPOINT / "tokenizer.json"))
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
OPENAI_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
GBNF = 'root ::= "a" [0-9]+'
# Fields of an HTTP request, a text that the grammar accepts, and a text that it refuses.
HTTP: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_object"}}, '{"x": [1, {}]}', "[1]"),
    ({"response_format": OPENAI_SCHEMA}, '{\n  "a": 5\n}', '{"a": 5, "b": 6}'),
    ({"structured_outputs": {"json": SCHEMA}}, '{"a" : 5}', '{"a": "5"}'),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, '{"a":5}', "{" + " " * 33 + '"a":5}'),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, '{"a":5}', '{"a": 5}'),
    ({"structured_outputs": {"json": {}}}, "[null, true]", "nil"),
    ({"structured_outputs": {"json_object": True, "regex": None, "disable_fallback": False}}, "{}", "5"),
    ({"structured_outputs": {"regex": "(ab)+"}}, "abab", "aba"),
    ({"structured_outputs": {"choice": ['ye"s', "no\n"]}}, 'ye"s', "yes"),
    ({"structured_outputs": {"grammar": GBNF}}, "a12", "12"),
    ({"structured_outputs": {"grammar": 'start: "a" N\nN: /[0-9]+/'}}, "a12", "a"),
]
GRPC: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"json_schema": SCHEMA}, {"response_format": OPENAI_SCHEMA}),
    ({"json_schema": json.dumps(SCHEMA)}, {"structured_outputs": {"json": SCHEMA}}),
    ({"regex": "(ab)+"}, {"structured_outputs": {"regex": "(ab)+"}}),
    ({"choice": ["yes", "no"]}, {"structured_outputs": {"choice": ["yes", "no"]}}),
    ({"grammar": GBNF}, {"structured_outputs": {"grammar": GBNF}}),
]


def fits(grammar: str, text: str) -> bool:
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    return matcher.consume_tokens(TOKENIZER.tokenize_str(text)) and matcher.is_accepting()


@pytest.mark.parametrize(("asked", "right", "wrong"), HTTP)
async def test_the_scheduler_gets_a_grammar(running: Running, asked: dict[str, Any], right: str, wrong: str) -> None:
    body = {"model": MODEL, "max_tokens": 2, **asked}
    assert (await running.http.post("/v1/completions", json={**body, "prompt": ["a", "b"]})).status_code == 200
    assert (await running.http.post("/v1/chat/completions", json={**body, "messages": CHAT, "n": 2})).status_code == 200
    (grammar,) = {submission.sampling.grammar for submission in running.scheduler.submissions}
    assert len(running.scheduler.submissions) == 4
    assert fits(grammar, right)
    assert not fits(grammar, wrong)


@pytest.mark.parametrize(("options", "body"), GRPC)
async def test_http_and_grpc_give_the_same_grammar(
    running: Running, options: dict[str, Any], body: dict[str, Any]
) -> None:
    async with AsyncPacelineClient(str(running.addresses.grpc)) as client:
        await client.generate("a", max_tokens=1, **options)
    await running.http.post("/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 1, **body})
    grpc, http = (submission.sampling.grammar for submission in running.scheduler.submissions)
    assert grpc == http != ""


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"json_schema": "{"}, "sampling.json_schema"),
        ({"json_schema": "5"}, "sampling.json_schema"),
        ({"json_schema": {"type": "strin"}}, "sampling.json_schema"),
        ({"regex": "(a"}, "sampling.regex"),
        ({"choice": ["a", ""]}, "sampling.choice"),
        ({"choice": ["a"] * 4097}, "sampling.choice"),
        ({"grammar": "start: nope"}, "sampling.grammar"),
        ({"grammar": ""}, "sampling.grammar"),
        ({"grammar": "start: " + "x" * 2**16}, "sampling.grammar"),
        ({"regex": "a", "choice": ["b"]}, "sampling.choice"),
    ],
)
async def test_wrong_structured_outputs_are_refused_over_grpc(
    running: Running, options: dict[str, Any], field: str
) -> None:
    async with AsyncPacelineClient(str(running.addresses.grpc)) as client:
        with pytest.raises(InvalidRequest) as caught:
            await client.generate("a", **options)
    assert caught.value.field == field
    assert len(str(caught.value)) < 500
    assert running.scheduler.submissions == []


async def test_beam_search_with_structured_outputs_is_refused(running: Running) -> None:
    body = {"model": MODEL, "prompt": "a", "use_beam_search": True, "best_of": 2, "structured_outputs": {"regex": "a"}}
    answer = await running.http.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "use_beam_search")


async def test_structured_outputs_are_refused_without_a_tokenizer() -> None:
    bare = RequestBuilder(IdTokenizer(50), ModelFiles(CHECKPOINT, 50, 50, frozenset()))
    assert await bare.grammar(None) == ""
    with pytest.raises(ApiError, match="no tokenizer") as caught:
        await bare.grammar(structure.Structure("regex", "regex", "a"))
    assert caught.value.param == "regex"


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"json": {"type": "integer", "multipleOf": 5000011}}, "at most 10000 are possible"),
    ({"json": {"allOf": [{"multipleOf": prime} for prime in (2, 3, 5, 7, 11, 13, 17, 19)]}}, "250 ms of CPU time"),
    ({"grammar": 'start: %json {"type": "integer", "multipleOf": 5000011}'}, "250 ms of CPU time"),
    ({"regex": "x*" * 30000}, "limit for this grammar: 50000"),
]


@pytest.mark.parametrize(("asked", "limit"), HOSTILE)
async def test_a_grammar_above_a_limit_is_refused_alone(
    start: Start, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], limit: str
) -> None:
    """While the gateway tries the grammar, it serves other requests: one of them ends first."""
    # Otherwise a slow machine could reach the memory limit first. test_grammar_checks.py tests that limit.
    plenty = TrialLimits(memory_bytes=2**32)
    monkeypatch.setattr(request, "GrammarChecks", partial(GrammarChecks, limits=plenty))
    running = await start()
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
    refused = asyncio.create_task(running.http.post("/v1/completions", json={**body, "structured_outputs": asked}))
    await asyncio.sleep(0)
    assert (await running.http.post("/v1/completions", json=body)).status_code == 200
    answer = await refused
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, f"structured_outputs.{next(iter(asked))}")
    assert limit in error["message"]
    assert len(running.scheduler.submissions) == 1


def test_every_kind_of_structure_in_the_protocol_is_read() -> None:
    assert _structure(inference_pb2.SamplingOptions()) is None
    names = [field.name for field in inference_pb2.SamplingOptions.DESCRIPTOR.fields if 23 <= field.number <= 26]
    for name in names:
        options = inference_pb2.SamplingOptions()
        if name == "choice":
            options.choice.append("{}")
        else:
            setattr(options, name, "{}")
        read = _structure(options)
        assert read is not None
        assert (read.field, read.kind) == (f"sampling.{name}", name)
