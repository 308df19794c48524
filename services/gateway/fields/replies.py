"""How a chat's output is read, and the form that it must have, from the request's tools and the model's formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from services.gateway.errors import invalid
from services.gateway.fields.tools import NamedChoice, Tool, chosen
from services.gateway.grammars.structure import Structure
from services.gateway.parsing.formats import REASONING, ModelFormats
from services.gateway.parsing.grammar import CallGrammars, behind_reasoning
from services.gateway.parsing.reasoning import thinking_at, thinking_in
from services.gateway.parsing.reply import ReplyFormat

# If a prompt ends with the opening or closing tag of the reasoning, its last NUM_PROMPT_END tokens contain the tag.
# A tag may take several tokens, and white space may follow.
NUM_PROMPT_END = 16


class ToolUse(NamedTuple):
    """A request's tools, and which calls the answer must have. `parallel`: more than one call is possible."""

    tools: Sequence[Tool] = ()
    choice: str | NamedChoice | None = None
    parallel: bool = True

    @property
    def is_forced(self) -> bool:
        """The answer must have a call."""
        return self.choice == "required" or isinstance(self.choice, NamedChoice)


def reply_format(
    formats: ModelFormats, use: ToolUse, prompt_end: str, continued: str | None = None, *, shows_reasoning: bool = True
) -> ReplyFormat | None:
    """How to read the output; None if all of it is content. `prompt_end`: the text of the prompt's last tokens.
    `continued`: the text of a last message that the output continues.

    Raises ApiError 400 if the answer may call tools, none is forced, and the model's format of calls is unknown.
    """
    callable_tools = chosen(use.tools, use.choice)
    thinking = None
    if formats.reasoning is not None:
        always = REASONING[formats.reasoning]
        thinking = thinking_at(prompt_end, always=always) if continued is None else thinking_in(continued)
    if not callable_tools:
        return None if thinking is None else ReplyFormat(thinking=thinking, shows_reasoning=shows_reasoning)
    if formats.calls is None and not use.is_forced:
        raise invalid(
            "tools",
            "tools: this model's chat template shows no format of tool calls that is known here; start the gateway "
            "with --tool-call-parser, or force a call with tool_choice",
            code="unsupported_value",
        )
    return ReplyFormat(
        calls=formats.forced,
        known=frozenset(tool.function.name for tool in callable_tools),
        max_calls=None if use.parallel else 1,
        is_named=isinstance(use.choice, NamedChoice),
        thinking=thinking,
        shows_reasoning=shows_reasoning,
    )


def reply_structure(
    formats: ModelFormats, use: ToolUse, reply: ReplyFormat | None, answer: Structure | None
) -> Structure | None:
    """The form of the output after the reasoning: calls, if they are forced or a tool is strict, or the `answer` that
    the request asks for. Raises ApiError 400 for forms that exclude each other."""
    if reply is None:
        return answer
    token_ids = formats.token_ids
    prefix = behind_reasoning(reply.thinking, token_ids)
    if reply.calls is None:
        return None if answer is None else answer._replace(prefix=prefix)
    grammars = CallGrammars(reply.calls, token_ids)
    tools = [tool.for_grammar() for tool in chosen(use.tools, use.choice)]
    if use.is_forced:
        if answer is not None:
            name = answer.field.partition(".")[0]
            raise invalid("tool_choice", f"tool_choice forces a tool call, and {name} forces an answer: use only one")
        return Structure("tools", "grammar", grammars.forced(tools, parallel=use.parallel), prefix=prefix)
    if answer is not None:
        if answer.kind != "json_schema":
            raise invalid(answer.field, f"{answer.field}: with tools only a JSON Schema is possible")
        either = grammars.or_answer(tools, answer.text, parallel=use.parallel, any_whitespace=answer.any_whitespace)
        return Structure("tools", "grammar", either, prefix=prefix)
    if any(tool.is_strict for tool in tools):
        return Structure("tools", "grammar", grammars.allowed(tools, parallel=use.parallel), prefix=prefix)
    return None
