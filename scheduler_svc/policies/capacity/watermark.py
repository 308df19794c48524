"""Allocate now, preempt later (vLLM): admit while the blocks fit and a watermark stays free."""

from __future__ import annotations

from scheduler_svc.policies.api import CapacityPolicy, RequestView, Step, Verdict
from scheduler_svc.policies.options import Share


class Watermark(CapacityPolicy):
    """At an admission, the share `watermark` of the pool stays free, so that running sequences can grow before a
    preemption. For a preempted request that resumes it is `resume_watermark`: without that hysteresis, the growth of
    the other sequences would preempt it again. Neither holds when nothing runs: otherwise no request could ever start.

    The whole prompt has to fit, though only its first chunk is allocated (vLLM's `scheduler_reserve_full_isl`).
    """

    def __init__(self, watermark: Share = 0.0, resume_watermark: Share | None = None) -> None:
        self.watermark = watermark
        self.resume_watermark = watermark if resume_watermark is None else resume_watermark

    def admit(self, step: Step, request: RequestView, need_blocks: int) -> Verdict:
        """Admit the request if its whole prompt and the reserve fit the available blocks."""
        share = self.resume_watermark if request.num_preemptions else self.watermark
        reserve = int(share * step.total_blocks) if step.num_running or step.num_admissions else 0
        whole = step.need_blocks(request, step.uncached_tokens(request))
        return Verdict.ADMIT if whole + reserve <= step.available_blocks else Verdict.STOP
