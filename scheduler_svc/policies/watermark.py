"""Allocate now, preempt later (vLLM): admit while the blocks of the known tokens fit and a watermark stays free."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from scheduler_svc.core.policy import PoolView
from scheduler_svc.core.request import Request


class Watermark:
    """`fraction` of the pool stays free at an admission, so that running sequences can grow before they preempt.

    The default is vLLM V0's. It does not hold when nothing runs: then the request could wait for ever.
    Victims: last admitted first, recomputed later.
    """

    def __init__(self, fraction: float = 0.01) -> None:
        if not 0 <= fraction < 1:
            raise ValueError(f"watermark: {fraction} is not in [0, 1)")
        self.fraction = fraction

    def may_admit(self, pool: PoolView, need_blocks: int) -> bool:
        reserve = math.ceil(self.fraction * pool.total_blocks) if pool.num_running else 0
        return need_blocks + reserve <= pool.available_blocks

    def victims(self, running: Sequence[Request]) -> Iterable[Request]:
        return reversed(running[1:])
