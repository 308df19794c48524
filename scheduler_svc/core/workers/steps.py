"""The stages of a worker's steps: decided, pending until the cache answers, and in flight until the result is back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_svc.core.arrays import Longs, Slots
from scheduler_svc.core.requests.request import TOKEN_BYTES, Request
from scheduler_svc.core.workers.slots import DecodeRows

# Limit for the bytes of a plan's new sequences, as plan_bytes() counts them. A plan with a single new sequence may
# exceed it. It is less than half of the message limit (services/runtime/rpc.py), because the block tables come on top:
# with blocks of one token, a table is as large as the tokens.
MAX_PLAN_BYTES = 7 * 2**20


class OutOfBlocks(Exception):
    """Running sequences need `shortfall_blocks` more blocks than there are: a sequence has to be preempted."""

    def __init__(self, shortfall_blocks: int) -> None:
        super().__init__(f"{shortfall_blocks} blocks are missing")
        self.shortfall_blocks = shortfall_blocks


class PlannedAdmission(NamedTuple):
    """A waiting request that a step admits, before the cache has granted its blocks."""

    request: Request
    num_tokens: int  # to compute in this step
    num_new_tokens: int  # tokens to take blocks for, after the cached prefix
    num_uncached_tokens: int


@dataclass(slots=True)
class Admitted:
    """What requests add to the step's budgets. A request counts from the moment when the step reserves a slot for it,
    even if it is not admitted in the end."""

    tenant_tokens: Counter[str] = field(default_factory=Counter)  # tokens that they may grow to, by tenant
    loras: set[str] = field(default_factory=set)
    num_bytes: int = 0  # bytes in the plan

    def add(self, request: Request) -> None:
        self.num_bytes += plan_bytes(request)
        self.tenant_tokens[request.metadata.tenant] += request.max_total_tokens
        if request.metadata.lora:
            self.loras.add(request.metadata.lora)


def plan_bytes(request: Request) -> int:
    """Bytes that the request takes in a plan as a new sequence: all its tokens, cached ones included, and its sampling
    parameters. The block table is not counted."""
    return request.num_tokens * TOKEN_BYTES + request.sampling.ByteSize()


class DraftRow(NamedTuple):
    """A row of speculative decoding. It replaces the decode row of a drafting sequence, and computes the last known
    token of the sequence and the draft tokens after it."""

    slot: int
    generation: int
    num_tokens: int  # known tokens of the sequence
    draft_tokens: list[int]


class Decision(NamedTuple):
    """The result of scheduling one step."""

    growth: Slots  # one block for each entry; a slot may occur several times
    growth_generations: Longs
    decodes: list[int] | None  # slots; None: all decoding slots
    chunks: list[tuple[int, int, int]]  # (slot, generation, tokens)
    admissions: list[PlannedAdmission]
    shares: bool  # the admissions may share tokens that this step computes
    rejected: list[tuple[Request, str, str]]  # requests that were looked at and not admitted: (request, reason, detail)
    closed: tuple[str, str] | None  # why no request was offered a slot: reason, detail
    drafts: Sequence[DraftRow] = ()
    ended_drafts: Sequence[tuple[int, int]] = ()  # slots that stop drafting, and decode in this step; their generations


@dataclass(slots=True)
class PendingStep:
    """A scheduled step that waits for the cache to answer its exchange."""

    worker: int
    decision: Decision
    num_releases: int  # of the slot ledger when the step was scheduled
    planned_s: float
    # indexes of its operations in the exchange: growth (None: nothing grows), and admissions
    extend: int | None = None
    admits: list[int] = field(default_factory=list)
    # (sequence, index in `admits`), if the worker is lost before the answer
    orphans: list[tuple[int, int]] = field(default_factory=list)


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
    decode_step: int  # valid if `rows` is not empty
    num_releases: int  # of the slot ledger when the plan was made
    chunks: tuple[PrefillChunk, ...]
    num_sampled: int
    new_tokens: int  # tokens of its prefill chunks: of prompts, and earlier output of preempted or resumed requests
    context_tokens: int  # tokens that its decoding rows and draft rows attend to
    planned_s: float
    sent_s: float
    drafts: Sequence[DraftRow] = ()

    @property
    def num_decodes(self) -> int:
        """Decode rows and draft rows. Prefill chunks that sample do not count."""
        return len(self.rows) + len(self.drafts)

    @property
    def num_draft_tokens(self) -> int:
        return sum(len(row.draft_tokens) for row in self.drafts)

    @property
    def num_rows(self) -> int:
        """Its sequences, and its draft tokens: a draft token costs about as much as a row of another sequence."""
        return len(self.rows) + len(self.chunks) + len(self.drafts) + self.num_draft_tokens

    def slots_and_generations(self) -> Iterator[tuple[int, int]]:
        """Slots and generations of all its rows."""
        yield from zip(self.rows.slots.tolist(), self.rows.generations.tolist(), strict=True)
        yield from ((chunk.slot, chunk.generation) for chunk in self.chunks)
        yield from ((row.slot, row.generation) for row in self.drafts)
