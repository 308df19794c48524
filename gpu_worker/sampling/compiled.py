"""Grammars that are compiled beside the steps, in a thread of their own."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from llguidance import LLMatcher, LLTokenizer

from services.runtime.grammars import LIMITS, one_line

NO_TOKENIZER = "grammar: this worker's model has no tokenizer that could hold the output to it"
_NICE = 19  # the thread that runs the model is more urgent


@dataclass(frozen=True, slots=True)
class Compiled:
    matcher: LLMatcher  # one that has read nothing, to be copied
    cpu_s: float  # that it took


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> Compiled:
    """With what the lexer needs for the first token, which copies share: it can take longer than all later tokens. The
    matcher says so itself if it has failed."""
    began_s = time.thread_time()
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return Compiled(matcher, time.thread_time() - began_s)


@dataclass(slots=True)
class PreparedGrammars:
    """Those of one link. `prepare` may run in any thread; the rest belongs to the model's thread."""

    _by_text: dict[str, tuple[int, Compiled]] = field(default_factory=dict)

    def prepare(self, tokenizer: LLTokenizer | None, number: int, grammar: str) -> str:
        """Returns why the grammar is refused; empty if it is prepared."""
        if tokenizer is None:
            return NO_TOKENIZER
        compiled = compile_grammar(tokenizer, grammar)
        if compiled.matcher.is_error():
            return f"grammar: {one_line(compiled.matcher.get_error())}"
        self._by_text[grammar] = number, compiled
        return ""

    def get(self, grammar: str) -> Compiled | None:
        """None: the scheduler has not asked for it."""
        found = self._by_text.get(grammar)
        return None if found is None else found[1]

    def replace(self, grammar: str, compiled: Compiled) -> None:
        """With one that is compiled anew, if the grammar has not been forgotten."""
        if (found := self._by_text.get(grammar)) is not None:
            self._by_text[grammar] = found[0], compiled

    def forget(self, number: int) -> None:
        """It may have been prepared anew by another number."""
        for grammar, (own, _) in list(self._by_text.items()):
            if own == number:
                del self._by_text[grammar]


class Compiler:
    """One thread, less urgent than the others of the process. What is submitted is done in order."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, "paceline-grammars", _lower_priority)

    def submit(self, work: Callable[[], str], on_done: Callable[[str], None]) -> None:
        """`on_done` gets the work's result, in the thread; what the work raises, as text."""

        def run() -> None:
            try:
                result = work()
            except Exception as error:
                result = f"grammar: {one_line(str(error))}"
            on_done(result)

        self._threads.submit(run)

    def close(self) -> None:
        """What has not begun never will."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _lower_priority() -> None:
    with suppress(OSError):  # Linux: of a thread; elsewhere there is no such thing
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
