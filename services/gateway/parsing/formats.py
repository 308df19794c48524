"""The formats of tool calls and of reasoning, by vLLM's names, and how a model's files tell which ones it writes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from services.gateway.parsing.reasoning import THINK, THINK_END
from services.gateway.parsing.tool_parsers import (
    ARGS,
    CALL_ID,
    PYTHON_TAG,
    TOOL_CALL,
    TOOL_CALL_END,
    TOOL_CALLS,
    HermesParser,
    LlamaParser,
    MistralParser,
    ToolParser,
)

CallStyleName = Literal["hermes", "llama3_json", "mistral"]
ReasoningName = Literal["qwen3", "deepseek_r1"]


@dataclass(frozen=True, slots=True)
class CallStyle:
    """A format of tool calls. `markers`: tokens that the parser must see, even if they are special tokens of the
    tokenizer. `id_chars`: letters and digits of a call's id behind `id_prefix`."""

    name: CallStyleName
    parser_type: type[ToolParser]
    markers: tuple[str, ...]
    id_prefix: str = "call_"
    id_chars: int = 24

    def parser(self, known: Collection[str], max_calls: int | None) -> ToolParser:
        """A new parser for a request with these tools."""
        return self.parser_type(known, max_calls)


HERMES = CallStyle("hermes", HermesParser, (TOOL_CALL, TOOL_CALL_END))
LLAMA3_JSON = CallStyle("llama3_json", LlamaParser, (PYTHON_TAG,))
# Mistral's templates refuse ids that are not 9 letters and digits.
MISTRAL = CallStyle("mistral", MistralParser, (TOOL_CALLS, CALL_ID, ARGS), "", 9)
CALL_STYLES: dict[str, CallStyle] = {style.name: style for style in (HERMES, LLAMA3_JSON, MISTRAL)}
# Whether a model of the format reasons without an opening tag in its output.
REASONING: dict[str, bool] = {"qwen3": False, "deepseek_r1": True}
_THINKING_MARKERS = (THINK, THINK_END)


@dataclass(frozen=True, slots=True)
class ModelFormats:
    """What the served model writes; None where that is unknown. `token_ids`: ids of the markers that are single
    tokens."""

    calls: CallStyle | None = None
    reasoning: ReasoningName | None = None
    token_ids: Mapping[str, int] = field(default_factory=dict)

    @property
    def forced(self) -> CallStyle:
        """The format of calls that a grammar forces: the model's own format, or Hermes if that is unknown."""
        return self.calls or HERMES

    @property
    def markers(self) -> tuple[str, ...]:
        """The tokens that the parsers must see."""
        return self.forced.markers + (_THINKING_MARKERS if self.reasoning else ())


def model_formats(
    template: str | None,
    added_tokens: Mapping[str, int],
    calls: str = "auto",
    reasoning: Literal["auto", "none"] | ReasoningName = "auto",
) -> ModelFormats:
    """What a model writes. `calls` and `reasoning`: the name of a format; or `auto`: what the template shows; or
    `none`: no format."""
    style = find_call_style(template) if calls == "auto" else CALL_STYLES.get(calls)
    found = find_reasoning(template) if reasoning == "auto" else None if reasoning == "none" else reasoning
    formats = ModelFormats(style, found)
    token_ids = {marker: added_tokens[marker] for marker in formats.markers if marker in added_tokens}
    return replace(formats, token_ids=token_ids)


def find_call_style(template: str | None) -> CallStyle | None:
    """The format of the tool calls in a chat template; None if it shows none that is known here."""
    if not template or "tools" not in template:
        return None
    if TOOL_CALLS in template:
        return MISTRAL
    if TOOL_CALL in template and "<function=" not in template:  # "<function=" is Qwen3-Coder's XML
        return HERMES
    if "<|start_header_id|>" in template and '"parameters"' in template:
        return LLAMA3_JSON
    return None


def find_reasoning(template: str | None) -> ReasoningName | None:
    """The format of the reasoning that a chat template knows of, or None."""
    if not template or THINK_END not in template:
        return None
    return "deepseek_r1" if "<｜Assistant｜>" in template else "qwen3"
