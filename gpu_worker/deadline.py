"""When a step that has not come back is taken for hung. No clock in here: it is told how much time has passed."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from paceline.v1.worker_pb2 import StepPlan

# Of the time between two calls of passed(), no more counts: a process that was stopped, or a machine that slept, is
# late without a fault of the step's.
MOST_AT_ONCE_S = 0.5
# A step may take so many times as long as the slowest of so many before it, and hang_s.
TIMES_SLOWEST = 10.0
NUM_REMEMBERED = 200
# Fewer prompt tokens than that say little about what one costs: such a step counts with the decodes.
FEW_TOKENS = 64
# So many steps with more of them, and what one costs is known.
NUM_LONG_STEPS = 20
# To look at so many cached tokens takes a prompt token as long as all else that is done for it where a model is 170
# wide (of d channels: 4 d operations for each of them, against 24 d * d); in wider ones less.
CACHED_TOKENS = 1024
# Fields of a plan that make the device do something that it may not have done before.
COMPUTED = {"prefill_tokens", "copy_from", "skip_decodes"}
# Sampling parameters that do not: a grammar was compiled before its sequence came, and its masks are limited.
PREPARED = {"grammar"}


class Samples:
    """Of the last NUM_REMEMBERED steps of a kind what one took, or a token of it; and behind how many found tokens."""

    __slots__ = ("_found", "_num", "_seconds")

    def __init__(self) -> None:
        self._seconds = np.zeros(NUM_REMEMBERED)
        self._found = np.zeros(NUM_REMEMBERED)
        self._num = 0  # ever

    def __len__(self) -> int:
        return min(self._num, NUM_REMEMBERED)

    def add(self, seconds: float, found: float) -> None:
        place = self._num % NUM_REMEMBERED
        self._seconds[place], self._found[place] = seconds, found
        self._num += 1

    def slowest_s(self, found: float) -> float:
        """Of these, each as if it had been behind so many found tokens, if it was behind fewer."""
        times = np.maximum(1.0, (CACHED_TOKENS + found) / (CACHED_TOKENS + self._found))
        return float((self._seconds * times).max())


@dataclass(slots=True)
class Pace:
    """What steps have taken of late, and so what the next one may take. It outlives links.

    A step that does something for the first time may compile kernels for minutes. So nothing is known until
    NUM_REMEMBERED steps after the last plan that had a field, one of COMPUTED or of a sequence's sampling, which no
    plan had before it (a long prompt samples many steps after the plan that brings it). And nothing is ever known of
    plans that copy between device and host, whose size is not their tokens. What prompt tokens cost grows with what is
    cached before them: by how much has been measured if it was computed here, or if a step of late was behind as much
    that was found.
    """

    hang_s: float  # 0: nothing is ever known
    _fields: set[str] = field(default_factory=set)  # that some plan had
    _num_alike: int = 0  # steps since the last of these was new
    _found: dict[int, int] = field(default_factory=dict)  # cached tokens with which the sequence in a slot came
    # Seconds of short steps, and seconds for each prompt token of long ones.
    _short: Samples = field(default_factory=Samples)
    _token: Samples = field(default_factory=Samples)

    def found_before(self, plan: StepPlan) -> float:
        """Behind how many tokens that their sequence found cached the plan's prompt tokens are, on average. To be asked
        once for each plan, in order."""
        for one in plan.new_sequences:
            self._found[one.slot] = one.num_cached_tokens
        slots, counts = array("i", plan.prefill_slots), array("i", plan.prefill_tokens)
        behind = sum(self._found.get(slot, 0) * count for slot, count in zip(slots, counts, strict=False))
        return behind / (sum(counts) or 1)

    def allowed_s(self, plan: StepPlan, num_prefill: int, found: float) -> float | None:
        """None: nobody knows. To be asked once for each plan, in order."""
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
        """A step with so many prompt tokens, behind so many that were found, is done."""
        self._num_alike += 1
        if num_prefill < FEW_TOKENS:
            self._short.add(seconds, found)
        else:
            self._token.add(seconds / num_prefill, found)


@dataclass(frozen=True, slots=True)
class Allowance:
    """Seconds that a step may take: so many, and so many more for each token that it may compute. The first of a link,
    which may compile kernels, at least `first_step_s`; later ones less, when the worker knows its pace."""

    first_step_s: float
    step_s: float
    token_s: float
    max_num_seqs: int  # decodes in a step at the most: a plan does not name them
    pace: Pace

    def of(self, plan: StepPlan, num_prefill: int, found: float = 0) -> float:
        allowed_s = self.step_s + self.token_s * (num_prefill + self.max_num_seqs)
        known_s = self.pace.allowed_s(plan, num_prefill, found)
        if plan.step == 1:
            return max(allowed_s, self.first_step_s)
        return allowed_s if known_s is None else min(allowed_s, known_s)


@dataclass(slots=True)
class StepWatch:
    """The steps in flight of one link. Only the oldest one runs, or is overdue."""

    allowance: Allowance
    # Step, prompt tokens, found tokens before them, allowed seconds.
    _in_flight: deque[tuple[int, int, float, float]] = field(default_factory=deque)
    _age_s: float = 0.0  # of the oldest one
    last_begun: int = 0  # step

    @property
    def allowed_s(self) -> float:
        """What the step that runs may take; 0 if none does."""
        return self._in_flight[0][3] if self._in_flight else 0.0

    def begun(self, plan: StepPlan) -> None:
        if not self._in_flight:
            self._age_s = 0.0
        num_prefill = sum(memoryview(plan.prefill_tokens).cast("i")) if plan.prefill_tokens else 0
        self.last_begun = plan.step
        found = self.allowance.pace.found_before(plan)
        self._in_flight.append((plan.step, num_prefill, found, self.allowance.of(plan, num_prefill, found)))

    def finished(self, seconds: float) -> None:
        """The oldest one is done, and has taken so long."""
        step, num_prefill, found, _ = self._in_flight.popleft()
        if step > 1:
            self.allowance.pace.took(num_prefill, found, seconds)
        self._age_s = 0.0

    def passed(self, elapsed_s: float) -> tuple[int, float] | None:
        """So much time has passed since the last call. Returns the step that is overdue now, if one is, and how long it
        was allowed to take."""
        if not self._in_flight:
            return None
        self._age_s += min(elapsed_s, MOST_AT_ONCE_S)
        step, *_, allowed_s = self._in_flight[0]
        return (step, allowed_s) if self._age_s > allowed_s else None


def _fields_of(plan: StepPlan) -> set[str]:
    names = COMPUTED & {descriptor.name for descriptor, _ in plan.ListFields()}
    for sequence in plan.new_sequences:
        fields = {descriptor.name for descriptor, _ in sequence.sampling.ListFields()}
        names.update(f"sampling.{name}" for name in fields - PREPARED)
    return names
