"""The sequence with the fewest generated tokens is preempted first, so that the least work is lost (SGLang's
retraction). SGLang moves it to the end of the queue; here only `requeue` "back" does that."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from scheduler_svc.core.policy.interfaces import Mode
from scheduler_svc.policies.api import PreemptionPolicy, Running, Step


class FewestOutput(PreemptionPolicy):
    """Preempts the sequences that have generated least."""

    def __init__(self, requeue: Literal["arrival", "front", "back"] = "arrival", mode: Mode = "recompute") -> None:
        self.requeue = requeue
        self.mode = mode

    def victims(self, step: Step) -> Iterable[Running]:
        """By generated tokens, then by prompt length (longest first), then newest first."""
        newest_first = step.running[::-1]
        return sorted(newest_first, key=lambda s: (s.num_output_tokens, -s.request.num_prompt_tokens))
