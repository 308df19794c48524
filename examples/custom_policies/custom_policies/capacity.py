"""TensorRT-LLM's GUARANTEED_NO_EVICT: an admitted request can always run to its end, so none is evicted."""

from __future__ import annotations

from scheduler_svc.policies.api import CapacityPolicy, RequestView, Step, Verdict


class ReserveAll(CapacityPolicy):
    reserves_prompt = True  # blocks for the whole prompt at once, though it may be computed in chunks

    def __init__(self, prefix_aware: bool = True) -> None:
        self.prefix_aware = prefix_aware
        self.free_blocks = 0  # promised to no request yet

    def begin(self, step: Step) -> None:
        self.free_blocks = step.available_blocks - step.promised_blocks()

    def admit(self, step: Step, request: RequestView, need_blocks: int) -> Verdict:
        if self.prefix_aware and step.another_computes_prefix_of(request):
            return Verdict.SKIP  # soon it finds that prefix in the cache; others may pass it
        # The KV of the last token is never stored, so a request may be one token longer than the pool.
        total_blocks = min(step.blocks_for(request.max_total_tokens), step.total_blocks)
        growth_blocks = total_blocks - step.blocks_for(request.num_tokens)
        if need_blocks + growth_blocks > self.free_blocks:
            return Verdict.STOP  # no request may pass it, or a long one would wait for ever
        self.free_blocks -= need_blocks + growth_blocks
        return Verdict.ADMIT
