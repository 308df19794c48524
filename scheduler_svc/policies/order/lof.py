"""Longest output first, by what the request may generate (SGLang `lof`)."""

from __future__ import annotations

from scheduler_svc.core.policy import KeyedOrder
from scheduler_svc.core.request import Request


class LongestOutputFirst(KeyedOrder):
    def key(self, request: Request) -> int:
        return -request.max_new_tokens
