"""Tool calls and reasoning in a model's text, in the formats that models write, however the text is split."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.parsing.delta import MessageDelta
from services.gateway.parsing.formats import CALL_STYLES
from services.gateway.parsing.reasoning import ThinkingAt, thinking_at, thinking_in
from services.gateway.parsing.reply import ReplyFormat

KNOWN = frozenset(("get_weather", "add", "f"))
Message = tuple[str, str, list[tuple[str, str]]]


def reply(style: str | None, thinking: ThinkingAt | None = None, **options: Any) -> ReplyFormat:
    return ReplyFormat(CALL_STYLES[style] if style else None, KNOWN, thinking=thinking, **options)


class Collected:
    """What a client has after some deltas."""

    def __init__(self) -> None:
        self.content = self.reasoning = ""
        self.calls: list[list[str]] = []

    def add(self, delta: MessageDelta) -> None:
        self.content += delta.content
        self.reasoning += delta.reasoning
        assert len({call.index for call in delta.calls}) == len(delta.calls)
        for call in delta.calls:
            if call.name is not None:
                assert call.index == len(self.calls)
                self.calls.append([call.name, ""])
            self.calls[call.index][1] += call.arguments

    @property
    def message(self) -> Message:
        return self.content, self.reasoning, [(name, arguments) for name, arguments in self.calls]


def read(format_: ReplyFormat, *pieces: str) -> Message:
    parser, collected = format_.parser(), Collected()
    for piece in pieces[:-1]:
        collected.add(parser.push(piece))
    collected.add(parser.push_last(pieces[-1]))
    assert parser.num_calls == len(collected.calls)
    return collected.message


PARIS = '{"city": "Paris", "unit": "celsius"}'
# Texts as in the tests and templates of other projects.
EXAMPLES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    (
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>',
        "",
        [("get_weather", PARIS)],
    ),
    (
        "hermes",
        'I will look.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "f", "arguments": {"s": "</tool_call> {\\"}"}}\n</tool_call>',
        "I will look.",
        [("add", '{"a": 1}'), ("f", '{"s": "</tool_call> {\\"}"}')],
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"x": [1, {"y": 2}]}, "name": "f"}</tool_call>',
        "",
        [("f", '{"x": [1, {"y": 2}]}')],
    ),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', "", [("unknown", "{}")]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    # Half of a surrogate pair cannot be written as UTF-8.
    ("hermes", r'<tool_call>{"name": "f\ud83d", "arguments": "\udfff"}</tool_call>', "", [("f\ufffd", "\ufffd")]),
    ("hermes", r'<tool_call>{"name": "f\ud83d\ude00"}</tool_call>', "", [("f\U0001f600", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": "x"}</tool_call> so', "so", [("f", '{"a": 1}')]),
    ("hermes", "a <tool_call> of no JSON", "a <tool_call> of no JSON", []),
    ("hermes", '<tool_call>{"nam": 1}</tool_call>', '<tool_call>{"nam": 1}</tool_call>', []),
    ("hermes", "<tool_call>[1]", "<tool_call>[1]", []),
    ("hermes", "2 < 3, and a <tool", "2 < 3, and a <tool", []),
    ("hermes", "plain \n", "plain \n", []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "cut o', "", [("f", '{"a": "cut o')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>!', "!", [("f", '{"a": 1')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "null")]),
    ("llama3_json", f'{{"name": "get_weather", "parameters": {PARIS}}}', "", [("get_weather", PARIS)]),
    (
        "llama3_json",
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "f", "parameters": {}}',
        "",
        [("add", '{"a": 1}'), ("f", "{}")],
    ),
    ("llama3_json", ' {"type": "function", "name": "add", "parameters": {"a": "1"}}\n', "", [("add", '{"a": "1"}')]),
    ("llama3_json", '{"name": "f", "arguments": {}}', "", [("f", "{}")]),
    ("llama3_json", '{"name": "Bob", "age": 3} ', '{"name": "Bob", "age": 3} ', []),
    ("llama3_json", "The call is {} ", "The call is {} ", []),
    ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("llama3_json", '{"name": "f", "parameters": {}} as you see', "as you see", [("f", "{}")]),
    ("llama3_json", 'Yes. <|python_tag|>{"name": "f", "parameters": {}}', "Yes.", [("f", "{}")]),
    (
        "mistral",
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "f", "arguments": {{}}}}]',
        "",
        [("get_weather", PARIS), ("f", "{}")],
    ),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 3.5}}]', "", [("add", '{"a": 3.5}')]),
    ("mistral", 'Sure.[TOOL_CALLS]add{"a": 3.5, "b": "}"}', "Sure.", [("add", '{"a": 3.5, "b": "}"}')]),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]f[ARGS]{}', "", [("add", '{"a": 1}'), ("f", "{}")]),
    ("mistral", '[TOOL_CALLS]add[CALL_ID]xyz[ARGS]{"a": 1}', "", [("add", '{"a": 1}')]),
    ("mistral", "[TOOL_CALLS] none\n today", "[TOOL_CALLS] none\n today", []),
    ("mistral", "[TOOL_CALLS][1]", "[TOOL_CALLS][1]", []),
]


@pytest.mark.parametrize(("style", "text", "content", "calls"), EXAMPLES)
def test_calls_in_the_formats_of_models_are_parsed(
    style: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    expected = content, "", calls
    assert read(reply(style), text) == expected
    assert read(reply(style), *text, "") == expected


PIECES = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<think>", "</think>",
        '{"name": "f", "arguments": {"a": [1, "}"]}}', '{"name": "add", "parameters": {}}', '{"name": "', "f", '"',
        "{", "}", "[", "]", ",", ";", ":", '"arguments"', '"name"', "\\", "\n", "  ", "<", "tool_call>", "é", "x", "1",
    ]
)  # fmt: skip
FORMATS = st.builds(
    reply,
    st.sampled_from([None, *CALL_STYLES]),
    st.sampled_from([None, *ThinkingAt]),
    max_calls=st.sampled_from([None, 1]),
    shows_reasoning=st.booleans(),
)


@settings(max_examples=500, deadline=None)
@given(FORMATS, st.lists(PIECES, max_size=24).map("".join), st.data())
def test_any_split_gives_the_same_message_at_every_point(format_: ReplyFormat, text: str, data: st.DataObject) -> None:
    """Also in the middle, so a stream that resumes there continues with the same deltas."""
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)) | {0, len(text)})
    parser, by_char = format_.parser(), format_.parser()
    ours, theirs = Collected(), Collected()
    for begin, end in itertools.pairwise(cuts):
        ours.add(parser.push(text[begin:end]))
        for char in text[begin:end]:
            theirs.add(by_char.push(char))
        assert ours.message == theirs.message
    ours.add(parser.push_last(""))
    theirs.add(by_char.push_last(""))
    assert ours.message == theirs.message == read(format_, text)


@given(st.sampled_from(sorted(CALL_STYLES)), st.text(max_size=60))
def test_text_without_calls_and_reasoning_is_unchanged(style: str, text: str) -> None:
    assert read(reply(style), text) == (text, "", [])
    assert read(reply(None, ThinkingAt.BEHIND), text) == (text, "", [])


@given(
    st.sampled_from(sorted(CALL_STYLES)),
    st.dictionaries(st.text(max_size=8), st.recursive(st.integers() | st.text(max_size=8), st.lists, max_leaves=5)),
)
def test_arguments_are_what_the_model_wrote(style: str, arguments: dict[str, Any]) -> None:
    written = json.dumps(arguments)
    texts = {
        "hermes": f'<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>',
        "llama3_json": f'{{"name": "f", "parameters": {written}}}',
        "mistral": f"[TOOL_CALLS]f[ARGS]{written}",
    }
    assert read(reply(style), texts[style]) == ("", "", [("f", written)])


def test_without_parallel_calls_later_ones_are_dropped() -> None:
    text = EXAMPLES[1][1]
    assert read(reply("hermes", max_calls=1), text) == ("I will look.", "", [("add", '{"a": 1}')])


REASONED: list[tuple[ThinkingAt, str, Message]] = [
    (ThinkingAt.MAYBE, "<think>\nhm\n</think>\n\nHello \n", ("Hello \n", "hm", [])),
    (ThinkingAt.MAYBE, "\n<think>hm", ("", "hm", [])),
    (ThinkingAt.MAYBE, " Hello </think>", (" Hello </think>", "", [])),
    (ThinkingAt.MAYBE, "<thin", ("<thin", "", [])),
    (ThinkingAt.MAYBE, "<think>\n\n</think>\n\nHello", ("Hello", "", [])),
    (ThinkingAt.INSIDE, "hm\n</think>\n\nHello", ("Hello", "hm", [])),
    (ThinkingAt.INSIDE, "<think>\nhm</think>Hello", ("Hello", "hm", [])),
    (ThinkingAt.INSIDE, "hm, no end ", ("", "hm, no end ", [])),
    (ThinkingAt.BEHIND, "<think>hm</think>Hello", ("<think>hm</think>Hello", "", [])),
]


@pytest.mark.parametrize(("thinking", "text", "expected"), REASONED)
def test_reasoning_is_split_off(thinking: ThinkingAt, text: str, expected: Message) -> None:
    assert read(reply(None, thinking), text) == expected
    assert read(reply(None, thinking, shows_reasoning=False), text) == (expected[0], "", [])


def test_a_call_inside_the_reasoning_is_text() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    expected = "", f"so {call}", [("f", "{}")]
    assert read(reply("hermes", ThinkingAt.MAYBE), f"<think>so {call}</think>\n\n{call}") == expected


def test_a_prompt_shows_whether_the_output_begins_inside_the_reasoning() -> None:
    assert thinking_at("<|im_start|>assistant\n<think>\n") is ThinkingAt.INSIDE
    assert thinking_at("<|im_start|>assistant\n<think>\n\n</think>\n\n") is ThinkingAt.BEHIND
    assert thinking_at("what is <think>?<|im_end|>\n<|im_start|>assistant\n") is ThinkingAt.MAYBE
    assert thinking_at("<｜Assistant｜>", always=True) is ThinkingAt.INSIDE
    assert thinking_at("<｜Assistant｜></think>", always=True) is ThinkingAt.BEHIND
    assert thinking_in("<think>well") is ThinkingAt.INSIDE
    assert thinking_in("<think>well</think>So") is thinking_in("So") is ThinkingAt.BEHIND
