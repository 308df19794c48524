"""The sequence that was admitted last is preempted first (vLLM fcfs; TensorRT-LLM pauses from the end)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from scheduler_svc.core.policy.interfaces import Mode
from scheduler_svc.policies.api import PreemptionPolicy, Running, Step


class LastIn(PreemptionPolicy):
    """Preempts the sequences that were admitted last."""

    def __init__(self, requeue: Literal["arrival", "front", "back"] = "arrival", mode: Mode = "recompute") -> None:
        self.requeue = requeue
        self.mode = mode

    def victims(self, step: Step) -> Iterable[Running]:
        """Running sequences, the last admitted first."""
        return reversed(step.running)
