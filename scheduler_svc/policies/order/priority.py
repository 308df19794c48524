"""Most urgent first, stable within a priority (vLLM `--scheduling-policy priority`; TensorRT-LLM's PRIORITY queue).

Both order by (priority, arrival) and let low priorities starve; ageing is ours. A request gains `ageing_per_s` for each
second since its arrival. All gain at the same rate, so two requests never change their order: the key is constant.
"""

from __future__ import annotations

from scheduler_svc.policies.api import KeyedOrder, RequestView
from scheduler_svc.policies.options import Amount


class Priority(KeyedOrder):
    """Orders by priority, with ageing; larger priorities first."""

    key_is_constant = True

    def __init__(self, ageing_per_s: Amount = 0.0) -> None:
        super().__init__()
        self.ageing_per_s = ageing_per_s

    def key(self, request: RequestView) -> float:
        """Minus the priority that the request would have had at time 0, ageing included."""
        return self.ageing_per_s * request.arrival_s - request.priority
