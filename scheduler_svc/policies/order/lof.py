"""Longest output first, by what the request may generate (SGLang `lof`)."""

from __future__ import annotations

from typing import ClassVar

from scheduler_svc.core.policy.order import KeyedOrder
from scheduler_svc.core.requests.request import RequestView


class LongestOutputFirst(KeyedOrder):
    """Orders by `max_new_tokens`, largest first."""

    key_is_constant: ClassVar[bool] = True

    def key(self, request: RequestView) -> int:
        """Minus the tokens that the request may generate."""
        return -request.max_new_tokens
