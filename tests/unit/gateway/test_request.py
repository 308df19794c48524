"""Requests become jobs, or errors that name the field."""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.request_fields import SAMPLING
from paceline.v1 import common_pb2
from services.gateway.engine.request import GenerateJob, RequestBuilder
from services.gateway.engine.sampling import FieldNames, SamplingChoices
from services.gateway.errors import ApiError, Gone, from_scheduler
from services.gateway.openai import schema
from services.gateway.text.id_tokenizer import IdTokenizer
from services.gateway.text.model_files import ModelFiles, read_model_files, resolve_folder
from services.gateway.text.tokenizer import TextTokenizer
from services.runtime.model.hub import NoSuchModel

CHECKPOINT = Path(__file__).parents[3] / "demo" / "checkpoint"
NAMES = FieldNames()


@pytest.fixture(scope="module")
def builder() -> RequestBuilder:
    return RequestBuilder(TextTokenizer.from_folder(CHECKPOINT), read_model_files(CHECKPOINT), max_model_len=100)


def make_job(
    builder: RequestBuilder, ids: list[int] | None = None, default: int | None = None, **choices: Any
) -> GenerateJob:
    return builder.job(
        [1, 2, 3] if ids is None else ids,
        SamplingChoices(numbers={name: choices.pop(name) for name in SAMPLING if name in choices}, **choices),
        request_id="r",
        endpoint="test",
        names=NAMES,
        default_max_tokens=default,
    )


def test_a_request_without_fields_gets_the_defaults(builder: RequestBuilder) -> None:
    sampling = make_job(builder).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.ignore_eos) == (97, 0, False)
    assert make_job(builder, default=16).sampling.max_tokens == 16
    assert make_job(builder, [0] * 95, default=16).sampling.max_tokens == 5
    assert make_job(builder, default=16, min_tokens=20).sampling.max_tokens == 20
    assert make_job(builder).final_tokens == {1, 5}
    assert make_job(builder, ignore_eos=True, stop_token_ids=[7]).final_tokens == {7}


def test_every_request_gets_a_seed_of_its_own_once(builder: RequestBuilder) -> None:
    assert make_job(builder).sampling.seed != make_job(builder).sampling.seed
    assert make_job(builder, seed=5).sampling.seed == 5
    assert make_job(builder, seed=-1).sampling.seed == 2**64 - 1


def test_generation_config_gives_the_defaults(builder: RequestBuilder) -> None:
    files = ModelFiles(CHECKPOINT, 50, 1024, frozenset({1}), {"temperature": 0.5, "top_p": 0.25, "top_k": 7})
    sampling = make_job(RequestBuilder(builder.tokenizer, files)).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 7)
    assert sampling.max_tokens == 47


def test_generation_config_gives_defaults_of_penalties_too(builder: RequestBuilder, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 9}')
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 1.05, "min_p": 0.1, "typical_p": 0.5}')
    files = read_model_files(tmp_path)
    served = RequestBuilder(builder.tokenizer, files, max_model_len=50)
    sampling = make_job(served).sampling
    assert [round(x, 3) for x in (sampling.repetition_penalty, sampling.min_p, sampling.typical_p)] == [1.05, 0.1, 0.5]
    assert make_job(served, repetition_penalty=1.0, min_p=0.0, typical_p=1.0).sampling.repetition_penalty == 0


def test_a_top_k_of_minus_1_in_generation_config_means_all_tokens(builder: RequestBuilder, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 9}')
    (tmp_path / "generation_config.json").write_text('{"top_k": -1}')
    served = RequestBuilder(builder.tokenizer, read_model_files(tmp_path), max_model_len=50)
    assert make_job(served).sampling.top_k == 0


@pytest.mark.parametrize(("name", "value"), [("top_k", -2), ("top_p", 0), ("repetition_penalty", 0), ("min_p", 2)])
def test_defaults_out_of_range_are_refused_at_start(tmp_path: Path, name: str, value: float) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 9}')
    (tmp_path / "generation_config.json").write_text(f'{{"{name}": {value}}}')
    with pytest.raises(ValueError, match=f"{name} {value} is not within "):
        read_model_files(tmp_path)


def test_a_limit_rounded_to_a_32_bit_float_is_accepted(builder: RequestBuilder) -> None:
    assert make_job(builder, repetition_penalty=float(np.float32(0.01))).sampling.repetition_penalty


def test_the_model_info_of_the_workers_replaces_that_of_the_files(builder: RequestBuilder) -> None:
    info = common_pb2.ModelInfo(vocab_size=10, max_model_len=20, eos_token_ids=[9])
    served = RequestBuilder(builder.tokenizer, read_model_files(CHECKPOINT), worker_model=lambda: info)
    assert (served.vocab_size, served.max_model_len, served.eos_token_ids) == (10, 20, frozenset({9}))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": 1e30}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.0001}, "top_p"),
    ({"top_p": float("nan")}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**31}, "top_k"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 2**31}, "max_tokens"),
    ({"max_tokens": 101}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"seed": 2**64}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": ["x" * 1025]}, "stop"),
    ({"stop_token_ids": [1024]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 257}, "stop_token_ids"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"min_p": float("nan")}, "min_p"),
    ({"typical_p": 0.0}, "typical_p"),
    ({"typical_p": 1.1}, "typical_p"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"repetition_penalty": -1.0}, "repetition_penalty"),
    ({"repetition_penalty": 101.0}, "repetition_penalty"),
    ({"repetition_penalty": float("nan")}, "repetition_penalty"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"frequency_penalty": float("inf")}, "frequency_penalty"),
    ({"logit_bias": {1024: 1.0}}, "logit_bias"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias"),
    ({"logit_bias": {1: 100.5}}, "logit_bias"),
    ({"logit_bias": {1: float("nan")}}, "logit_bias"),
    ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [1024]}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": [[]]}, "bad_words"),
    ({"bad_words": [[1024]]}, "bad_words"),
    ({"bad_words": [[1] * 65]}, "bad_words"),
    ({"bad_words": ["x" * 257]}, "bad_words"),
    ({"bad_words": ["x"] * 257}, "bad_words"),
    ({"bad_words": ["ABCDEFGHIJKLMNOPQRSTUVWXYZ" * 6]}, "bad_words"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"ids": []}, "prompt"),
    ({"ids": [1] * 100}, "prompt"),
]


@pytest.mark.parametrize(("wrong", "field"), BAD)
def test_impossible_values_are_refused_by_name(builder: RequestBuilder, wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(ApiError) as caught:
        make_job(builder, **wrong)
    assert caught.value.status == 400
    assert caught.value.param == field


def test_a_context_that_is_too_long_names_the_numbers(builder: RequestBuilder) -> None:
    """LiteLLM recognises these errors by the first words."""
    text = "This model's maximum context length is 100 tokens. However, "
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"max_tokens": 101}, text + "max_tokens is 101"),
        ({"ids": [1] * 120}, text + "your prompt contains 120 input tokens, which exceeds"),
        ({"ids": [1] * 100}, text + "your prompt contains 100 input tokens, which leaves no room"),
    ]
    for options, words in wrong:
        with pytest.raises(ApiError) as caught:
            make_job(builder, **options)
        assert caught.value.message.startswith(words)
        assert caught.value.body()["error"]["code"] == "context_length_exceeded"


def test_more_output_than_the_context_holds_ends_where_the_context_does(builder: RequestBuilder) -> None:
    assert make_job(builder, max_tokens=97).sampling.max_tokens == 97
    assert make_job(builder, max_tokens=100).sampling.max_tokens == 97
    assert make_job(builder, [1] * 99).sampling.max_tokens == 1


def test_bad_words_are_banned_with_and_without_a_space_before_them(builder: RequestBuilder) -> None:
    encode = builder.encode_word
    words = make_job(builder, bad_words=["fox", " fox", "two words", [7, 8]]).sampling.bad_words
    expected = [encode("fox"), encode(" fox"), encode("two words"), encode(" two words"), [7, 8]]
    assert [np.frombuffer(word, "<i4").tolist() for word in words] == expected
    assert encode("fox") != encode(" fox")
    assert make_job(builder, bad_words=["  "]).sampling.bad_words == [np.array(encode("  "), "<i4").tobytes()]


def test_parameters_of_many_tokens_have_a_limit() -> None:
    """So the message with a batch of requests stays below the size limit of gRPC messages."""
    large = RequestBuilder(IdTokenizer(10_000), ModelFiles(CHECKPOINT, 50, 10_000, frozenset()))
    assert len(make_job(large, allowed_token_ids=range(8192)).sampling.allowed_token_ids) == 4 * 8192
    assert len(make_job(large, bad_words=[[i] * 64 for i in range(64)]).sampling.bad_words) == 64
    value: Any
    for name, value in (("allowed_token_ids", range(8193)), ("bad_words", [[i] * 64 for i in range(65)])):
        with pytest.raises(ApiError, match="at most") as caught:
            make_job(large, **{name: value})
        assert caught.value.param == name


def test_a_model_without_a_tokenizer_takes_bad_words_as_token_ids() -> None:
    bare = RequestBuilder(IdTokenizer(50), ModelFiles(CHECKPOINT, 50, 50, frozenset()))
    assert len(make_job(bare, bad_words=[[1, 2]]).sampling.bad_words) == 1
    with pytest.raises(ApiError, match="token ids") as caught:
        make_job(bare, bad_words=["fox"])
    assert caught.value.param == "bad_words"


def test_errors_show_limits_as_plain_numbers(builder: RequestBuilder) -> None:
    with pytest.raises(ApiError, match="max_tokens must be between 1 and 2147483647, not 2147483648"):
        make_job(builder, max_tokens=2**31)
    with pytest.raises(ApiError, match=r"temperature must be between 0 and 100, not -0\.5"):
        make_job(builder, temperature=-0.5)


def test_all_sampling_numbers_out_of_range_are_named(builder: RequestBuilder) -> None:
    with pytest.raises(
        ApiError, match=r"^temperature must be .*; top_p must be .*; presence_penalty must be "
    ) as wrong:
        make_job(builder, presence_penalty=3.0, top_p=5.0, temperature=-1.0, min_p=0.5)
    assert wrong.value.param == "temperature"


def test_tiny_temperatures_are_greedy(builder: RequestBuilder) -> None:
    assert make_job(builder, temperature=1e-30).sampling.temperature == 0
    assert make_job(builder, top_k=-1).sampling.top_k == 0


async def test_a_hopeless_prompt_is_not_even_encoded(builder: RequestBuilder) -> None:
    with pytest.raises(ApiError, match="at least"):
        await builder.encode_text("x" * 10_000_000, NAMES)
    long_but_possible = "a" * 90
    assert len(await builder.encode_text(long_but_possible, NAMES)) > 1


# -- JSON bodies

COMPLETION = {"prompt": "x"}
CHAT = {"messages": [{"role": "user", "content": "x"}]}

TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}

BAD_BODIES: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [[1], ["a"]]}, "prompt"),
    ({"prompt": ["x"] * 129}, "prompt"),
    ({"cache_retention": [{"priority": 1, "duration": 5}]}, "cache_retention.0.duration"),
    ({"cache_retention": [{"priority": 1, "decode": 1}]}, "cache_retention.0.decode"),
    ({"temperature": "one"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"stop": 3}, "stop"),
    ({"stop": ["a", 1]}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids.0"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"model": 5}, "model"),
    ({"n": 1.5}, "n"),
    ({"best_of": "2.5"}, "best_of"),
    ({"n": True}, "n"),
    ({"logprobs": "1x"}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"prompt_logprobs": True}, "prompt_logprobs"),
    ({"suffix": "x"}, "suffix"),
    ({"return_tokens_as_token_ids": 1}, "return_tokens_as_token_ids"),
    ({"grammar": "root ::= 'a'"}, "grammar"),
    ({"watermarking": True}, "watermarking"),
    ({"stream_interval": 0}, "stream_interval"),
    ({"request_id": 5}, "request_id"),
    ({"response_format": {"type": "json_object", "schema": 123}}, "response_format.schema"),
    ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
    ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
    ({"presence_penalty": "inf"}, "presence_penalty"),
    ({"repetition_penalty": True}, "repetition_penalty"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"a": 5}}, "logit_bias"),
    ({"logit_bias": {"1.0": 5}}, "logit_bias"),
    ({"logit_bias": {"1": 5, "01": 6}}, "logit_bias"),
    ({"logit_bias": {"1": "x"}}, "logit_bias.1"),
    ({"bad_words": "x"}, "bad_words"),
    ({"bad_words": [5]}, "bad_words"),
    ({"bad_words": [["a"]]}, "bad_words"),
    ({"allowed_token_ids": [1.5]}, "allowed_token_ids.0"),
    ({"min_p": "0.1.1"}, "min_p"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"priority": "high"}, "priority"),
]
BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "x"}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc"}}]}]},
        "messages.0.content",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content"),
    ({"max_completion_tokens": "five"}, "max_completion_tokens"),
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools.0.type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
        "tools.0.function.parameters",
    ),
    ({"tools": [TOOL, TOOL]}, "tools.1.function.name"),
    ({"tools": [TOOL] * 129}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "any", "tools": [TOOL]}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools"}, "tools": [TOOL]}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, "tool_choice.function.name"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"include_reasoning": "no"}, "include_reasoning"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
    ({"top_logprobs": True, "logprobs": True}, "top_logprobs"),
    ({"chat_template": 5}, "chat_template"),
    ({"documents": [{"a": []}]}, "documents.0"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages.0"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages.0.tool_calls.0.function"),
    ({"chat_template_kwargs": {"x": [1]}}, "chat_template_kwargs"),
    ({"continue_final_message": 1}, "continue_final_message"),
]


@pytest.mark.parametrize(("wrong", "field"), BAD_BODIES)
def test_bodies_of_completions_are_strict(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(ApiError) as caught:
        schema.parse(schema.CompletionRequest, COMPLETION | wrong, 1024)
    assert (caught.value.status, caught.value.param) == (400, field)
    json.dumps(caught.value.body())


@pytest.mark.parametrize(("wrong", "field"), BAD_CHATS)
def test_bodies_of_chats_are_strict(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(ApiError) as caught:
        schema.parse(schema.ChatRequest, CHAT | wrong, 1024)
    assert (caught.value.status, caught.value.param) == (400, field)


@pytest.mark.parametrize("body", [None, [], "x", 5])
def test_a_body_is_an_object(body: Any) -> None:
    with pytest.raises(ApiError, match="JSON object"):
        schema.parse(schema.ChatRequest, body, 1024)


def test_values_that_change_nothing_are_fine() -> None:
    neutral = {
        "n": 1, "best_of": 1, "logprobs": False, "bad_words": [], "min_p": 0, "typical_p": 1,
        "echo": False, "suffix": None, "presence_penalty": 0, "allowed_token_ids": None, "prompt_logprobs": None,
        "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}, "user": "me", "unknown": None,
        "response_format": {"type": "text"}, "stop": None, "seed": None, "temperature": 1,
        "prompt_embeds": [],
    }  # fmt: skip
    assert schema.parse(schema.CompletionRequest, COMPLETION | neutral, 1024).sampling().numbers["temperature"] == 1.0
    chat = CHAT | {"logprobs": False, "top_logprobs": 0, "tools": None, "tool_choice": "none"}
    assert schema.parse(schema.ChatRequest, chat, 1024).messages[0].content == "x"


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("spaces_between_special_tokens", False, "true"),
        ("suffix", "x", '""'),
        ("tool_choice", "required", '"none"'),
        ("prompt_embeds", "x", "[]"),
    ],
)
def test_unsupported_values_are_named_as_in_json(name: str, value: Any, wanted: str) -> None:
    with pytest.raises(ApiError) as error:
        schema.parse(schema.CompletionRequest, COMPLETION | {name: value}, 1024)
    assert error.value.code == "unsupported_value"
    assert error.value.message == f"{name} is not supported yet (leave it out, or {wanted})"


@pytest.mark.parametrize(
    ("name", "ours"), [("guided_json", "structured_outputs.json"), ("ebnf", "structured_outputs.grammar")]
)
def test_a_field_name_of_another_server_is_refused_with_the_name_to_use(name: str, ours: str) -> None:
    with pytest.raises(ApiError, match=ours) as error:
        schema.parse(schema.ChatRequest, CHAT | {name: {}}, 1024)
    assert error.value.param == name
    schema.parse(schema.ChatRequest, CHAT | {name: None}, 1024)


def test_typed_parts_and_both_names_of_max_tokens() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"messages": [{"role": "developer", "content": parts}], "max_tokens": 3, "max_completion_tokens": 4}
    request = schema.parse(schema.ChatRequest, body, 1024)
    assert request.messages[0].for_template() == {"role": "system", "content": "a\nb"}
    assert request.sampling().max_tokens == 4


class Untouched(list[Any]):
    """Has a length and entries, but must not be iterated over."""

    def __iter__(self) -> Any:
        raise AssertionError("a list that is too long was gone through")


class UntouchedObject(dict[str, Any]):
    def __iter__(self) -> Any:
        raise AssertionError("an object that is too large was gone through")

    items = values = keys = __iter__


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("prompt", Untouched([1] * 1025), "context length is 1024 tokens. However, your prompt contains 1025"),
        ("prompt", [[1], Untouched([1] * 1025)], "context length is 1024 tokens. However, your prompt contains 1025"),
        ("prompt", Untouched(["a"] * 129), "at most 128"),
        ("prompt", Untouched([[1]] * 129), "at most 128"),
        ("stop", Untouched(["a"] * 17), "at most 16"),
        ("stop_token_ids", Untouched([1] * 257), "at most 256"),
        ("logit_bias", UntouchedObject({str(i): 1 for i in range(1025)}), "at most 1024"),
        ("bad_words", Untouched(["a"] * 257), "at most 256"),
        ("bad_words", ["a", Untouched([1] * 65)], "1 to 64 tokens, not 65"),
        ("allowed_token_ids", Untouched([1] * 8193), "at most 8192"),
        ("cache_retention", Untouched([{"priority": 1}] * 65), "at most 64"),
        ("messages", Untouched([{"role": "user", "content": "a"}] * 1025), "at most 1024"),
        ("messages", [{"role": "user", "content": Untouched(["a"] * 16385)}], "at most 16384"),
        ("chat_template_kwargs", UntouchedObject({str(i): 1 for i in range(1025)}), "at most 1024"),
    ],
)
def test_a_list_that_is_too_long_is_refused_by_its_length(name: str, value: Any, limit: str) -> None:
    cls, body = (schema.ChatRequest, CHAT) if name in ("messages", "chat_template_kwargs") else (
        schema.CompletionRequest, COMPLETION)  # fmt: skip
    with pytest.raises(ApiError, match=limit) as caught:
        schema.parse(cls, body | {name: value}, 1024)
    assert (caught.value.status, caught.value.param) == (400, name)


def test_lists_of_the_greatest_allowed_length_are_accepted() -> None:
    body = {
        "prompt": [1] * 1024, "stop": ["a"] * 16, "stop_token_ids": [1] * 256, "bad_words": [[1] * 64] * 256,
        "logit_bias": {str(i): 1 for i in range(1024)}, "allowed_token_ids": [1] * 8192,
        "cache_retention": [{"priority": 1}] * 64,
    }  # fmt: skip
    assert len(schema.parse(schema.CompletionRequest, body, 1024).prompt) == 1024
    assert len(schema.parse(schema.CompletionRequest, {"prompt": [[1] * 1024] * 128}, 1024).prompt) == 128
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 16384}]}
    assert len(schema.parse(schema.ChatRequest, chat, 1024).messages[0].content or "") == 16383


def test_the_shortest_deadline_does_not_become_no_deadline() -> None:
    """The value is sent as a 32-bit float, in which 0 means that no value is given."""
    assert schema.parse(schema.CompletionRequest, COMPLETION | {"deadline_s": 1e-300}, 1024).metadata().deadline_s > 0


@pytest.mark.parametrize("name", ["top_p", "typical_p"])
@pytest.mark.parametrize("given", [1e-45, 1e-46, 1e-300])
def test_the_smallest_shares_stay_above_zero(builder: RequestBuilder, name: str, given: Any) -> None:
    """top_p and typical_p are sent as 32-bit floats. There a 0 is invalid for top_p, and for typical_p it means that
    the field is not set."""
    assert getattr(make_job(builder, **{name: given}).sampling, name) == 2.0**-149


def slow_builder() -> tuple[RequestBuilder, list[str], threading.Event]:
    """Returns the builder, the texts that its tokenizer has started, and the event that lets it go on."""
    begun: list[str] = []
    go_on = threading.Event()

    class Slow(TextTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            begun.append(text)
            assert go_on.wait(60)
            return [1]

    return RequestBuilder(Slow.from_folder(CHECKPOINT), read_model_files(CHECKPOINT)), begun, go_on


async def test_long_texts_are_tokenised_a_few_at_a_time_and_not_for_clients_that_have_gone() -> None:
    builder, begun, go_on = slow_builder()
    gone: set[int] = set()

    def is_gone(number: int) -> Callable[[], bool]:
        return lambda: number in gone

    many = 3 * (os.cpu_count() or 1)
    texts = [f"{i:05} " * 1000 for i in range(many)]
    tasks = [asyncio.create_task(builder.encode_text(text, NAMES, gone=is_gone(i))) for i, text in enumerate(texts)]
    async with asyncio.timeout(30):
        while len(begun) < many // 3:  # noqa: ASYNC110 - threads
            await asyncio.sleep(0.001)
    gone.add(many - 1)
    assert len(begun) == many // 3
    go_on.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(begun) == texts[:-1]
    assert [isinstance(outcome, Gone) for outcome in outcomes] == [False] * (many - 1) + [True]


async def test_a_cancelled_text_counts_until_its_thread_has_ended() -> None:
    """Otherwise clients that connect and disconnect could leave any number of texts in threads."""
    builder, begun, go_on = slow_builder()
    num_threads = os.cpu_count() or 1

    def encode(count: int) -> list[asyncio.Task[list[int]]]:
        return [asyncio.create_task(builder.encode_text("text " * 1000, NAMES)) for _ in range(count)]

    first = encode(num_threads)
    async with asyncio.timeout(30):
        while len(begun) < num_threads:  # noqa: ASYNC110 - threads
            await asyncio.sleep(0.001)
    for task in first:
        task.cancel()
    await asyncio.wait(first)
    others = encode(num_threads)
    for _ in range(20):  # turns of the loop, in which they would begin
        await asyncio.sleep(0.001)
    num_begun = len(begun)
    go_on.set()
    assert num_begun == num_threads
    assert await asyncio.gather(*others) == [[1]] * num_threads


# -- errors and files


def test_the_schedulers_codes_become_http_and_grpc() -> None:
    error = from_scheduler(8, "full", "", 2.5)
    assert (error.status, error.retry_after_s, error.grpc_code.name) == (429, 2.5, "RESOURCE_EXHAUSTED")
    assert from_scheduler(3, "bad", "top_k", 0).param == "top_k"
    assert from_scheduler(14, "", "", 0).status == 503
    assert from_scheduler(4, "late", "", 0).status == 504
    unknown = from_scheduler(13, "boom", "", 0)
    assert (unknown.status, unknown.type, unknown.grpc_code.name) == (500, "InternalServerError", "INTERNAL")


def test_a_model_folder_is_found_or_what_it_lacks_is_named(tmp_path: Path) -> None:
    assert resolve_folder(str(CHECKPOINT)) == CHECKPOINT.resolve()
    with pytest.raises(NoSuchModel, match="not a hub name"):
        resolve_folder(str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        read_model_files(tmp_path)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 5}')
    with pytest.raises(ValueError, match="vocab_size"):
        read_model_files(tmp_path)
    (tmp_path / "config.json").write_text(
        '{"text_config": {"vocab_size": 5, "max_position_embeddings": 9, "eos_token_id": 2}}'
    )
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 3], "temperature": 0.6, "top_k": null}')
    files = read_model_files(tmp_path)
    assert (files.max_model_len, files.eos_token_ids, files.defaults) == (9, frozenset({2, 3}), {"temperature": 0.6})
    for strange in ('{"vocab_size": "x"}', '{"text_config": 5}'):
        (tmp_path / "config.json").write_text(strange)
        with pytest.raises(ValueError, match="makes no sense"):
            read_model_files(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json"):
        read_model_files(tmp_path)


def test_users_with_long_names_are_different_tenants() -> None:
    def tenant(user: str) -> str:
        return schema.parse(schema.ChatRequest, CHAT | {"user": user}, 99).metadata().tenant

    assert tenant("a" * 128) == "a" * 128
    long, other = (tenant("a" * 128 + name) for name in ("alice", "bob"))
    assert long != other
    assert re.fullmatch(r"a{95}-[0-9a-f]{32}", long)
    assert tenant("a" * 128 + "alice") == long
    assert tenant(long) not in (long, other)  # a user with the name of another user's tenant
    with pytest.raises(ApiError, match="tenant has 129 characters; at most 128 are possible"):
        schema.parse(schema.ChatRequest, CHAT | {"tenant": "a" * 129}, 99).metadata()
