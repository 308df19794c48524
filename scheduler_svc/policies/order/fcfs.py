"""First come, first served, by arrival (the default of vLLM, SGLang and TensorRT-LLM)."""

from __future__ import annotations

from scheduler_svc.policies.api import KeyedOrder, RequestView


class FirstComeFirstServed(KeyedOrder):
    """Orders by queue position."""

    key_is_constant = True

    def key(self, request: RequestView) -> int:
        """The same for all requests."""
        return 0  # equal keys: by queue position
