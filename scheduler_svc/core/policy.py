"""The three decisions of a step, as interfaces (DESIGN §4): order, capacity, batch.

Policies are pure: they see read-only views and return values. They hold no clock and no randomness but what they are
given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from scheduler_svc.core.queue import WaitingQueue
from scheduler_svc.core.request import Request


@dataclass(frozen=True, slots=True)
class PoolView:
    """A worker's blocks. `available_blocks` are free or cached without a user: what an allocation can get."""

    total_blocks: int
    available_blocks: int
    num_running: int


class OrderPolicy(Protocol):
    """In which order waiting requests are offered a place."""

    def order(self, waiting: WaitingQueue, now_s: float) -> Iterable[Request]: ...


class CapacityPolicy(Protocol):
    """Which requests may hold blocks."""

    def may_admit(self, pool: PoolView, need_blocks: int) -> bool:
        """Whether a request that takes `need_blocks` from the pool may be admitted."""
        ...

    def victims(self, running: Sequence[Request]) -> Iterable[Request]:
        """Running requests in the order in which they give way when a running one needs a block.

        `running` is in order of admission; its first is never taken, so that something always makes progress.
        """
        ...


class BatchPolicy(Protocol):
    """How many tokens of which request run in a step."""

    def prefill_budget(self, budget_tokens: int, num_decodes: int) -> int:
        """Tokens left for prefill when `num_decodes` rows decode under a budget of `budget_tokens`."""
        ...

    def chunks(self, remaining: Sequence[int], budget_tokens: int) -> list[int]:
        """Share `budget_tokens` among prefills with so many tokens left each, in their order; 0 is allowed."""
        ...


@dataclass(frozen=True, slots=True)
class Policies:
    order: OrderPolicy
    capacity: CapacityPolicy
    batch: BatchPolicy
