"""Rules that the batch policies share."""

from __future__ import annotations

from scheduler_svc.policies.api import Step


def may_cut(step: Step, num_tokens: int, chunked_prefill: bool) -> bool:
    """Whether a waiting prompt with this many tokens to compute may run in pieces.

    Without chunks it runs whole or waits, unless no step could ever hold it. Then it takes what this step has left, and
    continues like any prompt that has begun. Such prompts exist: a request may have been accepted while chunks were on,
    or have grown by its output before it was preempted. An accepted request must not be lost.
    """
    return chunked_prefill or num_tokens > step.max_batched_tokens


def reject_after_preemption(step: Step) -> None:
    """Note that no waiting request is admitted because the step has preempted sequences."""
    step.reject_all("preemption", f"preempted in this step: {len(step.preempted)}")
