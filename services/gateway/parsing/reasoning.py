"""Splits the reasoning of models that mark it with `<think>…</think>` from their answer."""

from __future__ import annotations

from enum import Enum, auto

from services.gateway.parsing.delta import MessageDelta, earliest, settled

THINK, THINK_END = "<think>", "</think>"


class ThinkingAt(Enum):
    """Where an output begins."""

    MAYBE = auto()  # in the answer, unless it begins with <think>
    INSIDE = auto()  # in the reasoning: the prompt, or the model's habit, has opened it
    BEHIND = auto()  # in the answer: the prompt has closed the reasoning, as with `enable_thinking: false`


def thinking_at(prompt_end: str, *, always: bool = False) -> ThinkingAt:
    """Where the output of a prompt begins. `prompt_end`: the last characters of the prompt. `always`: the model reasons
    without an opening tag."""
    end = prompt_end.rstrip()
    if end.endswith(THINK):
        return ThinkingAt.INSIDE
    if end.endswith(THINK_END):
        return ThinkingAt.BEHIND
    return ThinkingAt.INSIDE if always else ThinkingAt.MAYBE


def thinking_in(message: str) -> ThinkingAt:
    """Where an output begins that continues this message."""
    return ThinkingAt.INSIDE if message.rfind(THINK) > message.rfind(THINK_END) else ThinkingAt.BEHIND


class _Phase(Enum):
    START = auto()  # an opening tag may come
    THINKING = auto()
    GAP = auto()  # white space between reasoning and answer
    ANSWER = auto()


class ReasoningParser:
    """Takes the reasoning out of a text. White space beside the tags is dropped."""

    def __init__(self, begins: ThinkingAt) -> None:
        self._phase = _Phase.ANSWER if begins is ThinkingAt.BEHIND else _Phase.START
        self._unless_opened = _Phase.THINKING if begins is ThinkingAt.INSIDE else _Phase.ANSWER
        self._held = ""
        self._is_empty = True  # no reasoning was shown

    @property
    def is_over(self) -> bool:
        """The reasoning is over: all later text belongs to the answer."""
        return self._phase is _Phase.ANSWER

    def push(self, text: str, out: MessageDelta) -> str:
        """Read on: add the reasoning to `out`, and return the text of the answer."""
        if self._phase is _Phase.ANSWER:
            return text
        text, self._held = self._held + text, ""
        if self._phase is _Phase.START:
            bare = text.lstrip()
            if bare != THINK and THINK.startswith(bare):  # also "": only white space so far
                self._held = text
                return ""
            if bare.startswith(THINK):
                text, self._phase = bare[len(THINK) :], _Phase.THINKING
            else:
                self._phase = self._unless_opened
        if self._phase is _Phase.THINKING:
            text = self._thinking(text, out)
        if self._phase is _Phase.GAP:
            text = text.lstrip()
            if text:
                self._phase = _Phase.ANSWER
        return text

    def finish(self, out: MessageDelta) -> str:
        """The text is over: add the rest of the reasoning, or return the rest of the answer."""
        held, self._held = self._held, ""
        if self._phase is _Phase.START:
            self._phase = self._unless_opened
        if self._phase is _Phase.THINKING:
            self._show(held, out)
            return ""
        return held

    def _thinking(self, text: str, out: MessageDelta) -> str:
        at, _ = earliest(text, (THINK_END,))
        if at >= 0:
            self._show(text[:at].rstrip(), out)
            self._phase = _Phase.GAP
            return text[at + len(THINK_END) :]
        cut = settled(text, (THINK_END,))
        self._show(text[:cut], out)
        self._held = text[cut:]
        return ""

    def _show(self, text: str, out: MessageDelta) -> None:
        if self._is_empty:
            text = text.lstrip()
        self._is_empty = self._is_empty and not text
        out.reasoning += text


class ReasoningCounter:
    """Counts the tokens up to the last one that added to the reasoning: those of the opening tag count, those of the
    closing one do not."""

    def __init__(self, begins: ThinkingAt) -> None:
        self._parser = ReasoningParser(begins)
        self.num_tokens = 0

    @property
    def is_over(self) -> bool:
        """No later token counts."""
        return self._parser.is_over

    def push(self, text: str, num_tokens: int) -> None:
        """Read on. `num_tokens`: of the output so far."""
        out = MessageDelta()
        self._parser.push(text, out)
        self._count(out, num_tokens)

    def push_last(self, text: str, num_tokens: int) -> None:
        """Read the rest of the text, and count reasoning that the parser still keeps."""
        out = MessageDelta()
        self._parser.push(text, out)
        self._parser.finish(out)
        self._count(out, num_tokens)

    def _count(self, out: MessageDelta, num_tokens: int) -> None:
        if out.reasoning:
            self.num_tokens = num_tokens
