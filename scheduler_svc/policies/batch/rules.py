"""What the batch policies have in common."""

from __future__ import annotations

from scheduler_svc.core.policy.step import Step


def may_cut(step: Step, num_tokens: int, chunked_prefill: bool) -> bool:
    """Whether a prompt that waits, with so many tokens to compute, may run in pieces.

    Without chunks it runs whole or waits, unless no step could ever hold it: then it takes what this one has left, and
    goes on as any prompt that has begun. It may have been accepted while chunks were on, or have grown so long before
    it was preempted, and nothing that was accepted is lost.
    """
    return chunked_prefill or num_tokens > step.max_batched_tokens


def reject_after_preemption(step: Step) -> None:
    step.reject_all("preemption", f"{len(step.preempted)} were preempted in this step")
