"""What comes of a composition."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_svc.core.arrays import Longs, Slots
from scheduler_svc.core.requests.request import TOKEN_BYTES, Request

# Of the sequences that a plan seats: it brings all their tokens, the cached ones too. Less than half of what a message
# may have (services/runtime/rpc.py), since block tables come on top: as much again where a block has one token.
MAX_PLAN_BYTES = 7 * 2**20


class OutOfBlocks(Exception):
    """What runs needs `shortfall_blocks` more than there are: somebody has to give way."""

    def __init__(self, shortfall_blocks: int) -> None:
        super().__init__(f"{shortfall_blocks} blocks are missing")
        self.shortfall_blocks = shortfall_blocks


class PlannedAdmission(NamedTuple):
    request: Request
    num_tokens: int  # to compute in this step
    num_new_tokens: int  # to take blocks for, after the cached prefix
    num_uncached_tokens: int


@dataclass(slots=True)
class Admitted:
    """What counts against the budgets of those that are let in while a step is composed."""

    tenant_tokens: Counter[str] = field(default_factory=Counter)  # that they may grow to
    loras: set[str] = field(default_factory=set)
    num_bytes: int = 0  # in the plan

    def add(self, request: Request) -> None:
        self.num_bytes += plan_bytes(request)
        self.tenant_tokens[request.tenant] += request.max_total_tokens
        if request.lora:
            self.loras.add(request.lora)


def plan_bytes(request: Request) -> int:
    """What a plan takes to seat it, but for its block table."""
    return request.num_tokens * TOKEN_BYTES + request.sampling.ByteSize()


class Decision(NamedTuple):
    """What came of a composition."""

    growth: Slots  # one block each; a slot may stand several times
    growth_generations: Longs
    decodes: list[int] | None  # slots; None: all that decode
    chunks: list[tuple[int, int, int]]  # (slot, generation, tokens)
    admissions: list[PlannedAdmission]
    shares: bool  # the admissions may share what the step is to compute
    rejected: list[tuple[Request, str, str]]  # (request, reason, detail): first of the queue that did not get in
    closed: tuple[str, str] | None  # why nobody was offered a place: reason, detail
