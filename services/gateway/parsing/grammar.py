"""Grammars in llguidance's Lark notation that restrict an output to tool calls with arguments that follow a schema.

The output keeps the format that the model was trained on, so that the parser of this format can read it. A marker that
is a token of the vocabulary is named by its id, because llguidance can match special tokens only by their ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from services.gateway.grammars.trial import WHITESPACE
from services.gateway.parsing.formats import CallStyle
from services.gateway.parsing.reasoning import THINK, THINK_END, ThinkingAt
from services.gateway.parsing.tool_parsers import ARGS, TOOL_CALL, TOOL_CALL_END, TOOL_CALLS

_TEXT = "TEXT: /(.|\\n)*/\n"
_ANY_OBJECT = {"type": "object"}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class GrammarTool(NamedTuple):
    """A function that an output may call. `schema` None: it has no parameters. `is_strict` False: any object will do,
    unless the call is forced."""

    name: str
    schema: Mapping[str, Any] | None
    is_strict: bool


class CallGrammars:
    """Writes grammars for one format. `token_ids`: ids of the markers that are single tokens."""

    def __init__(self, style: CallStyle, token_ids: Mapping[str, int]) -> None:
        self._style = style
        self._token_ids = token_ids

    def forced(self, tools: Sequence[GrammarTool], *, parallel: bool) -> str:
        """One call or, if `parallel`, at least one."""
        return f"start: calls\n{self._calls(tools, parallel)}{_schemas(tools, forced=True)}"

    def allowed(self, tools: Sequence[GrammarTool], *, parallel: bool) -> str:
        """Text, calls, or both (with Llama's format, one of the two). The arguments of strict tools follow their
        schemas."""
        schemas = _schemas(tools, forced=False)
        if self._style.name == "llama3_json":  # a call is the whole output
            calls = self._calls(tools, parallel)
            return f"start: calls | TEXT?\nTEXT: /[ \\t\\r\\n]*[^{{ \\t\\r\\n](.|\\n)*/\n{calls}{schemas}"
        in_list = self._writes_list
        is_token = self._opening in self._token_ids
        calls = self._calls(tools, parallel and in_list, is_open=not is_token)
        before, found = "TEXT", ""
        if not is_token:  # a marker of several tokens: the text must stop at it, and the call goes on behind it
            before, found = "found", f"found[lazy]: TEXT {json.dumps(self._opening)}\n"
        start = f"({before} calls)* TEXT" if parallel and not in_list else f"{before} calls | TEXT"
        return f"start: {start}\n{found}{_TEXT}{calls}{schemas}"

    def or_answer(
        self, tools: Sequence[GrammarTool], schema: str, *, parallel: bool, any_whitespace: bool = True
    ) -> str:
        """Calls, or else JSON of a schema."""
        answer = f"answer: %json {json.dumps(_with_whitespace(json.loads(schema), any_whitespace))}\n"
        rest = self._calls(tools, parallel) + _schemas(tools, forced=False)
        return f"start: calls | answer\n{answer}{rest}"

    @property
    def _opening(self) -> str:
        return TOOL_CALLS if self._style.name == "mistral" else TOOL_CALL

    @property
    def _writes_list(self) -> bool:
        """One marker stands before a list of calls."""
        return self._style.name == "mistral" and ARGS not in self._token_ids

    def _marker(self, text: str) -> str:
        token_id = self._token_ids.get(text)
        return json.dumps(text) if token_id is None else f"<[{token_id}]>"

    def _calls(self, tools: Sequence[GrammarTool], parallel: bool, *, is_open: bool = False) -> str:
        """The rules `calls` and those below it. `is_open`: the marker before the first call has been read."""
        any_call = " | ".join(f"call_{i}" for i in range(len(tools)))
        opening = "" if is_open else self._marker(self._opening)
        if self._style.name == "hermes":
            more = ' ("\\n" call)*' if parallel else ""
            closing = self._marker(TOOL_CALL_END)
            head = f'calls: call{more}\ncall: {opening} "\\n" ({any_call}) "\\n" {closing}\n'
            return head + self._objects(tools, "arguments")
        if self._style.name == "llama3_json":
            more = ' ("; " call)*' if parallel else ""
            return f"calls: call{more}\ncall: {any_call}\n" + self._objects(tools, "parameters")
        if self._writes_list:
            more = ' (", " call)*' if parallel else ""
            return f'calls: {opening} "[" call{more} "]"\ncall: {any_call}\n' + self._objects(tools, "arguments")
        calls = f"calls: call{'+' if parallel else ''}\ncall: {opening} ({any_call})\n"
        args = self._marker(ARGS)
        return calls + "".join(f"call_{i}: {json.dumps(tool.name)} {args} args_{i}\n" for i, tool in enumerate(tools))

    @staticmethod
    def _objects(tools: Sequence[GrammarTool], arguments: str) -> str:
        def rule(i: int, name: str) -> str:
            head = f'{{"name": {json.dumps(name)}, "{arguments}": '
            return f'call_{i}: {json.dumps(head)} args_{i} "}}"\n'

        return "".join(rule(i, tool.name) for i, tool in enumerate(tools))


def behind_reasoning(thinking: ThinkingAt | None, token_ids: Mapping[str, int]) -> str:
    """The rules before an answer that follows reasoning; "" if no reasoning can come. `@answer` is the answer."""
    if thinking is None or thinking is ThinkingAt.BEHIND:
        return ""

    def marker(text: str) -> str:
        return f"<[{token_ids[text]}]>" if text in token_ids else json.dumps(text)

    if THINK_END in token_ids:
        thoughts, rules = f"TEXT {marker(THINK_END)} GAP", _TEXT
    else:
        thoughts, rules = "thoughts GAP", f"thoughts[lazy]: TEXT {marker(THINK_END)}\n{_TEXT}"
    opened = f"({marker(THINK)} {thoughts})?" if thinking is ThinkingAt.MAYBE else f"{marker(THINK)}? {thoughts}"
    return f"start: {opened} @answer\n{rules}GAP: /[ \\t\\r\\n]{{0,8}}/\n"


def _schemas(tools: Sequence[GrammarTool], *, forced: bool) -> str:
    def schema(tool: GrammarTool) -> Mapping[str, Any]:
        if not (forced or tool.is_strict):
            return _ANY_OBJECT
        return _NO_ARGUMENTS if tool.schema is None else {"type": "object", **tool.schema}

    return "".join(f"args_{i}: %json {json.dumps(_with_whitespace(schema(tool)))}\n" for i, tool in enumerate(tools))


def _with_whitespace(schema: Mapping[str, Any], any_whitespace: bool = True) -> dict[str, Any]:
    options = {"whitespace_pattern": WHITESPACE} if any_whitespace else {"whitespace_flexible": False}
    return {**schema, "x-guidance": options}
