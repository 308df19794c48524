"""The tokens that the grammars of requests allow, slot by slot, with matchers of llguidance
(https://github.com/guidance-ai/llguidance).

A matcher runs on the host, and needs the tokens of its sequence. So before a row with a grammar samples its next token,
the host waits until it has the last token. By then the forward pass is queued. What a matcher allows depends only on
the sequence, so a preempted request, or one that continues on another worker, gets the same tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask, fill_next_token_bitmask_par
from torch import Tensor

from gpu_worker.device import upload
from gpu_worker.errors import ModelError
from gpu_worker.sampling.compiled import NO_TOKENIZER, Compiled, PreparedGrammars, compile_grammar
from paceline.v1.worker_pb2 import NewSequence, StepPlan
from services.runtime.model.grammars import SHARE_S, SLOW_STEP_S, one_line

Int32s = npt.NDArray[np.int32]

# CPU time that a grammar may take in a step while other sequences wait. Most masks take 0.02 ms.
MAX_RENEWAL_S = 0.01  # to compile the grammar again when its lexer is full
MAX_ROW_S = 0.01  # for one token; a sequence fails at its MAX_SLOW_ROWS-th slow token
MAX_SLOW_ROWS = 3
FEW_ROWS = 4  # the executor's threads are not worth starting for these
NOT_PREPARED = "grammar: the scheduler has not ordered its compilation"
MISFIT = "grammar: the output so far does not fit it"


@dataclass(frozen=True, slots=True)
class GrammarMask:
    """The tokens that rows may sample, on the device. Other rows may sample any token."""

    rows: Tensor  # int64 [n]
    bits: Tensor  # uint8 [n, bytes]: token 0 is the lowest bit of the first byte
    refused: dict[int, str]  # by slot: why no token can follow; such a row has no bit set


@dataclass(slots=True)
class _Held:
    """A slot's matcher, or why it has none. Matchers of one grammar are copies of a matcher at the start of a text."""

    grammar: str
    num_prompt: int
    original: Compiled | None = None
    matcher: LLMatcher | None = None
    num_read: int = 0  # tokens of the sequence that the matcher has read, plus the prompt's
    num_slow: int = 0  # tokens for which this row was blamed, see _share_out
    error: str = ""

    def begin(self, original: Compiled) -> None:
        self.original, self.matcher, self.num_read = original, original.matcher.deep_copy(), self.num_prompt

    @property
    def failed(self) -> bool:
        return self.matcher is not None and self.matcher.is_error()

    def read_new(self, tokens: Int32s) -> bool:
        """`tokens`: all known tokens of the sequence. Reads those that are new, and returns whether they fit the
        grammar. After the end of a text only end tokens follow."""
        news, self.num_read = tokens[self.num_read :].tolist(), max(self.num_read, len(tokens))
        matcher = self.matcher
        return matcher is None or all(matcher.consume_token(token) for token in news if not matcher.is_stopped())


def load_tokenizer(path: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """A tokenizer for grammars, from the checkpoint's tokenizer.json. Raises ModelError if that is not possible."""
    if not path.is_file():
        raise ModelError(f"there is no {path}")
    if not eos_token_ids:
        raise ModelError("the model has no token that ends a sequence")
    try:
        return LLTokenizer(str(path), n_vocab=vocab_size, eos_token=list(eos_token_ids))
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from error


@dataclass
class Grammars:
    """The matchers by slot. Used only by the model's thread, with the plans in order."""

    tokenizer: LLTokenizer | None
    vocab_size: int
    device: torch.device
    _of: dict[int, _Held] = field(init=False, default_factory=dict)
    _prepared: PreparedGrammars = field(init=False, default_factory=PreparedGrammars)
    _is_slow: bool = field(init=False, default=False)  # whether the masks of the last step were slow

    @cached_property
    def _executor(self) -> LLExecutor:
        """The executor. Its threads start with the first work."""
        return LLExecutor()

    def reset(self, prepared: PreparedGrammars) -> None:
        """A new link: no slot has a sequence."""
        self._of.clear()
        self._prepared = prepared

    def apply(self, plan: StepPlan) -> None:
        """Free and add sequences. The plan must be checked before."""
        if self._of and plan.free_slots:
            for slot in np.frombuffer(plan.free_slots, "<i4").tolist():
                self._of.pop(slot, None)
        for sequence in plan.new_sequences:
            if sequence.sampling.grammar:
                self._of[sequence.slot] = self._add_sequence(sequence)

    def of(self, slots: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
        """The rows with a grammar, and their slots, of a batch that samples in these slots."""
        if not self._of:
            return []
        return [(row, slot) for row, slot in enumerate(slots.tolist()) if slot in self._of]

    def mask(self, asking: Sequence[tuple[int, int]], tokens_of: Callable[[int], Int32s]) -> GrammarMask:
        """The mask for the result of `of`, which must not be empty. `tokens_of`: all tokens of a slot's sequence."""
        held = [self._of[slot] for _, slot in asking]
        bits = allocate_token_bitmask(len(held), self.vocab_size)
        for (_, slot), one in zip(asking, held, strict=True):
            if not one.error and not one.read_new(tokens := tokens_of(slot)):
                self._renew(one, tokens)
        self._fill(held, range(len(held)), bits)
        if exhausted := [i for i, one in enumerate(held) if not one.error and one.failed]:
            for i in exhausted:
                self._renew(held[i], tokens_of(asking[i][1]))
            self._fill(held, exhausted, bits)
        for i, one in enumerate(held):
            if one.failed and not one.error:
                assert one.matcher is not None
                one.error = f"grammar: {one_line(one.matcher.get_error())}"
            if one.error:
                bits[i] = 0
        refused = {slot: one.error for (_, slot), one in zip(asking, held, strict=True) if one.error}
        rows = np.array([row for row, _ in asking], np.int64)
        return GrammarMask(upload(rows, self.device), upload(bits.view(np.uint8), self.device), refused)

    def _fill(self, held: Sequence[_Held], which: Iterable[int], bits: npt.NDArray[np.int32]) -> None:
        able = [(one, one.matcher, i) for i in which if (one := held[i]).matcher is not None and not one.error]
        if len(able) <= FEW_ROWS or self._is_slow:
            costs: list[tuple[float, _Held]] = []
            for one, matcher, i in able:
                began_s = time.thread_time()
                fill_next_token_bitmask(matcher, bits, i)
                costs.append((time.thread_time() - began_s, one))
            self._share_out(costs)
            return
        began_s = time.monotonic()
        fill_next_token_bitmask_par(self._executor, [(matcher, i) for _, matcher, i in able], bits)
        self._is_slow = time.monotonic() - began_s > SLOW_STEP_S

    def _share_out(self, costs: list[tuple[float, _Held]]) -> None:
        """Blame the rows with slow masks. A row is blamed if it takes longer than a row may. If all rows together take
        longer than a step may, more rows that take longer than SHARE_S are blamed: first those that were blamed before,
        then those that cost the most. As a result, a batch of many rows that are each below MAX_ROW_S delays other
        sequences for only a few steps."""
        total_s = 0.0
        for cpu_s, one in sorted(costs, key=lambda cost: (cost[1].num_slow, cost[0])):
            total_s += cpu_s
            if cpu_s > MAX_ROW_S:
                self._blame(one, cpu_s, f"the limit is {1000 * MAX_ROW_S:.0f} ms")
            elif total_s > SLOW_STEP_S and cpu_s > SHARE_S:
                self._blame(
                    one, cpu_s, f"the limit for all structured outputs of a step is {1000 * SLOW_STEP_S:.0f} ms"
                )
        self._is_slow = total_s > SLOW_STEP_S

    def _blame(self, one: _Held, cpu_s: float, limit: str) -> None:
        one.num_slow += 1
        if one.num_slow == MAX_SLOW_ROWS and not one.failed:
            times = f"for the {MAX_SLOW_ROWS}rd time"
            one.error = f"grammar: takes {1000 * cpu_s:.0f} ms of CPU time for a token {times}; {limit}"

    def _renew(self, one: _Held, tokens: Int32s) -> None:
        """Compile a grammar again when its lexer is full. All matchers of a grammar share the limited lexer."""
        assert one.original is not None
        assert one.matcher is not None
        newest = self._prepared.get(one.grammar)
        if newest is None or newest is one.original:  # otherwise another row has already compiled it again
            if one.original.cpu_s > MAX_RENEWAL_S:
                one.error = f"grammar: {one_line(one.matcher.get_error())}"
                return
            newest = self._compile(one.grammar)
            self._prepared.replace(one.grammar, newest)
        one.begin(newest)
        if not one.read_new(tokens):
            assert one.matcher is not None
            one.error = f"{MISFIT}: {one_line(one.matcher.get_error())}"

    def _add_sequence(self, sequence: NewSequence) -> _Held:
        held = _Held(sequence.sampling.grammar, sequence.num_prompt_tokens)
        if self.tokenizer is None:
            held.error = NO_TOKENIZER
            return held
        if (prepared := self._prepared.get(held.grammar)) is None:
            held.error = NOT_PREPARED
        else:
            held.begin(prepared)
        return held

    def _compile(self, grammar: str) -> Compiled:
        assert self.tokenizer is not None
        return compile_grammar(self.tokenizer, grammar)
