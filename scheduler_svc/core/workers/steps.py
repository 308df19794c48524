"""The stages of a worker's steps: scheduled and waiting for the cache, and in flight until the result is back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_svc.core.workers.decision import Decision
from scheduler_svc.core.workers.slots import DecodeRows


@dataclass(slots=True)
class Prefill:
    """A running sequence with known tokens that no plan computes yet."""

    slot: int
    num_tokens: int  # known tokens at admission
    num_planned: int  # of these, tokens that are computed once the plans in flight have run

    @property
    def remaining_tokens(self) -> int:
        return self.num_tokens - self.num_planned


class PrefillChunk(NamedTuple):
    """A prefill row of a step. After the step, `num_computed` of `num_tokens` known tokens are computed."""

    slot: int
    generation: int
    num_computed: int
    num_tokens: int

    @property
    def samples(self) -> bool:
        return self.num_computed == self.num_tokens


class StepInFlight(NamedTuple):
    """What a plan asked for. Kept until its result comes back."""

    step: int
    rows: DecodeRows
    decode_step: int  # valid if the step has rows
    num_releases: int  # of the slot ledger when the plan was made
    chunks: tuple[PrefillChunk, ...]
    num_sampled: int
    new_tokens: int  # prompt tokens that it computes
    context_tokens: int  # tokens that its decoding rows attend to

    @property
    def num_rows(self) -> int:
        return len(self.rows) + len(self.chunks)

    def slots_and_generations(self) -> Iterator[tuple[int, int]]:
        """Slots and generations of all its rows."""
        yield from zip(self.rows.slots.tolist(), self.rows.generations.tolist(), strict=True)
        yield from ((chunk.slot, chunk.generation) for chunk in self.chunks)


@dataclass(slots=True)
class PendingStep:
    """A scheduled step that waits for the cache to answer its exchange."""

    worker: int
    decision: Decision
    num_releases: int  # of the slot ledger when the step was scheduled
    # (sequence, index of its admission), if the worker is lost before the answer
    orphans: list[tuple[int, int]] = field(default_factory=list)
