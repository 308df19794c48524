"""Writes answers to the terminal, or to a file or a pipe without anything else."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from rich.console import Console

from services.cli.arguments import readable
from services.cli.chat.answers import ChatServer, Ending
from services.cli.chat.history import ChatHistory
from services.cli.waiting import waiting


class Display:
    """Shows one answer after the other. The model's text is shown without control characters on a terminal, and is
    unchanged elsewhere."""

    def __init__(self, console: Console, is_interactive: bool) -> None:
        self._console = console
        self._is_interactive = is_interactive
        self._column_is_first = True

    def show(self, server: ChatServer, model: str, conversation: ChatHistory) -> Ending:
        """Stream the answer to the open question, and keep it in the conversation. If Ctrl-C or a failure stops the
        answer, the part that has arrived is kept. Raises RequestFailed and KeyboardInterrupt."""
        ending, began_s = Ending(), time.monotonic()
        pieces = server.answer(model, conversation.messages(), ending)
        text, times_s = "", []
        try:
            with waiting(self._console, "waiting for the first token"):
                piece = next(pieces, None)
            while piece is not None:
                times_s.append(time.monotonic() - began_s)
                self._reason(piece.reasoning)
                if piece.text:
                    self._write(piece.text, begins=not text)
                    text += piece.text
                piece = next(pieces, None)
        finally:
            pieces.close()
            self._end_line()
            conversation.answer(text)
        if self._is_interactive:
            self.note(measured(ending, times_s))
        return ending

    def note(self, line: str) -> None:
        """A dim line about the answer."""
        self._console.print(line, style="dim", soft_wrap=True)

    def problem(self, line: str) -> None:
        """A line about what went wrong, while the chat goes on."""
        self._console.print(line, style="yellow", soft_wrap=True)

    def _reason(self, text: str) -> None:
        """Reasoning is dim on a terminal. It is no part of the answer, so a file gets none."""
        if text and self._console.is_terminal:
            self._console.print(readable(text), style="dim", end="", soft_wrap=True)
            self._column_is_first = text.endswith("\n")

    def _write(self, text: str, begins: bool) -> None:
        if begins:
            self._end_line()  # of the reasoning
        sys.stdout.write(readable(text) if self._console.is_terminal else text)
        sys.stdout.flush()
        self._column_is_first = text.endswith("\n")

    def _end_line(self) -> None:
        if not self._column_is_first:
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._column_is_first = True


def measured(ending: Ending, times_s: list[float]) -> str:
    """Tokens per second, TTFT and cache hits, in one line. `times_s`: when each piece came, after the question."""
    return ", ".join(_measures(ending, times_s)) or "an empty answer"


def _measures(ending: Ending, times_s: list[float]) -> Iterator[str]:
    if ending.tokens is not None:
        yield f"{ending.tokens} tokens"
    if times_s:
        if ending.tokens is not None and ending.tokens > 1 and (decode_s := times_s[-1] - times_s[0]) > 0:
            yield f"{(ending.tokens - 1) / decode_s:.1f} tokens/s"
        yield f"TTFT {times_s[0]:.2f} s"
    if ending.cached_tokens is not None and ending.prompt_tokens:
        yield f"{ending.cached_tokens} of {ending.prompt_tokens} prompt tokens cached"
    if ending.reason == "length":
        yield "cut: the limit of tokens is reached (the context is full, or --max-tokens)"
