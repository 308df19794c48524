"""How a request's output is read: which parsers, for which tools. A request keeps a `ReplyFormat`, and each reader of
its output makes a `ReplyParser`."""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.parsing.delta import MessageDelta
from services.gateway.parsing.formats import CallStyle
from services.gateway.parsing.reasoning import ReasoningParser, ThinkingAt


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """`calls` None: no tool calls are looked for. `thinking` None: no reasoning. `max_calls`: later calls are dropped;
    None: all count. `is_named`: the client has named the function, and then the answer ends with `stop`, as OpenAI's
    and vLLM's do."""

    calls: CallStyle | None = None
    known: frozenset[str] = frozenset()
    max_calls: int | None = None
    is_named: bool = False
    thinking: ThinkingAt | None = None
    shows_reasoning: bool = True

    def parser(self) -> ReplyParser:
        """A new parser."""
        return ReplyParser(self)


class ReplyParser:
    """The message in a text, piece by piece: first the reasoning, then content and tool calls."""

    def __init__(self, format_: ReplyFormat) -> None:
        self._reasoning = None if format_.thinking is None else ReasoningParser(format_.thinking)
        self._tools = None if format_.calls is None else format_.calls.parser(format_.known, format_.max_calls)
        self._shows_reasoning = format_.shows_reasoning

    @property
    def num_calls(self) -> int:
        """Tool calls so far."""
        return self._tools.num_calls if self._tools is not None else 0

    def push(self, text: str) -> MessageDelta:
        """What this text adds to the message."""
        out = MessageDelta()
        if self._reasoning is not None:
            text = self._reasoning.push(text, out)
        self._answer(text, out)
        return self._shown(out)

    def push_last(self, text: str) -> MessageDelta:
        """What the rest of the text adds to the message."""
        out = MessageDelta()
        if self._reasoning is not None:
            text = self._reasoning.push(text, out) + self._reasoning.finish(out)
        self._answer(text, out)
        if self._tools is not None:
            self._tools.finish(out)
        return self._shown(out)

    def _answer(self, text: str, out: MessageDelta) -> None:
        if self._tools is None:
            out.content += text
        else:
            self._tools.push(text, out)

    def _shown(self, out: MessageDelta) -> MessageDelta:
        if not self._shows_reasoning:
            out.reasoning = ""
        return out
