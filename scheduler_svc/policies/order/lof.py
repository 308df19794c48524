"""Longest output first, by what the request may generate (SGLang `lof`)."""

from __future__ import annotations

from scheduler_svc.policies.api import KeyedOrder, RequestView


class LongestOutputFirst(KeyedOrder):
    """Orders by `max_new_tokens`, largest first."""

    key_is_constant = True

    def key(self, request: RequestView) -> int:
        """Minus the tokens that the request may generate."""
        return -request.max_new_tokens
