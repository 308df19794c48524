"""The least urgent sequence is preempted first; of equal ones the one that arrived last (vLLM priority)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from scheduler_svc.core.policy.interfaces import Mode
from scheduler_svc.policies.api import PreemptionPolicy, Running, Step


class LowestPriority(PreemptionPolicy):
    """Preempts the least urgent sequences."""

    def __init__(self, requeue: Literal["arrival", "front", "back"] = "arrival", mode: Mode = "recompute") -> None:
        self.requeue = requeue
        self.mode = mode

    def victims(self, step: Step) -> Iterable[Running]:
        """By priority, lowest first, then the last arrival first."""
        return sorted(step.running, key=lambda sequence: (sequence.request.priority, -sequence.request.arrival_index))
