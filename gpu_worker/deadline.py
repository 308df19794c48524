"""Decides when a step that has not returned counts as hung. It reads no clock: the caller passes elapsed time."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from paceline.v1.worker_pb2 import StepPlan

# At most this much time between two calls of passed() counts. More means that the process was stopped, or that the
# machine slept, and not that the step is slow.
MOST_AT_ONCE_S = 0.5
# A step may take TIMES_SLOWEST times as long as the slowest of the last NUM_REMEMBERED steps, plus hang_s.
TIMES_SLOWEST = 10.0
NUM_REMEMBERED = 200
# A step with fewer prompt tokens says little about the cost of a prompt token. It counts as a decode step.
FEW_TOKENS = 64
# After this many long steps, the cost of a prompt token is known.
NUM_LONG_STEPS = 20
# For a prompt token, attention over this many cached tokens takes as long as all other work, in a model of hidden size
# 170. (Per layer and with hidden size d: 4 d operations for each cached token, and 24 d * d for the rest.) In larger
# models, attention takes a smaller part.
CACHED_TOKENS = 1024
# Fields of a plan that change the kind of work in a step. The first step with such a field may compile kernels.
COMPUTED = {"prefill_tokens", "draft_slots", "copy_from", "skip_decodes"}
# Sampling parameters that cannot make a step slow: a grammar is compiled before the worker gets its sequence, and there
# is a time limit for its masks.
PREPARED = {"grammar"}


class Samples:
    """The last NUM_REMEMBERED steps of a kind: seconds per step or per token, and found tokens (see Pace)."""

    __slots__ = ("_found", "_num", "_seconds")

    def __init__(self) -> None:
        self._seconds = np.zeros(NUM_REMEMBERED)
        self._found = np.zeros(NUM_REMEMBERED)
        self._num = 0  # since the start

    def __len__(self) -> int:
        return min(self._num, NUM_REMEMBERED)

    def add(self, seconds: float, found: float) -> None:
        place = self._num % NUM_REMEMBERED
        self._seconds[place], self._found[place] = seconds, found
        self._num += 1

    def slowest_s(self, found: float) -> float:
        """The slowest of these. Steps with fewer found tokens are scaled to `found` of them."""
        if not found:
            return float(self._seconds.max())  # the same, in a sixth of the time
        times = np.maximum(1.0, (CACHED_TOKENS + found) / (CACHED_TOKENS + self._found))
        return float((self._seconds * times).max())


@dataclass(slots=True)
class Pace:
    """How long recent steps took, and so how long the next step may take. The pace is kept when a link ends.

    A step that does something for the first time may compile kernels for minutes. So the pace is unknown until
    NUM_REMEMBERED steps after the last plan with a new field: one of COMPUTED, or of a sequence's sampling. (So many
    steps, because a sampling field has its effect late: a long prompt is computed in many steps before the first token
    is sampled.) It is also unknown until NUM_REMEMBERED short steps are measured, and for long steps until
    NUM_LONG_STEPS long ones are. The pace is always unknown for plans that copy between device and host, because the
    cost of these copies does not depend on tokens.

    A prompt token costs more the more tokens are before it. For tokens that earlier chunks of the same sequence
    computed, the measured steps already contain this cost. Found tokens are the tokens that were cached when the
    sequence came. Their cost is estimated, unless a recent step had as many of them."""

    hang_s: float  # 0: the pace is always unknown
    _fields: set[str] = field(default_factory=set)  # the fields of all plans so far
    _num_alike: int = 0  # steps since the last new field
    _found: dict[int, int] = field(default_factory=dict)  # by slot: cached tokens with which its sequence came
    # Seconds of short steps, and seconds per prompt token of long steps.
    _short: Samples = field(default_factory=Samples)
    _token: Samples = field(default_factory=Samples)

    def found_before(self, plan: StepPlan) -> float:
        """The found tokens before the plan's prompt tokens, on average. Call this once for each plan, in order."""
        for one in plan.new_sequences:
            self._found[one.slot] = one.num_cached_tokens
        slots, counts = _chunks(plan)
        behind = sum(self._found.get(slot, 0) * count for slot, count in zip(slots, counts, strict=False))
        return behind / (sum(counts) or 1)

    def allowed_s(self, plan: StepPlan, num_prefill: int, found: float) -> float | None:
        """The seconds that the plan may take; None: unknown. Call this once for each plan, in order."""
        new = _fields_of(plan) - self._fields
        if new:
            self._fields |= new
            self._num_alike = 0
        known = self.hang_s and self._num_alike >= NUM_REMEMBERED and len(self._short) == NUM_REMEMBERED
        if not known or plan.swap_out_to or plan.swap_in_to:
            return None
        expected_s = self._short.slowest_s(found)
        if num_prefill >= FEW_TOKENS:
            if len(self._token) < NUM_LONG_STEPS:
                return None
            expected_s += self._token.slowest_s(found) * num_prefill
        return self.hang_s + TIMES_SLOWEST * expected_s

    def took(self, num_prefill: int, found: float, seconds: float) -> None:
        """A step has ended, with `num_prefill` prompt tokens after `found` found tokens."""
        self._num_alike += 1
        if num_prefill < FEW_TOKENS:
            self._short.add(seconds, found)
        else:
            self._token.add(seconds / num_prefill, found)


@dataclass(frozen=True, slots=True)
class Allowance:
    """The seconds that a step may take: a fixed part, and a part for each token that it may compute. The first step of
    a link, which may compile kernels, gets at least `first_step_s`. Later steps get less when the worker knows its
    pace."""

    first_step_s: float
    step_s: float
    token_s: float
    max_num_seqs: int  # the limit of decodes in a step, because a plan does not list them
    pace: Pace

    def of(self, plan: StepPlan, num_prefill: int, found: float = 0) -> float:
        allowed_s = self.step_s + self.token_s * (num_prefill + self.max_num_seqs)
        known_s = self.pace.allowed_s(plan, num_prefill, found)
        if plan.step == 1:
            return max(allowed_s, self.first_step_s)
        return allowed_s if known_s is None else min(allowed_s, known_s)


@dataclass(slots=True)
class StepWatch:
    """The steps in flight of one link. Only the oldest step runs, or can be overdue."""

    allowance: Allowance
    # Step, prompt tokens, found tokens before them, allowed seconds.
    _in_flight: deque[tuple[int, int, float, float]] = field(default_factory=deque)
    _age_s: float = 0.0  # of the oldest step
    last_begun: int = 0  # step number

    @property
    def allowed_s(self) -> float:
        """The seconds that the running step may take; 0 if no step runs."""
        return self._in_flight[0][3] if self._in_flight else 0.0

    def begun(self, plan: StepPlan) -> None:
        if not self._in_flight:
            self._age_s = 0.0
        num_prefill = sum(_chunks(plan)[1])
        self.last_begun = plan.step
        found = self.allowance.pace.found_before(plan)
        self._in_flight.append((plan.step, num_prefill, found, self.allowance.of(plan, num_prefill, found)))

    def finished(self, seconds: float) -> None:
        """The oldest step has ended after this many seconds."""
        step, num_prefill, found, _ = self._in_flight.popleft()
        if step > 1:
            self.allowance.pace.took(num_prefill, found, seconds)
        self._age_s = 0.0

    def passed(self, elapsed_s: float) -> tuple[int, float] | None:
        """Count the time since the last call. Returns the overdue step and its allowed seconds, if a step is
        overdue."""
        if not self._in_flight:
            return None
        self._age_s += min(elapsed_s, MOST_AT_ONCE_S)
        step, *_, allowed_s = self._in_flight[0]
        return (step, allowed_s) if self._age_s > allowed_s else None


def _chunks(plan: StepPlan) -> tuple[array[int], array[int]]:
    """The slots with prompt tokens, and how many each has. Draft rows cost the same as prompt tokens."""
    slots, counts = array("i", plan.prefill_slots), array("i", plan.prefill_tokens)
    if plan.draft_slots:
        slots.frombytes(plan.draft_slots)
        counts.extend(1 + count for count in array("i", plan.draft_counts))
    return slots, counts


def _fields_of(plan: StepPlan) -> set[str]:
    names = COMPUTED & {descriptor.name for descriptor, _ in plan.ListFields()}
    for sequence in plan.new_sequences:
        fields = {descriptor.name for descriptor, _ in sequence.sampling.ListFields()}
        names.update(f"sampling.{name}" for name in fields - PREPARED)
    return names
