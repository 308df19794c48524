"""The result of scheduling one step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_svc.core.arrays import Longs, Slots
from scheduler_svc.core.requests.request import TOKEN_BYTES, Request

# Bytes of the new sequences in one plan, at most: all their tokens, cached ones included. Less than half of the message
# limit (services/runtime/rpc.py), because block tables come on top: as much again if a block has one token.
MAX_PLAN_BYTES = 7 * 2**20


class OutOfBlocks(Exception):
    """Running sequences need `shortfall_blocks` more blocks than there are: a sequence has to be preempted."""

    def __init__(self, shortfall_blocks: int) -> None:
        super().__init__(f"{shortfall_blocks} blocks are missing")
        self.shortfall_blocks = shortfall_blocks


class PlannedAdmission(NamedTuple):
    request: Request
    num_tokens: int  # to compute in this step
    num_new_tokens: int  # tokens to take blocks for, after the cached prefix
    num_uncached_tokens: int


@dataclass(slots=True)
class Admitted:
    """What the requests admitted so far in this step add to the budgets."""

    tenant_tokens: Counter[str] = field(default_factory=Counter)  # tokens that they may grow to, by tenant
    loras: set[str] = field(default_factory=set)
    num_bytes: int = 0  # bytes in the plan

    def add(self, request: Request) -> None:
        self.num_bytes += plan_bytes(request)
        self.tenant_tokens[request.tenant] += request.max_total_tokens
        if request.lora:
            self.loras.add(request.lora)


def plan_bytes(request: Request) -> int:
    """Bytes that the request takes in a plan as a new sequence, without its block table."""
    return request.num_tokens * TOKEN_BYTES + request.sampling.ByteSize()


class Decision(NamedTuple):
    """The result of scheduling one step."""

    growth: Slots  # one block for each entry; a slot may occur several times
    growth_generations: Longs
    decodes: list[int] | None  # slots; None: all decoding slots
    chunks: list[tuple[int, int, int]]  # (slot, generation, tokens)
    admissions: list[PlannedAdmission]
    shares: bool  # the admissions may share tokens that this step computes
    rejected: list[tuple[Request, str, str]]  # (request, reason, detail): the first of the queue that were not admitted
    closed: tuple[str, str] | None  # why no request was offered a slot: reason, detail
