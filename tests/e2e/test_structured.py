"""Structured outputs end to end: clients of OpenAI and Paceline, comparison with transformers, resumed streams."""

from __future__ import annotations

import json
import math
from typing import Any

import grpc
import httpx
import jsonschema
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field
from transformers import LogitsProcessorList

from demo import CHECKPOINT
from paceline.v1.inference_pb2_grpc import InferenceServiceStub
from services.client import PacelineClient
from services.client.types import Options, make_request
from services.gateway.grammars.trial import grammar_of
from tests.support import reference
from tests.support.grammars import Follows
from tests.support.stack import Stack

STORY = reference.tokenizer(str(CHECKPOINT))("Once there was a fox")["input_ids"]
MODEL = "paceline-demo"
CHAT: Any = [{"role": "user", "content": "What is 3 + 4?"}]


class Animal(BaseModel):
    """A schema as users of OpenAI's client write it."""

    kind: str = Field(max_length=12)
    legs: int = Field(ge=0, le=8)
    tame: bool


SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"type": "string", "pattern": "^[a-z]{3,8}$"},
        "legs": {"enum": [0, 2, 4, 6, 8]},
        "tame": {"type": "boolean"},
    },
    "required": ["kind", "legs", "tame"],
    "additionalProperties": False,
}
STRUCTURE = {"json": SCHEMA, "disable_any_whitespace": True}


def openai(stack: Stack) -> OpenAI:
    http: Any = httpx.Client(trust_env=False, timeout=200)
    return OpenAI(base_url=f"{stack.url}/v1", api_key="none", http_client=http, max_retries=0)


def test_openais_client_can_parse_the_output(stack: Stack) -> None:
    with openai(stack) as client:
        parsed = client.chat.completions.parse(
            model=MODEL,
            messages=CHAT,
            response_format=Animal,
            max_tokens=400,
            seed=5,
            temperature=1,
            extra_body={"bad_words": ["\n", "\t", "\r"]},
        )
        choice = parsed.choices[0]
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Animal)


def test_greedy_tokens_equal_transformers(stack: Stack) -> None:
    grammar = grammar_of("json_schema", json.dumps(SCHEMA), any_whitespace=False)
    processor = LogitsProcessorList([Follows(grammar, len(STORY))])
    ids = reference.processed(CHECKPOINT, STORY, 60, logits_processor=processor)
    expected = reference.tokenizer(str(CHECKPOINT)).decode(ids, skip_special_tokens=True)
    jsonschema.validate(json.loads(expected), SCHEMA)
    body = {"prompt": STORY, "max_tokens": 60, "temperature": 0, "structured_outputs": STRUCTURE}
    answer = httpx.post(f"{stack.url}/v1/completions", json=body, trust_env=False, timeout=200).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (expected, "stop")
    with PacelineClient(f"127.0.0.1:{stack.grpc_port}") as client:
        pieces = list(client.stream(token_ids=STORY, max_tokens=60, temperature=0, choice=[expected, "no"]))
    assert "".join(piece.text for piece in pieces) in (expected, "no")


def test_all_samples_match_the_schema(stack: Stack) -> None:
    with openai(stack) as client:
        answer = client.chat.completions.create(
            model=MODEL, messages=CHAT, max_tokens=60, temperature=1.5, seed=1, n=16, logprobs=True,
            extra_body={"structured_outputs": STRUCTURE},
        )  # fmt: skip
    texts = [choice.message.content or "" for choice in answer.choices]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) > 8


def test_log_probabilities_are_normalized_over_the_allowed_tokens(stack: Stack) -> None:
    """The text is unlikely: normalized over the whole vocabulary, the allowed tokens would have a much smaller sum."""
    body = {
        "prompt": STORY,
        "max_tokens": 20,
        "temperature": 0,
        "logprobs": 20,
        "structured_outputs": {"choice": ["Zyzzyva xylem"]},
    }
    answer = httpx.post(f"{stack.url}/v1/completions", json=body, trust_env=False, timeout=200).json()
    [choice] = answer["choices"]
    assert choice["text"] == "Zyzzyva xylem"
    for likeliest in choice["logprobs"]["top_logprobs"]:
        assert sum(map(math.exp, likeliest.values())) == pytest.approx(1, abs=1e-3)
    assert min(value for likeliest in choice["logprobs"]["top_logprobs"] for value in likeliest.values()) == -9999


def test_a_stream_resumes_after_any_token(stack: Stack) -> None:
    """Another run continues the stream. It gets the earlier tokens as its output, which its matcher reads first."""
    asked: Options = {"max_tokens": 300, "temperature": 1.0, "seed": 3, "json_schema": SCHEMA}
    with PacelineClient(f"127.0.0.1:{stack.grpc_port}") as client:
        whole = client.generate("Once", **asked)
        jsonschema.validate(json.loads(whole.text), SCHEMA)
    with grpc.insecure_channel(f"127.0.0.1:{stack.grpc_port}") as channel:
        for count in range(1, len(whole.token_ids), 5):
            request = make_request("Once", None, None, "", asked)
            request.resume_after = count
            request.resume_token_ids.extend(whole.token_ids[:count])
            rest = InferenceServiceStub(channel).Generate(request)
            assert [token for message in rest for token in message.token_ids] == whole.token_ids[count:], count
        request.resume_token_ids[0] = request.resume_token_ids[0] + 1
        with pytest.raises(grpc.RpcError, match="grammar: the output") as refused:
            list(InferenceServiceStub(channel).Generate(request))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_the_process_that_tries_grammars_is_started_without_a_warning(stack: Stack) -> None:
    """gRPC has threads by then. It warns of a fork unless the gateway declares that no child process calls gRPC."""
    with openai(stack) as client:
        client.completions.create(model=MODEL, prompt="a", max_tokens=2, extra_body={"structured_outputs": STRUCTURE})
    assert "fork" not in (stack.folder / "gateway.log").read_text()
