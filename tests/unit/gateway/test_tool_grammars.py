"""Grammars of tool calls: llguidance allows only the calls that the request allows, and the parsers read these calls.

Without flags, the gateway finds the formats of a model's calls and reasoning in its chat template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from demo import CHECKPOINT
from services.gateway.errors import ApiError
from services.gateway.fields.replies import ToolUse, reply_format, reply_structure
from services.gateway.fields.tools import NamedChoice, Tool
from services.gateway.grammars.structure import Structure, from_schema
from services.gateway.grammars.trial import grammar_of
from services.gateway.parsing.formats import CALL_STYLES, HERMES, ModelFormats, find_reasoning, model_formats
from services.gateway.parsing.grammar import CallGrammars, GrammarTool, behind_reasoning
from services.gateway.parsing.reasoning import ThinkingAt
from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.chat_values import ChatExtras
from services.gateway.text.detokenizer import TableDetokenizer
from services.gateway.text.tokenizer import TextTokenizer

MARKERS = ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]
CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/name"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"name": {"type": "string", "maxLength": 20}},
}
TOOLS = [GrammarTool("weather", CITY, True), GrammarTool("now", None, True), GrammarTool("loose", CITY, False)]
GOOD, BAD = '{"city": "Par\\"is"}', '{"town": 1}'


class Vocabulary:
    """The demo's tokenizer, with `markers` added as tokens."""

    def __init__(self, folder: Path, markers: list[str]) -> None:
        self.tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
        for marker in markers:
            self.tokenizer.add_tokens([AddedToken(marker, special=marker[0] == "[" or "|" in marker)])
        self.ids: dict[str, int] = {marker: self.tokenizer.token_to_id(marker) or 0 for marker in markers}
        self.path = folder / "tokenizer.json"
        self.tokenizer.save(str(self.path))
        size = self.tokenizer.get_vocab_size()
        self._of_grammars = LLTokenizer(str(self.path), n_vocab=size, eos_token=[1, 5])

    def fits(self, grammar: str, text: str, prefix: str = "") -> bool:
        """Whether the grammar allows this text as the whole output."""
        matcher = LLMatcher(self._of_grammars, grammar_of("grammar", grammar, prefix=prefix), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return all(map(matcher.consume_token, ids)) and matcher.is_accepting()


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return Vocabulary(tmp_path_factory.mktemp("marked"), MARKERS)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return Vocabulary(tmp_path_factory.mktemp("plain"), [])


def written(style: str, calls: list[tuple[str, str]], *, by_name: bool) -> str:
    match style:
        case "hermes":
            return "\n".join(
                f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>' for name, text in calls
            )
        case "llama3_json":
            return "; ".join(f'{{"name": "{name}", "parameters": {text}}}' for name, text in calls)
    if by_name:
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{text}" for name, text in calls)
    return "[TOOL_CALLS][" + ", ".join(f'{{"name": "{name}", "arguments": {text}}}' for name, text in calls) + "]"


@pytest.mark.parametrize("style", sorted(CALL_STYLES))
@pytest.mark.parametrize("with_tokens", [True, False])
def test_forced_calls_follow_their_schemas(
    marked: Vocabulary, plain: Vocabulary, style: str, with_tokens: bool
) -> None:
    vocabulary = marked if with_tokens else plain
    ids: Mapping[str, int] = vocabulary.ids
    grammars = CallGrammars(CALL_STYLES[style], ids)

    def text(*calls: tuple[str, str]) -> str:
        return written(style, list(calls), by_name="[ARGS]" in ids)

    def fits(*calls: tuple[str, str], parallel: bool = True) -> bool:
        return vocabulary.fits(grammars.forced(TOOLS, parallel=parallel), text(*calls))

    assert fits(("weather", GOOD))
    assert fits(("now", "{}"), ("weather", GOOD))
    assert not fits(("now", "{}"), ("weather", GOOD), parallel=False)
    assert not fits(("weather", BAD))
    assert not fits(("loose", BAD))  # a forced call follows its schema even without `strict`
    assert not fits(("now", '{"a": 1}'))
    assert not fits(("other", "{}"))
    assert not vocabulary.fits(grammars.forced(TOOLS, parallel=True), "It is sunny.")
    reply = reply_format(ModelFormats(CALL_STYLES[style]), ToolUse(TYPED, "required"), "")
    assert reply is not None
    delta = reply.parser().push_last(text(("now", "{}"), ("weather", GOOD)))
    assert [(call.name, call.arguments) for call in delta.calls] == [("now", "{}"), ("weather", GOOD)]
    assert not delta.content


@pytest.mark.parametrize("style", sorted(CALL_STYLES))
@pytest.mark.parametrize("with_tokens", [True, False])
def test_strict_schemas_bind_calls_and_leave_other_text_free(
    marked: Vocabulary, plain: Vocabulary, style: str, with_tokens: bool
) -> None:
    vocabulary = marked if with_tokens else plain
    grammars = CallGrammars(CALL_STYLES[style], vocabulary.ids)
    grammar = grammars.allowed(TOOLS, parallel=True)

    def text(*calls: tuple[str, str]) -> str:
        return written(style, list(calls), by_name="[ARGS]" in vocabulary.ids)

    assert vocabulary.fits(grammar, "It is sunny\n in {Paris}.")
    assert vocabulary.fits(grammar, "")
    assert vocabulary.fits(grammar, text(("weather", GOOD)))
    assert vocabulary.fits(grammar, text(("weather", GOOD), ("now", "{}")))
    assert vocabulary.fits(grammar, text(("loose", BAD)))  # not strict
    assert not vocabulary.fits(grammar, text(("weather", BAD)))
    assert not vocabulary.fits(grammar, text(("other", "{}")))
    if style != "llama3_json":
        assert vocabulary.fits(grammar, "Wait. " + text(("weather", GOOD)))
    one = grammars.allowed(TOOLS, parallel=False)
    assert not vocabulary.fits(one, text(("weather", GOOD), ("now", "{}")))


@pytest.mark.parametrize("with_tokens", [True, False])
def test_with_a_schema_the_output_is_a_matching_answer_or_calls(
    marked: Vocabulary, plain: Vocabulary, with_tokens: bool
) -> None:
    vocabulary = marked if with_tokens else plain
    grammars = CallGrammars(HERMES, vocabulary.ids)
    schema = json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}, "additionalProperties": False})
    grammar = grammars.or_answer(TOOLS, schema, parallel=True)
    assert vocabulary.fits(grammar, '{"n": 5}')
    assert vocabulary.fits(grammar, written("hermes", [("now", "{}")], by_name=False))
    assert not vocabulary.fits(grammar, "five")
    compact = grammars.or_answer(TOOLS, schema, parallel=True, any_whitespace=False)
    assert not vocabulary.fits(compact, '{"n": 5}')


@pytest.mark.parametrize("with_tokens", [True, False])
def test_structured_output_comes_after_the_reasoning(marked: Vocabulary, plain: Vocabulary, with_tokens: bool) -> None:
    vocabulary = marked if with_tokens else plain
    answer = 'start: "yes" | "no"'

    def fits(thinking: ThinkingAt, text: str) -> bool:
        return vocabulary.fits(answer, text, behind_reasoning(thinking, vocabulary.ids))

    for thinking in (ThinkingAt.MAYBE, ThinkingAt.INSIDE):
        assert fits(thinking, "<think>\nhm, maybe\n</think>\n\nyes")
        assert not fits(thinking, "<think>\nhm, maybe\n</think>\n\nperhaps")
    assert fits(ThinkingAt.MAYBE, "yes")
    assert not fits(ThinkingAt.MAYBE, "hm</think>yes")
    assert fits(ThinkingAt.INSIDE, "hm</think>yes")
    assert fits(ThinkingAt.BEHIND, "yes")
    for kind, text in (("json_schema", '{"type": "integer"}'), ("regex", "[0-9]+"), ("choice", '["17"]')):
        prefix = behind_reasoning(ThinkingAt.INSIDE, vocabulary.ids)
        matcher = LLMatcher(vocabulary._of_grammars, grammar_of(kind, text, prefix=prefix), log_level=0)  # type: ignore[arg-type]
        ids = vocabulary.tokenizer.encode("so</think>17", add_special_tokens=False).ids
        assert all(map(matcher.consume_token, ids)), matcher.get_error()
        assert matcher.is_accepting()


TYPED = [
    Tool.model_validate({"type": "function", "function": {"name": name, "parameters": CITY, "strict": strict}})
    for name, strict in (("weather", True), ("now", False))
]
NAMED = NamedChoice.model_validate({"type": "function", "function": {"name": "now"}})


def planned(use: ToolUse, answer: Structure | None = None, formats: ModelFormats | None = None) -> Structure | None:
    formats = formats or ModelFormats(HERMES)
    return reply_structure(formats, use, reply_format(formats, use, ""), answer)


def test_the_grammar_allows_the_calls_that_the_request_allows() -> None:
    assert planned(ToolUse()) is None
    assert planned(ToolUse(TYPED, "none")) is None
    assert planned(ToolUse(TYPED[1:], "auto")) is None
    strict, required, named = (planned(ToolUse(TYPED, choice)) for choice in (None, "required", NAMED))
    assert strict is not None
    assert "TEXT" in strict.text
    assert required is not None
    assert "weather" in required.text
    assert named is not None
    assert "weather" not in named.text
    assert required.field == "tools"
    reply = reply_format(ModelFormats(HERMES), ToolUse(TYPED, NAMED, False), "")
    assert reply is not None
    assert (reply.is_named, reply.max_calls, reply.known) == (True, 1, frozenset({"now"}))


def test_the_error_names_the_field_when_tools_cannot_be_served() -> None:
    schema = from_schema("response_format.json_schema.schema", {"type": "object"})
    with pytest.raises(ApiError, match="response_format") as refused:
        planned(ToolUse(TYPED, "required"), schema)
    assert refused.value.param == "tool_choice"
    with pytest.raises(ApiError) as refused:
        planned(ToolUse(TYPED), Structure("structured_outputs.regex", "regex", "a"))
    assert refused.value.param == "structured_outputs.regex"
    with pytest.raises(ApiError, match="--tool-call-parser") as refused:
        planned(ToolUse(TYPED), formats=ModelFormats())
    assert (refused.value.param, refused.value.code) == ("tools", "unsupported_value")
    either = planned(ToolUse(TYPED), schema)
    assert either is not None
    assert "answer" in either.text


def test_formats_come_from_the_chat_template_unless_they_are_named() -> None:
    def style(template: str | None) -> str | None:
        found = model_formats(template, {}).calls
        return found.name if found else None

    assert style("{% if tools %}<tool_call>") == "hermes"
    assert style("{% if tools %}<tool_call>\n<function=") is None  # Qwen3-Coder
    assert style("{{ tools }}[AVAILABLE_TOOLS] [TOOL_CALLS]") == "mistral"
    assert style("<|start_header_id|>{{ tools }} '\"parameters\": '") == "llama3_json"
    assert style("{{ messages }}") is style(None) is None
    assert (find_reasoning("</think>"), find_reasoning("<｜Assistant｜></think>")) == ("qwen3", "deepseek_r1")
    assert find_reasoning("x") is find_reasoning(None) is None
    given = model_formats("{% if tools %}<tool_call></think>", {"<think>": 7, "[ARGS]": 9, "x": 1}, "none", "none")
    assert given == ModelFormats()
    given = model_formats(None, {"</think>": 7, "[ARGS]": 9, "x": 1}, "mistral", "qwen3")
    assert (given.calls, given.reasoning) == (CALL_STYLES["mistral"], "qwen3")
    assert given.token_ids == {"</think>": 7, "[ARGS]": 9}


def test_special_tokens_are_shown_only_if_they_are_markers_and_markers_are_asked_for(marked: Vocabulary) -> None:
    tokenizer = TextTokenizer(marked.tokenizer, ChatTemplate("{{ tools }}"))
    tokenizer.show_markers(["[TOOL_CALLS]", "<tool_call>", "unknown"])
    ids = marked.tokenizer.encode("<|end|>[TOOL_CALLS][ARGS]<tool_call>", add_special_tokens=False).ids
    assert tokenizer.detokenizer().push(ids) == "<tool_call>"
    shown = tokenizer.detokenizer(with_markers=True)
    assert isinstance(shown, TableDetokenizer)
    assert shown.push(ids) == "[TOOL_CALLS]<tool_call>"
    tokenizer._full_table = tokenizer._marked_table = tokenizer._table = None  # as for an unknown decoder
    assert tokenizer.detokenizer(with_markers=True).push(ids).replace(" ", "") == "[TOOL_CALLS]<tool_call>"
    assert tokenizer.detokenizer().push(ids).strip() == "<tool_call>"


def test_chats_with_tools_may_have_their_own_template(tmp_path: Path) -> None:
    def rendered(**extras: Any) -> str:
        template = ChatTemplate.from_folder(tmp_path)
        assert template is not None
        return template.render([], add_generation_prompt=True, variables={}, extras=ChatExtras(**extras))

    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert (rendered(), rendered(tools=[{}]), rendered(tools=[])) == ("plain", "tools", "plain")
    (tmp_path / "chat_template.jinja").write_text("file")
    assert rendered(tools=[{}]) == "file"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("other file")
    assert (rendered(), rendered(tools=[{}])) == ("file", "other file")
