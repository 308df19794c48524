"""A process that measures the cost of a structured output's grammar, so that the gateway need not compile it.

The process loads the model's tokenizer once and forks for each trial. The fork compiles the grammar and follows it for
a few tokens under limits on CPU time and memory. At a limit only the fork dies. One trial runs at a time; SIGUSR1 ends
it.

    stdin   a message per trial: [kind, text, any_whitespace, prefix] of a structure, as JSON
    stdout  a message per trial: {"grammar": …, "mask_us": …}, {"refused": …}, or {"unfinished": …} if something other
            than its limits has ended it

A message is its length in 4 bytes, little-endian, and then its bytes. The end of stdin ends the process.
"""

from __future__ import annotations

import json
import os
import random
import resource
import select
import signal
import statistics
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Literal

from llguidance import LLMatcher, LLTokenizer, grammar_from

from services.runtime.model.grammars import LIMITS, one_line

# When no core is free, Linux gives a process with nice value 19 a 69th of the time of a normal process. So a trial with
# 0.25 s of CPU time may last 17 s.
WALL_S = 30.0
MASK_S = 0.02  # CPU time to compute the allowed tokens of one position, except the first
MAX_GRAMMAR_CHARS = 2**16  # the scheduler's limit
MAX_MULTIPLE_OF = 10_000  # the automaton has one state per remainder
# Between the parts of a JSON value. It allows deep indentation, and ends a model's loop of whitespace.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
_SPECIAL = frozenset(r"\.^$|?*+()[]{}/-&~<>#")  # the special characters of regular expressions
_DATA = frozenset(("const", "enum", "default", "examples"))  # keywords of JSON Schema with values that are no schemas
_BY_NAME = frozenset(("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"))
UNFINISHED = "the structured output could not be tried: this machine has no core or memory free for that"
_NUM_TOKENS = 24
_NICE = 19  # running requests are more urgent
_HEAD = struct.Struct("<I")


Kind = Literal["json_schema", "regex", "choice", "grammar"]


class Refused(Exception):
    """The grammar has a mistake, or is above a limit. The message names it."""


def grammar_of(kind: Kind, text: str, any_whitespace: bool = True, prefix: str = "") -> str:
    """The value of SamplingParams.grammar for a structure. Raises Refused.

    This does not compile the grammar, and takes milliseconds.
    """
    try:
        match kind:
            case "json_schema":
                _check_multiples(json.loads(text, parse_float=Decimal, parse_int=Decimal))
                whitespace: Any = {"whitespace_flexible": False}
                if any_whitespace:
                    whitespace = {"whitespace_pattern": WHITESPACE}
                grammar = LLMatcher.grammar_from_json_schema(text, overrides=whitespace)
            case "choice":
                # One regular expression: thousands of texts cost little more than a few. If each text were a grammar
                # rule, it would be an item in llguidance's rows, and a row may have 2,000 items.
                grammar = grammar_from("regex", "|".join(map(_escaped, json.loads(text))))
            case _:
                grammar = grammar_from(kind, text)
    except (ValueError, RecursionError) as error:
        raise Refused(one_line(str(error))) from None
    if prefix:
        grammar = _behind(prefix, grammar)
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise Refused(f"has {len(grammar)} characters as a grammar; at most {MAX_GRAMMAR_CHARS} are possible")
    return grammar


def _behind(prefix: str, grammar: str) -> str:
    """The grammar of the whole output: the Lark rules in `prefix`, which refer to `grammar` as `@answer`."""
    is_json = grammar.startswith("{")  # llguidance's own form; Lark begins with a rule
    answer = json.loads(grammar)["grammars"][0] if is_json else {"lark_grammar": grammar}
    return json.dumps({"grammars": [{"name": "start", "lark_grammar": prefix}, {**answer, "name": "answer"}]})


def _escaped(text: str) -> str:
    """A regular expression that matches only the text."""
    return "".join(
        f"\\{char}" if char in _SPECIAL else char if char.isprintable() else f"\\x{{{ord(char):x}}}" for char in text
    )


def _check_multiples(schema: Any) -> None:
    """Raises Refused for a `multipleOf` with too many remainders."""
    for value in _values_of_keyword("multipleOf", schema):
        if not isinstance(value, Decimal):
            continue  # llguidance reports the mistake
        try:
            significant = int("".join(map(str, value.normalize().as_tuple().digits)))
        except (InvalidOperation, ValueError):
            continue
        if significant > MAX_MULTIPLE_OF:
            raise Refused(f"multipleOf {value} has {significant} remainders; at most {MAX_MULTIPLE_OF} are possible")


def _values_of_keyword(keyword: str, schema: Any) -> Iterator[Any]:
    waiting = [(schema, False)]  # and whether its keys are names of schemas
    while waiting:
        part, by_name = waiting.pop()
        if isinstance(part, dict):
            if keyword in part and not by_name:
                yield part[keyword]
            for key, value in part.items():
                if by_name or key not in _DATA:
                    waiting.append((value, key in _BY_NAME and not by_name))
        elif isinstance(part, list):
            waiting += ((one, False) for one in part)


def _any_token(mask: bytes, start: int, ends: frozenset[int]) -> int | None:
    """The first allowed token from byte `start` on, cyclically, that does not end the text. Searches by bytes, because
    a vocabulary may have a hundred thousand tokens."""
    for first, part in ((start, mask[start:]), (0, mask[:start])):
        while rest := part.lstrip(b"\0"):
            first += len(part) - len(rest)
            tokens = [8 * first + bit for bit in range(8) if rest[0] >> bit & 1]
            if going_on := [token for token in tokens if token not in ends]:
                return going_on[0]
            first, part = first + 1, rest[1:]
    return None


def follow(tokenizer: LLTokenizer, grammar: str) -> float:
    """Compile the grammar, and follow it for a few random tokens. Returns the median CPU time of the masks after the
    first one, in seconds. Raises Refused."""
    took: list[float] = []
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    chance = random.Random(0)
    for place in range(_NUM_TOKENS):
        began_s = time.thread_time()
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        took_s = time.thread_time() - began_s
        if matcher.is_error():
            raise Refused(one_line(matcher.get_error()))
        took += [took_s] if place else []
        if place and took_s > MASK_S:
            limit = f"at most {1000 * MASK_S:.0f} ms are possible"
            raise Refused(f"the grammar takes {1000 * took_s:.0f} ms of CPU time for one token; {limit}")
        if matcher.is_stopped():
            break
        if (token := _any_token(mask, chance.randrange(len(mask)), frozenset(tokenizer.eos_tokens))) is None:
            break
        matcher.consume_token(token)
    return statistics.median(took) if took else 0.0


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """The limits of one trial."""

    cpu_s: float = 0.25  # for the whole trial; a JSON Schema with 400 properties takes 0.05 s
    memory_bytes: int = 64 * 2**20  # beyond the process's own; a JSON Schema with 400 properties takes 5 MiB

    @property
    def too_long(self) -> str:
        return f"takes more than {1000 * self.cpu_s:.0f} ms of CPU time to compile, which is the limit"

    @property
    def too_large(self) -> str:
        return f"takes more than {self.memory_bytes // 2**20} MiB of memory to compile, which is the limit"

    def hold(self) -> None:
        """Set the limits for this process."""
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        at_most = pages * resource.getpagesize() + self.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (at_most, at_most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # RLIMIT_CPU counts whole seconds; this timer is finer. Its signal has no handler, and ends the process.
        signal.setitimer(signal.ITIMER_PROF, self.cpu_s)

    def why(self, status: int) -> str:
        """What ended a process with this waitpid() status."""
        match os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0:
            case signal.SIGPROF:
                return self.too_long
            case signal.SIGABRT | signal.SIGSEGV:  # how Rust code ends when it gets no memory
                return self.too_large
        return f"cannot be compiled: its trial ended with status {status}"


class _Trials:
    def __init__(self, tokenizer: LLTokenizer, limits: TrialLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._child = 0  # the process of the running trial

    def end(self) -> None:
        """End the running trial, if any."""
        if self._child:
            os.kill(self._child, signal.SIGKILL)

    def run(self, message: bytes) -> bytes:
        """The result for a message."""
        read_end, write_end = os.pipe()
        if not (child := os.fork()):
            try:
                signal.signal(signal.SIGUSR1, signal.SIG_IGN)
                os.dup2(os.open(os.devnull, os.O_RDWR), 2)  # drop the messages of Rust code that aborts
                self._limits.hold()
                with os.fdopen(write_end, "wb") as pipe:
                    pipe.write(json.dumps(self._result(message)).encode())
            finally:
                os._exit(0)
        self._child = child
        os.close(write_end)
        answer, until_s = b"", time.monotonic() + WALL_S
        with os.fdopen(read_end, "rb", buffering=0) as pipe:
            while True:
                if not select.select([pipe], [], [], max(until_s - time.monotonic(), 0))[0]:
                    self.end()
                    until_s += WALL_S
                elif piece := pipe.read(2**16):
                    answer += piece
                else:
                    break
        _, status = os.waitpid(child, 0)
        self._child = 0
        if answer and not status:
            return answer
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:  # not by a limit of the trial
            return json.dumps({"unfinished": UNFINISHED}).encode()
        return json.dumps({"refused": self._limits.why(status)}).encode()

    def _result(self, message: bytes) -> dict[str, str]:
        kind, text, any_whitespace, prefix = json.loads(message)
        try:
            grammar = grammar_of(kind, text, any_whitespace, prefix)
            mask_s = follow(self._tokenizer, grammar)
        except Refused as refused:
            return {"refused": str(refused)}
        except MemoryError:
            return {"refused": self._limits.too_large}
        return {"grammar": grammar, "mask_us": f"{1e6 * mask_s:.0f}"}


def main(tokenizer_path: str, vocab_size: str, cpu_s: str, memory_bytes: str, *eos_token_ids: str) -> None:
    """Serve trials until stdin ends."""
    os.nice(_NICE)
    ends = [int(token) for token in eos_token_ids]
    tokenizer = LLTokenizer(tokenizer_path, n_vocab=int(vocab_size), eos_token=ends or None)
    trials = _Trials(tokenizer, TrialLimits(float(cpu_s), int(memory_bytes)))
    signal.signal(signal.SIGUSR1, lambda *_: trials.end())
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    while (head := stdin.read(_HEAD.size)) and (message := stdin.read(*_HEAD.unpack(head))):
        answer = trials.run(message)
        stdout.write(_HEAD.pack(len(answer)) + answer)
        stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
