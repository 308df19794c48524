"""Compiles grammars in their own thread, in parallel to the steps."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from llguidance import LLMatcher, LLTokenizer

from services.runtime.model.grammars import LIMITS, one_line

NO_TOKENIZER = "grammar: this worker does not support structured outputs, because its model has no usable tokenizer"
_NICE = 19  # the model's thread is more urgent


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled grammar."""

    matcher: LLMatcher  # at the start of a text; copy it before use
    cpu_s: float  # CPU time of the compilation


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> Compiled:
    """Compile a grammar, including the lexer states for the first token. Copies of the matcher share these states.
    Computing them can take longer than all later tokens. The matcher itself reports a failure."""
    began_s = time.thread_time()
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return Compiled(matcher, time.thread_time() - began_s)


@dataclass(slots=True)
class PreparedGrammars:
    """The grammars of one link. `prepare` may run in any thread; use the other methods in the model's thread."""

    _by_text: dict[str, tuple[int, Compiled]] = field(default_factory=dict)

    def prepare(self, tokenizer: LLTokenizer | None, number: int, grammar: str) -> str:
        """Compile a grammar. Returns why it is refused; empty if it is not."""
        if tokenizer is None:
            return NO_TOKENIZER
        compiled = compile_grammar(tokenizer, grammar)
        if compiled.matcher.is_error():
            return f"grammar: {one_line(compiled.matcher.get_error())}"
        self._by_text[grammar] = number, compiled
        return ""

    def get(self, grammar: str) -> Compiled | None:
        """The compiled grammar. None: it was not prepared, its compilation failed, or it was forgotten."""
        found = self._by_text.get(grammar)
        return None if found is None else found[1]

    def replace(self, grammar: str, compiled: Compiled) -> None:
        """Replace a grammar with a new compilation, unless it was forgotten."""
        if (found := self._by_text.get(grammar)) is not None:
            self._by_text[grammar] = found[0], compiled

    def forget(self, number: int) -> None:
        """Forget a grammar, unless another number has prepared it since."""
        for grammar, (own, _) in list(self._by_text.items()):
            if own == number:
                del self._by_text[grammar]


class Compiler:
    """One thread, less urgent than the other threads of the process. It runs submitted work in order."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, "paceline-grammars", _lower_priority)

    def submit(self, work: Callable[[], str], on_done: Callable[[str], None]) -> None:
        """Run `work` in the thread. `on_done` gets the result, in the thread; for an exception, its text."""

        def run() -> None:
            try:
                result = work()
            except Exception as error:
                result = f"grammar: {one_line(str(error))}"
            on_done(result)

        self._threads.submit(run)

    def close(self) -> None:
        """Drop the work that has not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _lower_priority() -> None:
    with suppress(OSError):  # on Linux this sets the thread's priority; other systems have none per thread
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
