"""Reserve to completion (TensorRT-LLM GUARANTEED_NO_EVICT): an admitted request is never preempted.

A request may start if the pool has all blocks that it and the running sequences can ever need. The first request that
does not fit ends the search. With `prefix_aware`, a request waits while another computes its prefix; others may pass.
"""

from __future__ import annotations

from scheduler_svc.policies.api import CapacityPolicy, RequestView, Step, Verdict


class GuaranteedNoEvict(CapacityPolicy):
    """Admits a request only if the blocks for all its tokens are left."""

    reserves_prompt = True

    def __init__(self, prefix_aware: bool = True) -> None:
        self.prefix_aware = prefix_aware
        self._unpromised_blocks = 0

    def begin(self, step: Step) -> None:
        """Count the blocks that are promised to no running sequence."""
        self._unpromised_blocks = step.available_blocks - step.promised_blocks()

    def admit(self, step: Step, request: RequestView, need_blocks: int) -> Verdict:
        """Reserve the request's blocks to completion, or stop. SKIP while another request computes its prefix."""
        if self.prefix_aware and step.another_computes_prefix_of(request):
            return Verdict.SKIP
        shared_blocks = step.blocks_for(request.num_tokens) - need_blocks
        # Its last token is never computed. Alone it fits even if it is one token longer than the pool.
        to_completion = min(step.blocks_for(request.max_total_tokens), step.total_blocks) - shared_blocks
        if to_completion > self._unpromised_blocks:
            return Verdict.STOP
        self._unpromised_blocks -= to_completion
        return Verdict.ADMIT
