"""One batch after the other (TensorRT-LLM STATIC_BATCH): admits only while nothing runs, with room to completion."""

from __future__ import annotations

from scheduler_svc.policies.api import RequestView, Step, Verdict
from scheduler_svc.policies.capacity.guaranteed_no_evict import GuaranteedNoEvict


class StaticBatch(GuaranteedNoEvict):
    """Admits requests as GuaranteedNoEvict does, but only to a worker that runs nothing."""

    def __init__(self) -> None:
        super().__init__(prefix_aware=False)

    def admit(self, step: Step, request: RequestView, need_blocks: int) -> Verdict:
        """STOP while any sequence runs on the worker."""
        return Verdict.STOP if step.num_running else super().admit(step, request, need_blocks)
