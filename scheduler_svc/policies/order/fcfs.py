"""First come, first served, by arrival (the default of vLLM, SGLang and TensorRT-LLM)."""

from __future__ import annotations

from typing import ClassVar

from scheduler_svc.core.policy.order import KeyedOrder
from scheduler_svc.core.requests.request import RequestView


class FirstComeFirstServed(KeyedOrder):
    """Orders by queue position."""

    key_is_constant: ClassVar[bool] = True

    def key(self, request: RequestView) -> int:
        """The same for all requests."""
        return 0  # equal keys: by queue position
