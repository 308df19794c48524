"""Shortest prompt first. Waiting moves a long prompt ahead of later requests, so no request waits for ever."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from scheduler_svc.policies.api import KeyedOrder, RequestView


class ShortestPromptFirst(KeyedOrder):
    def __init__(self, ageing_tokens_per_s: Annotated[float, Field(ge=0)] = 100.0) -> None:
        """Each second in the queue counts like a prompt that is `ageing_tokens_per_s` tokens shorter."""
        super().__init__()
        self.ageing_tokens_per_s = ageing_tokens_per_s

    def key(self, request: RequestView) -> float:
        # All keys fall at the same rate, so the order of two requests never changes: the key needs no clock.
        return request.num_prompt_tokens + self.ageing_tokens_per_s * request.arrival_s
