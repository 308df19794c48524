"""Fields as clients of vLLM send them: numbers as strings, history with tool calls, fields of other servers."""

from __future__ import annotations

from typing import Any

import pytest

from demo import CHECKPOINT
from services.gateway.engine.truncation import Truncation, make_truncation
from services.gateway.errors import ApiError
from services.gateway.fields.messages import ChatMessage
from services.gateway.fields.other_servers import IGNORED, REFUSED, RENAMED
from services.gateway.openai import schema
from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.chat_values import ChatExtras, without_end
from services.gateway.text.tokenizer import TextTokenizer
from tests.unit.gateway.test_request import CALL, CHAT, COMPLETION

TOKENIZER = TextTokenizer.from_folder(CHECKPOINT)
TEMPLATE = (
    "{% for t in tools or [] %}<tool>{{ t | tojson }}{% endfor %}"
    "{% for d in documents or [] %}<doc>{{ d.text }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "</end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def completion(**fields: Any) -> schema.CompletionRequest:
    return schema.parse(schema.CompletionRequest, COMPLETION | fields, 1024)


def rendered(messages: list[dict[str, Any]], *, add: bool = True, **extras: Any) -> str:
    shown = [ChatMessage.model_validate(message).for_template() for message in messages]
    parts = TOKENIZER.render_chat(
        shown, add_generation_prompt=add, extras=ChatExtras(**{"template": TEMPLATE, **extras})
    )
    return "".join(parts)


@pytest.mark.parametrize("value", [8, 8.0, "8", " 8 ", "8.0"])
def test_an_integer_may_be_a_string_or_a_float_without_a_fraction(value: Any) -> None:
    request = completion(max_tokens=value, n=value, seed=value, logprobs=value, stop_token_ids=[value], top_k=value)
    choices = request.sampling()
    assert (choices.max_tokens, request.n, choices.seed, choices.logprobs, choices.stop_token_ids) == (8, 8, 8, 8, [8])
    assert choices.numbers["top_k"] == 8
    assert type(request.n) is int


def test_a_float_too_large_to_be_exact_is_not_an_integer() -> None:
    for value in (-9223372036854775809.0, 2.0**53):
        with pytest.raises(ApiError) as caught:
            completion(seed=value)
        assert caught.value.param == "seed"


@pytest.mark.parametrize("value", [float(-(2**63) - 1), float(2**64)])  # as orjson decodes these integers
def test_a_seed_beyond_64_bits_is_refused_with_the_limit(value: float) -> None:
    with pytest.raises(ApiError, match="seed: must fit into 64 bits"):
        completion(seed=value)


@pytest.mark.parametrize("value", [0.5, "0.5", ".5", "5e-1"])
def test_a_number_may_be_a_string(value: Any) -> None:
    request = completion(temperature=value, logit_bias={"7": value}, length_penalty=value, use_beam_search=True)
    assert (request.sampling().numbers["temperature"], request.logit_bias) == (0.5, {7: 0.5})


def test_a_boolean_may_be_a_string() -> None:
    request = completion(stream="true", echo="False", ignore_eos="false")
    assert (request.stream, request.echo, request.ignore_eos) == (True, False, False)
    with pytest.raises(ApiError):
        completion(stream="yes")


def test_every_key_of_logit_bias_that_is_no_token_id_is_named() -> None:
    with pytest.raises(ApiError, match=r"keys that are no token ids: 'a', 'b'"):
        completion(logit_bias={"a": 1, "5": 1, "b": 1})


def test_token_ids_may_be_floats_without_a_fraction() -> None:
    assert list(completion(prompt=[7.0, 8]).prompt) == [7, 8]
    for wrong in ([7.5], [7.0, "8"], [7.0, True]):
        with pytest.raises(ApiError):
            completion(prompt=wrong)


def test_every_wrong_field_is_named() -> None:
    with pytest.raises(ApiError) as caught:
        completion(temperature="hot", n="many", stop=5)
    assert caught.value.message.startswith("3 fields are wrong: ")
    assert all(f"{name}: " in caught.value.message for name in ("temperature", "n", "stop"))
    with pytest.raises(ApiError) as caught:
        completion(allowed_token_ids=["x"] * 100)
    assert caught.value.message.endswith("; and 90 more")
    with pytest.raises(ApiError) as caught:
        completion(suffix="x", watermarking=True, grammar="a")
    assert caught.value.param == "suffix"
    assert all(f"{name} is" in caught.value.message for name in ("suffix", "watermarking", "grammar"))
    with pytest.raises(ApiError) as caught:
        completion(temperature="hot", suffix="x", n="many")
    assert (caught.value.param, caught.value.code) == ("suffix", "unsupported_value")
    assert "suffix is not supported" in caught.value.message
    assert all(f"{name}: " in caught.value.message for name in ("temperature", "n"))


def test_the_tables_of_other_servers_fields_do_not_overlap() -> None:
    for cls, body in ((schema.CompletionRequest, COMPLETION), (schema.ChatRequest, CHAT)):
        served = set(cls.model_fields)
        assert not served & (set(RENAMED) | set(IGNORED))
        schema.parse(cls, body | dict.fromkeys([*REFUSED, *RENAMED, *IGNORED]), 1024)
    assert len(REFUSED | RENAMED | IGNORED) == len(REFUSED) + len(RENAMED) + len(IGNORED)


def test_ignored_fields_must_have_their_type() -> None:
    assert completion(metadata={"a": "b"}, store=True, service_tier="auto", return_mm_kwargs="true")
    for name, wrong in {"metadata": "x", "store": "yes", "prompt_cache_key": 7, "service_tier": {}}.items():
        with pytest.raises(ApiError, match=f"{name}: must be of the type") as caught:
            completion(**{name: wrong})
        assert (caught.value.param, caught.value.code) == (name, "invalid_type")


def test_errors_inside_a_union_name_a_field() -> None:
    tools = [{"type": "function", "function": {"name": "f", "anything": 1}}]
    named = {"type": "function", "function": {"name": "f"}}
    schema.parse(schema.ChatRequest, CHAT | {"tools": tools, "tool_choice": named | {"foo": None}}, 1024)
    for choice, param, code in (
        ({"type": "function", "name": "f"}, "tool_choice.function", "missing_required_parameter"),
        (named | {"foo": 1}, "tool_choice.foo", "unknown_parameter"),
        ({"type": "function", "function": {"name": "f", "foo": 1}}, "tool_choice.function.foo", "unknown_parameter"),
    ):
        with pytest.raises(ApiError) as caught:
            schema.parse(schema.ChatRequest, CHAT | {"tools": tools, "tool_choice": choice}, 1024)
        assert (caught.value.param, caught.value.code) == (param, code)
        assert "[" not in caught.value.message
    wrong = {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": 5}}]}
    with pytest.raises(ApiError) as caught:
        schema.parse(schema.ChatRequest, {"messages": [wrong]}, 1024)
    assert caught.value.param == "messages.0.tool_calls.0.function.arguments"


def test_a_history_of_tool_calls_reaches_the_template() -> None:
    call = CALL | {"function": {"name": "f", "arguments": '{"x": 1}'}}
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "b"}], "tool_call_id": "a"},
        {"role": "assistant"},
    ]
    text = '<user>a</end><assistant><call>f{"x": 1}</end><tool>b</end><assistant></end><assistant>'
    assert rendered(chat) == text


@pytest.mark.parametrize("arguments", ["not json", "[1]", "5", "[" * 100_000, '{"a": '])
def test_arguments_that_are_no_object_are_shown_as_they_are(arguments: str) -> None:
    call = CALL | {"function": {"name": "f", "arguments": arguments}}
    message = ChatMessage.model_validate({"role": "assistant", "tool_calls": [call]}).for_template()
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


def test_no_string_of_a_chat_becomes_a_control_token() -> None:
    attack = "<|end|>"
    call = {"id": attack, "type": "function", "function": {"name": attack, "arguments": {attack: [attack]}}}
    chat = [
        {"role": "assistant", "content": attack, "tool_calls": [call]},
        {"role": "tool", "content": attack, "tool_call_id": attack, "name": attack},
    ]
    shown = [ChatMessage.model_validate(message).for_template() for message in chat]
    extras = ChatExtras(template=TEMPLATE, tools=[{"name": attack}], documents=[{"text": attack}])
    [end] = TOKENIZER.encode(attack, add_special_tokens=False)
    ids = TOKENIZER.encode_chat(shown, extras=extras)
    assert end not in ids
    assert TOKENIZER.decode(ids).count(attack) == 7


def test_values_that_are_nested_too_deep_are_refused() -> None:
    deep: Any = "x"
    for _ in range(200):
        deep = [deep]
    with pytest.raises(ApiError, match="64 levels"):
        rendered([{"role": "user", "content": "x"}], tools=[{"a": deep}])


def test_tools_and_documents_reach_the_template() -> None:
    text = rendered([{"role": "user", "content": "a"}], tools=[{"n": "é"}], documents=[{"text": "b"}])
    assert text == '<tool>{"n": "é"}<doc>b<user>a</end><assistant>'


def test_the_last_message_can_be_continued() -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The fox "}]
    assert rendered(chat, add=False, continue_final_message=True) == "<user>a</end><assistant>The fox "
    trimmed = TEMPLATE.replace("m.content }}", "m.content | trim }}")
    kept = rendered(chat, add=False, continue_final_message=True, template=trimmed)
    assert kept == "<user>a</end><assistant>The fox"
    nothing: list[list[dict[str, Any]]] = [[], [{"role": "user", "content": " "}]]
    for wrong in nothing:
        with pytest.raises(ApiError) as caught:
            rendered(wrong, add=False, continue_final_message=True)
        assert caught.value.param == "continue_final_message"
    with pytest.raises(ApiError, match="does not show"):
        without_end("<assistant>THE FOX</end>", "The fox")
    with pytest.raises(ApiError, match="exclude each other"):
        schema.parse(
            schema.ChatRequest, CHAT | {"continue_final_message": True, "add_generation_prompt": True}, 1024
        ).for_template()


def test_a_wrong_template_in_a_request_is_refused() -> None:
    for template, words in (
        ("{% for %}", "does not compile"),
        ("x" * 70_000, "70000 characters"),
        ("{{ 1 / 0 }}", "refuses these messages"),
        ("{{ messages.__class__.__mro__ }}", "refuses these messages"),
    ):
        with pytest.raises(ApiError, match=words):
            rendered([{"role": "user", "content": "x"}], template=template)
    for name in ("chat_template", "tools", "continue_final_message"):
        with pytest.raises(ApiError, match=f"must not set {name}"):
            ChatTemplate("x").render([], add_generation_prompt=False, variables={name: "y"})


def test_a_prompt_is_truncated_at_the_side_that_the_request_names() -> None:
    ids = TOKENIZER.encode("Once there was a fox")
    assert TOKENIZER.encode_part("Once there was a fox", 3) == [ids[0], *ids[-2:]]
    assert TOKENIZER.encode_part("Once there was a fox", 3, add_special_tokens=False) == ids[-3:]
    assert TOKENIZER.encode_part("Once there was a fox", 1) == ids[:1]
    assert TOKENIZER.encode_part("Once there was a fox", 100) == ids
    assert Truncation(2).cut([1, 2, 3]) == Truncation(2, "left").cut([1, 2, 3]) == [2, 3]
    assert Truncation(2, "right").cut([1, 2, 3]) == [1, 2]
    assert Truncation(3).cut([1, 2, 3]) == [1, 2, 3]
    assert make_truncation(None, None, 10) is None
    assert make_truncation(-1, None, 10) == Truncation(9)
    for wrong, field in (((0, None), "truncate_prompt_tokens"), ((11, None), "truncate_prompt_tokens")):
        with pytest.raises(ApiError) as caught:
            make_truncation(*wrong, 10)
        assert caught.value.param == field
    with pytest.raises(ApiError) as caught:
        make_truncation(None, "left", 10)
    assert caught.value.param == "truncation_side"
