"""First come, first served, by arrival (vLLM's and SGLang's default).

A preempted request comes back at the place its arrival gives it, as in vLLM; in SGLang it goes to the tail.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_svc.core.queue import WaitingQueue
from scheduler_svc.core.request import Request


class FirstComeFirstServed:
    def order(self, waiting: WaitingQueue, now_s: float) -> Iterable[Request]:
        return waiting
